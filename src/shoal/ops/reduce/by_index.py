"""Reductions of rows that share an index: `reduce_sum`, `reduce_mean`, `reduce_sqrtn` and the fused forms."""

from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import ConfigError
from shoal.ops import checks
from shoal.ops._op import Op
from shoal.ops.reduce import reference
from shoal.ops.reduce.reference import MEAN, SQRTN, SUM

_NATIVE = {
    torch.float32: (_core.reduce_by_index_f32, _core.reduce_by_index_gradient_f32),
    torch.float64: (_core.reduce_by_index_f64, _core.reduce_by_index_gradient_f64),
}


def reduce_sum(id_indices: Any, id_values: Any, id_length: Any, name: str | None = None) -> Tensor:
    """Sum the rows that have the same target row.

    Args:
        id_indices: int64 ``[n, k]``; column 0 is the target row of each value, in any order.
        id_values: ``[n, d]``; a gradient flows to it.
        id_length: int64 1-D; element 0 is the number of output rows.

    Returns:
        ``[id_length, d]``; a row without values is zero.

    >>> reduce_sum([[2], [0], [2]], [[1, 2], [3, 4], [5, -2]], [3]).tolist()
    [[3.0, 4.0], [0.0, 0.0], [6.0, 0.0]]
    """
    return _reduce_ids("reduce_sum", id_indices, id_values, id_length, SUM)


def reduce_mean(id_indices: Any, id_values: Any, id_length: Any, name: str | None = None) -> Tensor:
    """The mean of the rows that have the same target row, zero for none, with the arguments of `reduce_sum`."""
    return _reduce_ids("reduce_mean", id_indices, id_values, id_length, MEAN)


def reduce_sqrtn(id_indices: Any, id_values: Any, id_length: Any) -> Tensor:
    """The element-wise L2 norm ``sqrt(sum x^2)`` of the rows that have the same target row.

    Despite its name this is not sum / sqrt(n). The gradient of a zero norm is zero.
    """
    return _reduce_ids("reduce_sqrtn", id_indices, id_values, id_length, SQRTN)


def fused_sorted_segment_sum(indices: Any, values: Any, shapes: Any) -> list[Tensor]:
    """Segment sums of several tensors.

    Args:
        indices: N int32/int64 vectors of segment ids in any order; ascending ones are fastest.
        values: N tensors ``[n_i, ...]``; gradients flow to them.
        shapes: N output shapes ``[B_i, ...]`` whose trailing sizes are those of ``values[i]``.

    Returns:
        Per tensor the sums, zero for a segment without elements.
    """
    op = "fused_sorted_segment_sum"
    indices = checks.tensors(indices, op, "indices")
    values = checks.tensors(values, op, "values")
    if not len(indices) == len(values) == len(shapes):
        raise ConfigError(
            f"{op}: indices, values and shapes must have one length, got {len(indices)}, {len(values)}, {len(shapes)}"
        )
    return [_segment_sum(op, i, x, v, s) for i, (x, v, s) in enumerate(zip(indices, values, shapes, strict=True))]


def _segment_sum(op: str, i: int, index: Any, value: Any, shape: Any) -> Tensor:
    index, value = checks.vector(index, op, f"indices[{i}]"), checks.floats(value, op, f"values[{i}]")
    shape = checks.int_list(shape, op, f"shapes[{i}]")
    value = checks.fit_empty(value, *shape[1:])
    if value.dim() < 1 or len(shape) != value.dim() or list(value.shape[1:]) != shape[1:]:
        raise ConfigError(f"{op}: shapes[{i}] = {shape} does not fit values[{i}] of shape {list(value.shape)}")
    width = 1
    for length in shape[1:]:
        width *= length
    return sum_by_index(index, value.reshape(value.shape[0], width), shape[0]).reshape(shape)


def fused_reduce_sum_and_split(
    id_indices: Any, id_values: Any, id_length: Any, split_dims: Any, name: str | None = None
) -> list[Tensor]:
    """`reduce_sum` to ``[id_length, d]``, with the columns split by ``split_dims``, which must add up to ``d``.

    Args:
        id_indices: int64 ``[n]``, in any order. id_values: ``[n, d]``; a gradient flows to it.
        id_length: one number. split_dims: M ints.
    """
    op = "fused_reduce_sum_and_split"
    dims = checks.int_list(split_dims, op, "split_dims")
    values = _rows(op, checks.fit_empty(checks.floats(id_values, op, "id_values"), sum(dims)))
    checks.check_same(op, "the sum of split_dims", sum(dims), "the width of id_values", values.shape[1])
    total = sum_by_index(checks.vector(id_indices, op, "id_indices"), values, checks.number(id_length, op, "id_length"))
    return [part.contiguous() for part in total.split(dims, 1)]


def sum_by_index(index: Tensor, values: Tensor, rows: int) -> Tensor:
    """``out[index[i]] += values[i]`` into ``[rows, d]`` zeros, in input order for any number of threads."""
    return _reduce(index, values, rows, SUM)


def mean_by_index(index: Tensor, values: Tensor, rows: int) -> Tensor:
    """The mean of each group; an empty one is zero."""
    return _reduce(index, values, rows, MEAN)


def _rows(op: str, values: Any) -> Tensor:
    values = checks.floats(values, op, "id_values")
    if values.dim() != 2:
        raise ConfigError(f"{op}: id_values must be 2-D, got shape {list(values.shape)}")
    return values


def _reduce_ids(op: str, id_indices: Any, id_values: Any, id_length: Any, how: int) -> Tensor:
    indices = checks.int64(id_indices, op, "id_indices")
    if indices.shape == (0,):
        indices = indices.view(0, 1)  # an empty list
    if indices.dim() != 2 or indices.shape[1] < 1:
        raise ConfigError(f"{op}: id_indices must be [n, k] with k >= 1, got shape {list(indices.shape)}")
    if not isinstance(id_length, int | torch.SymInt):
        id_length = checks.int64(id_length, op, "id_length")
        if id_length.dim() > 1 or id_length.numel() < 1:
            raise ConfigError(
                f"{op}: id_length must be 1-D with at least one element, got shape {list(id_length.shape)}"
            )
        id_length = (id_length[0] if id_length.dim() else id_length).item()
    return _reduce(indices[:, 0], _rows(op, id_values), id_length, how)


def _check(index: Tensor, values: Tensor, rows: int, how: int) -> None:
    if rows < 0:
        raise ConfigError(f"the number of output rows must be >= 0, got {rows}")
    if values.dim() != 2:
        raise ConfigError(f"the values to reduce must be 2-D, got shape {list(values.shape)}")
    if index.dim() != 1 or index.shape[0] != values.shape[0]:
        raise ConfigError(
            f"there must be one index per row, {values.shape[0]}, got indices of shape {list(index.shape)}"
        )


def _cpu(index: Tensor, values: Tensor, rows: int, how: int) -> Tensor:
    values = values.detach().contiguous()
    n, d = values.shape
    out = values.new_empty((rows, d))
    stride = index.stride(0) if n else 1
    _NATIVE[values.dtype][0](values.data_ptr(), index.data_ptr(), stride, n, d, rows, how, out.data_ptr())
    return out


def _backward_cpu(grad: Tensor, index: Tensor, how: int, values: Tensor | None, norm: Tensor | None) -> Tensor:
    grad = grad.contiguous()
    n, (rows, d) = index.shape[0], grad.shape
    out = grad.new_empty((n, d))
    values = values.contiguous() if values is not None else None
    norm = norm.contiguous() if norm is not None else None
    _NATIVE[grad.dtype][1](
        grad.data_ptr(), index.data_ptr(), index.stride(0) if n else 1, n, d, rows, how,
        values.data_ptr() if values is not None else 0, norm.data_ptr() if norm is not None else 0, out.data_ptr(),
    )  # fmt: skip
    return out


def _check_backward(grad: Tensor, index: Tensor, how: int, values: Tensor | None, norm: Tensor | None) -> None:
    if grad.dim() != 2 or index.dim() != 1:
        raise ConfigError(f"the gradient must be 2-D and indices 1-D, got {list(grad.shape)} and {list(index.shape)}")
    if how == SQRTN and (
        values is None or norm is None or norm.shape != grad.shape or values.shape != (index.shape[0], grad.shape[1])
    ):
        raise ConfigError("the gradient of reduce_sqrtn needs the values and the norms of the forward pass")


_reduce = Op(
    "reduce_by_index(Tensor index, Tensor values, SymInt rows, int how) -> Tensor",
    check=_check,
    cpu=_cpu,
    reference=reference.reduce_by_index,
    cuda="reduce:reduce_by_index",
    sums=True,
    fake=lambda index, values, rows, how: values.new_empty((rows, values.shape[1])),
)
_reduce_backward = Op(
    "reduce_by_index_backward(Tensor grad, Tensor index, int how, Tensor? values, Tensor? norm) -> Tensor",
    check=_check_backward,
    cpu=_backward_cpu,
    reference=reference.reduce_by_index_backward,
    backward=True,
    cuda="reduce:reduce_by_index_backward",
    fake=lambda grad, index, how, values, norm: grad.new_empty((index.shape[0], grad.shape[1])),
)


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    index, values, _, how = inputs
    ctx.how = how
    if how == SQRTN:
        ctx.save_for_backward(index, values, output)
    else:
        ctx.save_for_backward(index)


def _backward(ctx: Any, grad: Tensor) -> Any:
    index, *rest = ctx.saved_tensors
    values, norm = rest or (None, None)
    return None, _reduce_backward(grad, index, ctx.how, values, norm), None, None


_reduce.register_gradient(_backward, _setup)
