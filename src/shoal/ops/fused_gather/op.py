"""`fused_gather_embeddings_by_input` and its gradient."""

from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.buffers import empty_rows
from shoal.errors import ConfigError
from shoal.ops import checks
from shoal.ops._op import Op
from shoal.ops.fused_gather import reference

_OP = "fused_gather_embeddings_by_input"


def fused_gather_embeddings_by_input(
    fused_embeddings: Any, fused_embedding_offsets: Any, embedding_dims: Any
) -> list[Tensor]:
    """Copy each table's vectors out of one flat buffer.

    Args:
        fused_embeddings: float buffer of any shape, read flat; a gradient flows to it.
        fused_embedding_offsets: M int32 vectors of float offsets, which may repeat and overlap.
        embedding_dims: M widths.

    Returns:
        Per table ``[len(offsets), dim]``; row ``j`` starts at ``offsets[j]``.

    >>> fused_gather_embeddings_by_input([0, 1, 2, 3], [[2, 0]], [2])[0].tolist()
    [[2.0, 3.0], [0.0, 1.0]]
    """
    fused = checks.floats(fused_embeddings, _OP, "fused_embeddings")
    offsets = checks.integer_list(fused_embedding_offsets, _OP, "fused_embedding_offsets")
    return _gather(fused, offsets, checks.int_list(embedding_dims, _OP, "embedding_dims"))


def fused_gather_embeddings_by_input_gradient(
    fused_embeddings_size: Any, grads: Any, embedding_offsets: Any, embedding_dims: Any, scale: Any = 1
) -> Tensor:
    """Sum ``scale * grads`` back into a flat buffer.

    Args:
        fused_embeddings_size: the length of the buffer, an int or a tensor with one element.
        grads: M tensors ``[len(offsets[m]), dims[m]]``.
        embedding_offsets: M int32 vectors of float offsets; tables may overlap.
        embedding_dims: M widths.
        scale: multiplies every gradient, on every device.

    Returns:
        ``[fused_embeddings_size]``; zero where nothing was added. Sums run in table order, then row order.
    """
    op = "fused_gather_embeddings_by_input_gradient"
    size = checks.number(fused_embeddings_size, op, "fused_embeddings_size")
    grads = [checks.constant(g) for g in checks.float_list(grads, op, "grads")]
    offsets = checks.integer_list(embedding_offsets, op, "embedding_offsets")
    dims = checks.int_list(embedding_dims, op, "embedding_dims")
    if len(grads) == len(dims):
        grads = [checks.fit_empty(g, d) for g, d in zip(grads, dims, strict=True)]
    grads, scale = checks.scaled(grads, scale, op, "scale")
    return _gradient(size, grads, offsets, dims, scale)


def _check_gather(fused: Tensor, offsets: list[Tensor], dims: list[int]) -> None:
    checks.check_same(_OP, "the number of widths", len(dims), "the number of offset vectors", len(offsets))
    size = fused.numel()
    for m, o in enumerate(offsets):
        if o.dim() != 1:
            raise ConfigError(f"{_OP}: offsets[{m}] must be 1-D, got shape {list(o.shape)}")
        if dims[m] > size and o.shape[0]:  # checked before rows of that width are allocated
            raise ConfigError(f"{_OP}: width {dims[m]} of table {m} is more than the buffer's {size} floats")


def _tables(offsets: list[Tensor], rows: list[Tensor], dims: list[int]) -> tuple[Any, ...]:
    return (
        [o.data_ptr() for o in offsets],
        [o.dtype is torch.int64 for o in offsets],
        [r.data_ptr() for r in rows],
        [o.numel() for o in offsets],
        dims,
    )


def _gather_cpu(fused: Tensor, offsets: list[Tensor], dims: list[int]) -> list[Tensor]:
    fused, offsets = fused.detach().contiguous(), [o.contiguous() for o in offsets]
    single = fused.dtype == torch.float32
    outs = [
        empty_rows(o.numel(), dim) if single else fused.new_empty((o.numel(), dim))
        for o, dim in zip(offsets, dims, strict=True)
    ]
    _core.fused_gather(fused.data_ptr(), fused.numel(), fused.element_size(), *_tables(offsets, outs, list(dims)))
    return outs


def _check_gradient(size: int, grads: list[Tensor], offsets: list[Tensor], dims: list[int], scale: float) -> None:
    op = "fused_gather_embeddings_by_input_gradient"
    if size < 0:
        raise ConfigError(f"{op}: fused_embeddings_size must be >= 0, got {size}")
    checks.check_same(op, "the number of grads", len(grads), "the number of offset vectors", len(offsets))
    checks.check_same(op, "the number of widths", len(dims), "the number of offset vectors", len(offsets))
    for m, o in enumerate(offsets):
        grad, shape = grads[m], o.shape
        if len(shape) != 1:
            raise ConfigError(f"{op}: offsets[{m}] must be 1-D, got shape {list(shape)}")
        if grad.shape != (shape[0], dims[m]) or grad.dtype is not grads[0].dtype:
            raise ConfigError(
                f"{op}: grads[{m}] must be {grads[0].dtype} [{shape[0]}, {dims[m]}], got {grad.dtype} "
                f"{list(grad.shape)}"
            )


def _gradient_cpu(size: int, grads: list[Tensor], offsets: list[Tensor], dims: list[int], scale: float) -> Tensor:
    grads, offsets = [g.contiguous() for g in grads], [o.contiguous() for o in offsets]
    out = grads[0].new_empty(size) if grads else torch.zeros(size, dtype=torch.float32, device="cpu")
    _core.fused_gather_gradient(out.data_ptr(), size, out.element_size(), scale, *_tables(offsets, grads, dims))
    return out


_gradient = Op(
    "fused_gather_embeddings_by_input_gradient(SymInt size, Tensor[] grads, Tensor[] offsets, int[] dims, float scale)"
    " -> Tensor",
    check=_check_gradient,
    cpu=_gradient_cpu,
    reference=reference.fused_gather_embeddings_by_input_gradient,
    backward=True,
    cuda="gather:fused_gather_embeddings_by_input_gradient",
    sums=True,
    fake=lambda size, grads, offsets, dims, scale: grads[0].new_empty(size),
)
_gather = Op(
    "fused_gather_embeddings_by_input(Tensor fused, Tensor[] offsets, int[] dims) -> Tensor[]",
    check=_check_gather,
    cpu=_gather_cpu,
    reference=reference.fused_gather_embeddings_by_input,
    cuda="gather:fused_gather_embeddings_by_input",
    fake=lambda fused, offsets, dims: [
        fused.new_empty((o.shape[0], dim)) for o, dim in zip(offsets, dims, strict=True)
    ],
)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    fused, offsets, dims = inputs
    ctx.save_for_backward(*offsets)
    ctx.dims, ctx.shape = dims, fused.shape


def _backward(ctx: Any, grads: list[Tensor]) -> Any:
    offsets = list(ctx.saved_tensors)
    size = 1
    for length in ctx.shape:
        size *= length
    if not offsets:
        return None, [], None
    return _gradient(size, list(grads), offsets, ctx.dims, 1.0).view(ctx.shape), [None] * len(offsets), None


_gather.register_gradient(_backward, _setup)
