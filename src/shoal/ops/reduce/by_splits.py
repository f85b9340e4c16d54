"""Reductions of consecutive rows: `fused_reduce_and_split_gpu`, and the first rows of each segment."""

from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import ConfigError
from shoal.ops import checks
from shoal.ops._op import Op
from shoal.ops.reduce import reference

_OP = "fused_reduce_and_split_gpu"
_NATIVE = {
    torch.float32: (_core.reduce_and_split_f32, _core.reduce_and_split_gradient_f32),
    torch.float64: (_core.reduce_and_split_f64, _core.reduce_and_split_gradient_f64),
}
_FIRST_N = {
    torch.float32: (_core.first_n_f32, _core.first_n_gradient_f32),
    torch.float64: (_core.first_n_f64, _core.first_n_gradient_f64),
}


def fused_reduce_and_split_gpu(splits: Any, embeddings: Any, slice_dims: Any, name: str | None = None) -> list[Tensor]:
    """Sum the rows of each segment and split the columns, for several tables at once, on any device.

    Args:
        splits: N vectors of row splits ``[B + 1]``, the same B for all.
        embeddings: N tensors ``[rows_i, d_i]`` with ``rows_i = splits[i][B]``; gradients flow to them.
        slice_dims: N lists of ints; list ``i`` adds up to ``d_i``.

    Returns:
        One flat list, table by table, slice by slice: ``[B, slice]``, zero for an empty segment.

    >>> [t.tolist() for t in fused_reduce_and_split_gpu([[0, 2, 2]], [[[1, 2], [3, 4]]], [[1, 1]])]
    [[[4.0], [0.0]], [[6.0], [0.0]]]
    """
    splits = checks.int64_list(splits, _OP, "splits")
    rows = checks.float_list(embeddings, _OP, "embeddings")
    cuts = [checks.int_list(s, _OP, f"slice_dims[{i}]") for i, s in enumerate(slice_dims)]
    if not splits and not rows and not cuts:
        return []
    if len(rows) == len(cuts):
        rows = [checks.fit_empty(r, sum(cut)) for r, cut in zip(rows, cuts, strict=True)]
    return _reduce(splits, rows, [d for cut in cuts for d in cut], [len(cut) for cut in cuts])


def first_n(values: Tensor, row_splits: Tensor, limit: int) -> Tensor:
    """``[rows, limit, d]``: the first ``limit`` rows of each segment of ``values`` ``[n, d]``, zero padded."""
    return _first_n(values, row_splits, limit)


def _check(splits: list[Tensor], embeddings: list[Tensor], slices: list[int], counts: list[int]) -> None:
    if not len(splits) == len(embeddings) == len(counts):
        raise ConfigError(
            f"{_OP}: splits, embeddings and slice_dims must have one length,"
            f" got {len(splits)}, {len(embeddings)}, {len(counts)}"
        )
    cut = iter(slices)
    for i, (row_splits, rows, count) in enumerate(zip(splits, embeddings, counts, strict=True)):
        if row_splits.dim() != 1 or row_splits.shape[0] < 1 or row_splits.shape != splits[0].shape:
            raise ConfigError(
                f"{_OP}: all splits must be [B + 1] with the same B, got {list(row_splits.shape)} for table {i}"
                f" and {list(splits[0].shape)} for table 0"
            )
        if rows.dim() != 2 or rows.dtype != embeddings[0].dtype:
            raise ConfigError(
                f"{_OP}: all embeddings must be 2-D of one dtype, got {rows.dtype} {list(rows.shape)} for table {i}"
            )
        width = sum(next(cut) for _ in range(count))
        checks.check_same(_OP, f"the sum of slice_dims[{i}]", width, f"the width of embeddings[{i}]", rows.shape[1])


def _per_table(slices: list[int], counts: list[int]) -> list[list[int]]:
    cut = iter(slices)
    return [[next(cut) for _ in range(count)] for count in counts]


def _cpu(splits: list[Tensor], embeddings: list[Tensor], slices: list[int], counts: list[int]) -> list[Tensor]:
    splits, embeddings = [s.contiguous() for s in splits], [e.detach().contiguous() for e in embeddings]
    segments = splits[0].numel() - 1
    outs = [embeddings[0].new_empty((segments, width)) for width in slices]
    _NATIVE[embeddings[0].dtype][0](
        [e.data_ptr() for e in embeddings], [s.data_ptr() for s in splits],
        [e.shape[0] for e in embeddings], [e.shape[1] for e in embeddings],
        _per_table(slices, counts), segments, [out.data_ptr() for out in outs],
    )  # fmt: skip
    return outs


def _backward_cpu(splits: list[Tensor], grads: list[Tensor], rows: list[int], counts: list[int]) -> list[Tensor]:
    splits, grads = [s.contiguous() for s in splits], [g.contiguous() for g in grads]
    slices = _per_table([g.shape[1] for g in grads], counts)
    outs = [grads[0].new_empty((n, sum(cut))) for n, cut in zip(rows, slices, strict=True)]
    _NATIVE[grads[0].dtype][1](
        [out.data_ptr() for out in outs], [s.data_ptr() for s in splits],
        [out.shape[0] for out in outs], [out.shape[1] for out in outs],
        slices, splits[0].numel() - 1, [g.data_ptr() for g in grads],
    )  # fmt: skip
    return outs


def _check_backward(splits: list[Tensor], grads: list[Tensor], rows: list[int], counts: list[int]) -> None:
    if not len(splits) == len(rows) == len(counts) or sum(counts) != len(grads):
        raise ConfigError(f"{_OP}: splits, rows and counts must have one length, and each slice one gradient")
    for grad in grads:
        if grad.dim() != 2 or grad.shape[0] != splits[0].shape[0] - 1 or grad.dtype != grads[0].dtype:
            raise ConfigError(f"{_OP}: a gradient must be [{splits[0].shape[0] - 1}, slice], got {list(grad.shape)}")
    if any(s.shape != splits[0].shape for s in splits):
        raise ConfigError(f"{_OP}: all splits must be [B + 1] with the same B")


_reduce = Op(
    "fused_reduce_and_split(Tensor[] splits, Tensor[] embeddings, int[] slices, int[] counts) -> Tensor[]",
    check=_check,
    cpu=_cpu,
    reference=reference.reduce_and_split,
    cuda="reduce:reduce_and_split",
    fake=lambda splits, embeddings, slices, counts: [
        embeddings[0].new_empty((splits[0].shape[0] - 1, width)) for width in slices
    ],
)
_reduce_backward = Op(
    "fused_reduce_and_split_backward(Tensor[] splits, Tensor[] grads, SymInt[] rows, int[] counts) -> Tensor[]",
    check=_check_backward,
    cpu=_backward_cpu,
    reference=lambda splits, grads, rows, counts: reference.reduce_and_split_backward(splits, grads, counts),
    backward=True,
    cuda="reduce:reduce_and_split_backward",
    fake=lambda splits, grads, rows, counts: [
        grads[0].new_empty((n, sum(cut)))
        for n, cut in zip(rows, _per_table([g.shape[1] for g in grads], counts), strict=True)
    ],
)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    splits, embeddings, _, counts = inputs
    ctx.save_for_backward(*splits)
    ctx.rows, ctx.counts = [e.shape[0] for e in embeddings], counts


def _backward(ctx: Any, grads: list[Tensor]) -> Any:
    splits = list(ctx.saved_tensors)
    return [None] * len(splits), _reduce_backward(splits, list(grads), ctx.rows, ctx.counts), None, None


_reduce.register_gradient(_backward, _setup)


def _check_first_n(values: Tensor, row_splits: Tensor, limit: int) -> None:
    if values.dim() != 2 or row_splits.dim() != 1 or row_splits.shape[0] < 1 or limit < 1:
        raise ConfigError(
            f"first_n: values must be [n, d], row_splits [rows + 1] and limit at least 1,"
            f" got {list(values.shape)}, {list(row_splits.shape)} and {limit}"
        )


def _first_n_cpu(values: Tensor, row_splits: Tensor, limit: int) -> Tensor:
    values, row_splits = values.detach().contiguous(), row_splits.contiguous()
    (n, d), rows = values.shape, row_splits.numel() - 1
    out = values.new_empty((rows, limit, d))
    _FIRST_N[values.dtype][0](values.data_ptr(), row_splits.data_ptr(), rows, n, d, limit, out.data_ptr())
    return out


def _first_n_backward_cpu(grad: Tensor, row_splits: Tensor, n: int) -> Tensor:
    grad, row_splits = grad.contiguous(), row_splits.contiguous()
    rows, limit, d = grad.shape
    out = grad.new_empty((n, d))
    _FIRST_N[grad.dtype][1](grad.data_ptr(), row_splits.data_ptr(), rows, n, d, limit, out.data_ptr())
    return out


def _check_first_n_backward(grad: Tensor, row_splits: Tensor, n: int) -> None:
    if grad.dim() != 3 or grad.shape[0] != row_splits.shape[0] - 1:
        raise ConfigError(f"the gradient of first_n must be [rows, limit, d], got {list(grad.shape)}")


_first_n = Op(
    "first_n(Tensor values, Tensor row_splits, int limit) -> Tensor",
    check=_check_first_n,
    cpu=_first_n_cpu,
    reference=reference.first_n,
    cuda="reduce:first_n",
    fake=lambda values, row_splits, limit: values.new_empty((row_splits.shape[0] - 1, limit, values.shape[1])),
)
_first_n_backward = Op(
    "first_n_backward(Tensor grad, Tensor row_splits, SymInt n) -> Tensor",
    check=_check_first_n_backward,
    cpu=_first_n_backward_cpu,
    reference=reference.first_n_backward,
    backward=True,
    cuda="reduce:first_n_backward",
    fake=lambda grad, row_splits, n: grad.new_empty((n, grad.shape[2])),
)


def _setup_first_n(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.n = inputs[0].shape[0]


_first_n.register_gradient(
    lambda ctx, grad: (_first_n_backward(grad, ctx.saved_tensors[0], ctx.n), None, None), _setup_first_n
)
