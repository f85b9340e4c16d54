"""`fill_with_offset_map`, its gradient, and `finalize_shared_tensor`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import ConfigError
from shoal.ops import checks
from shoal.ops._op import Op, new_size
from shoal.ops.unique import reference
from shoal.ops.unique.shared import Fill, SharedTensor
from shoal.ragged import Ragged


def fill_with_offset_map(
    pos: Any, value: Any, value_offset_map: Ragged, value_buffer: SharedTensor, dims: Any
) -> SharedTensor:
    """Copy each key's vector to all of the key's positions in the buffer.

    Args:
        pos: ragged int64 with one row per entry of ``dims``: flat indices of unique keys.
        value: float32 1-D, the concatenated vectors of those keys, each as wide as its row's ``dims``.
        value_offset_map: the ``value_offset`` of `unique_key_with_value_and_offset`.
        value_buffer: its ``value_buffer``, written in place. Nothing is written when an argument is refused.
        dims: the widths.

    Returns:
        ``value_buffer``. A gradient flows to ``value`` once the buffer is finalized.
    """
    op = "fill_with_offset_map"
    if not isinstance(value_buffer, SharedTensor):
        raise ConfigError(f"{op}: value_buffer must be a SharedTensor, got {type(value_buffer).__name__}")
    buffer = value_buffer.buffer(op)
    pos, offset_splits, offsets, dims = _map_arguments(op, pos, value_offset_map, dims)
    value = checks.floats(value, op, "value").float()
    fill = Fill(value, pos.tensor, pos.row_splits, offset_splits, offsets, dims)
    if torch.compiler.is_compiling() or type(value) is not Tensor or type(buffer) is not Tensor:
        # A traced program stays free of side effects: everything is written when the buffer is finalized.
        value_buffer._fills.append(fill)
        return value_buffer
    if buffer.is_cpu:
        _fill_native(fill, buffer, offsets is value_buffer._offsets)
    else:
        _fill_device(fill, buffer, offsets is value_buffer._offsets)
    if value.requires_grad:
        value_buffer._fills.append(fill)
    return value_buffer


def fill_with_offset_map_gradient(pos: Any, grad: Any, value_offset_map: Ragged, dims: Any) -> Tensor:
    """The gradient of fill and finalize with respect to ``value``: for each element of ``pos``, the sum of the slices
    of ``grad`` at all offsets of its key."""
    op = "fill_with_offset_map_gradient"
    pos, offset_splits, offsets, dims = _map_arguments(op, pos, value_offset_map, dims)
    grad = checks.constant(checks.floats(grad, op, "grad")).float()
    return _gradient(pos.tensor, pos.row_splits, grad, offset_splits, offsets, dims)


def finalize_shared_tensor(shared_tensor_handles: Any, dtype: torch.dtype, shape: Any) -> Tensor:
    """Return the buffer of a shared tensor; its handle cannot be used afterwards.

    Args:
        shared_tensor_handles: the same handle, repeated once per fill that it depends on.
        dtype: ``torch.float32``.
        shape: a hint such as ``[None]`` or ``[length]``; one that contradicts the buffer raises.

    Returns:
        float32 1-D; zero where nothing was filled in. Its gradient flows to every ``value`` that was filled in.
    """
    op = "finalize_shared_tensor"
    handles = list(checks.tensors(shared_tensor_handles, op, "shared_tensor_handles"))
    if not handles:
        raise ConfigError(f"{op}: shared_tensor_handles must hold at least one handle, got none")
    handle = handles[0]
    if not isinstance(handle, SharedTensor) or any(other is not handle for other in handles):
        raise ConfigError(f"{op}: all handles must be one and the same SharedTensor, got {handles}")
    if dtype != torch.float32:
        raise ConfigError(f"{op}: a shared tensor must be float32, got {dtype}")
    buffer = handle.buffer(op)
    if shape is not None:
        hint = list(shape)
        if len(hint) != 1 or (hint[0] is not None and hint[0] != -1 and hint[0] != handle.size):
            raise ConfigError(f"{op}: shape must be [{handle.size}], the buffer's, or [None], got {hint}")
    handle._finalized = True
    fills, handle._fills = handle._fills, []
    if torch.compiler.is_compiling() or type(buffer) is not Tensor:
        return _fill_all(
            [f.value for f in fills], [f.pos for f in fills], [f.pos_splits for f in fills],
            [f.offset_splits for f in fills], [f.offsets for f in fills],
            [d for f in fills for d in f.dims], [len(f.dims) for f in fills], buffer,
        )  # fmt: skip
    if not fills:
        return buffer
    if buffer.is_inference() and not torch.is_inference_mode_enabled():
        buffer = buffer.clone()  # made in inference mode, so autograd cannot use it
    return _Connect.apply(buffer, fills, *[f.value for f in fills])


class _Connect(torch.autograd.Function):
    """The filled buffer, as a function of all values that were filled in."""

    @staticmethod
    def forward(ctx: Any, buffer: Tensor, fills: list[Fill], *values: Tensor) -> Tensor:
        ctx.fills = [fill._replace(value=None) for fill in fills]
        return buffer.view_as(buffer)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return (
            None,
            None,
            *(_gradient(f.pos, f.pos_splits, grad, f.offset_splits, f.offsets, f.dims) for f in ctx.fills),
        )


def _map_arguments(op: str, pos: Any, value_offset_map: Any, dims: Any) -> tuple[Ragged, Tensor, Tensor, list[int]]:
    pos = checks.ragged(pos, op, "pos")
    if not isinstance(value_offset_map, Ragged):
        if not isinstance(value_offset_map, list | tuple):
            raise ConfigError(
                f"{op}: value_offset_map must be a doubly ragged tensor, got {type(value_offset_map).__name__}"
            )
        rows = [Ragged.from_lists(row) for row in value_offset_map]
        value_offset_map = Ragged.from_row_lengths(
            Ragged.from_row_lengths(
                torch.cat([torch.empty(0, dtype=torch.int64, device=None), *(r.tensor for r in rows)]),
                torch.cat([torch.empty(0, dtype=torch.int64, device=None), *(r.row_lengths() for r in rows)]),
            ),
            [r.nrows() for r in rows],
        )
    inner = value_offset_map.values
    if not isinstance(inner, Ragged) or isinstance(inner.values, Ragged):
        raise ConfigError(
            f"{op}: value_offset_map must be ragged in two dimensions; pass value_offset as it was returned"
        )
    return (
        pos,
        inner.row_splits,
        checks.int64(inner.values, op, "value_offset_map"),
        checks.int_list(dims, op, "dims"),
    )


def _fill_native(fill: Fill, buffer: Tensor, disjoint: bool) -> None:
    assert fill.value is not None
    _check_fill(fill.pos, fill.pos_splits, fill.value, fill.offset_splits, fill.dims)
    value = fill.value.detach().contiguous()
    pos, pos_splits = fill.pos.contiguous(), fill.pos_splits.contiguous()
    offset_splits, offsets = fill.offset_splits.contiguous(), fill.offsets.contiguous()
    _core.fill_with_offset_map(
        pos.data_ptr(), pos_splits.data_ptr(), list(fill.dims),
        offset_splits.data_ptr(), offset_splits.numel() - 1, offsets.data_ptr(), offsets.numel(),
        value.data_ptr(), value.numel(), buffer.data_ptr(), buffer.numel(), disjoint,
    )  # fmt: skip


def _fill_device(fill: Fill, buffer: Tensor, disjoint: bool) -> None:
    """Fill in place, by the kernel for the buffer's device; CPU tensors are copied to that device."""
    assert fill.value is not None
    value, pos, pos_splits, offset_splits, offsets = (t.to(buffer.device) for t in fill[:5] if isinstance(t, Tensor))
    fill = Fill(value, pos, pos_splits, offset_splits, offsets, fill.dims)
    if not buffer.is_cuda or _fill_all.kernel is _fill_all.reference:
        buffer.copy_(_reference_fill(fill, buffer))
        return
    from shoal.ops.cuda.unique import fill_with_offset_map as fill_cuda

    _check_fill(pos, pos_splits, value, offset_splits, fill.dims)
    fill_cuda(pos, pos_splits, value, offset_splits, offsets, buffer, fill.dims, disjoint)


def _reference_fill(fill: Fill, buffer: Tensor) -> Tensor:
    assert fill.value is not None
    _check_fill(fill.pos, fill.pos_splits, fill.value, fill.offset_splits, fill.dims)
    return reference.fill_with_offset_map(
        fill.pos, fill.pos_splits, fill.value.detach(), fill.offset_splits, fill.offsets, buffer, fill.dims
    )


def _check_fill(pos: Tensor, pos_splits: Tensor, value: Tensor, offset_splits: Tensor, dims: Sequence[int]) -> None:
    op = "fill_with_offset_map"
    _check_pos(op, pos, pos_splits, offset_splits, dims)
    if value.dim() != 1:
        raise ConfigError(f"{op}: value must be 1-D, got shape {list(value.shape)}")


def _check_pos(op: str, pos: Tensor, pos_splits: Tensor, offset_splits: Tensor, dims: Sequence[int]) -> None:
    checks.check_same(op, "the number of dims", len(dims), "the number of rows of pos", pos_splits.shape[0] - 1)
    if pos.is_cpu:
        _core.check_row_splits(pos_splits.contiguous().data_ptr(), pos_splits.numel() - 1, pos.shape[0])


def _unpack(
    values: Sequence[Tensor | None], pos: list[Tensor], pos_splits: list[Tensor], offset_splits: list[Tensor],
    offsets: list[Tensor], dims: list[int], counts: list[int],
) -> list[Fill]:  # fmt: skip
    widths = iter(dims)
    per_fill = [[next(widths) for _ in range(count)] for count in counts]
    return [Fill(*f) for f in zip(values, pos, pos_splits, offset_splits, offsets, per_fill, strict=True)]


def _fill_all_cpu(*args: Any) -> Tensor:
    out = args[-1].clone()
    for fill in _unpack(*args[:-1]):
        _fill_native(fill, out, False)
    return out


def _fill_all_reference(*args: Any) -> Tensor:
    out = args[-1].clone()
    for fill in _unpack(*args[:-1]):
        out = _reference_fill(fill, out)
    return out


_fill_all = Op(
    "fill_with_offset_maps(Tensor[] values, Tensor[] pos, Tensor[] pos_splits, Tensor[] offset_splits,"
    " Tensor[] offsets, int[] dims, int[] counts, Tensor buffer) -> Tensor",
    cpu=_fill_all_cpu,
    reference=_fill_all_reference,
    cuda="unique:fill_with_offset_maps",
    fake=lambda *args: torch.empty_like(args[-1]),
)


def _setup_fill(ctx: Any, inputs: Any, output: Tensor) -> None:
    values, pos, pos_splits, offset_splits, offsets, dims, counts, _ = inputs
    ctx.save_for_backward(*pos, *pos_splits, *offset_splits, *offsets)
    ctx.dims, ctx.counts, ctx.sizes = dims, counts, [value.shape[0] for value in values]


def _backward_fill(ctx: Any, grad: Tensor) -> Any:
    n = len(ctx.counts)
    saved = ctx.saved_tensors
    fills = _unpack([None] * n, saved[:n], saved[n : 2 * n], saved[2 * n : 3 * n], saved[3 * n :], ctx.dims, ctx.counts)
    grads = [
        _gradient(f.pos, f.pos_splits, grad, f.offset_splits, f.offsets, f.dims)[:size]
        for f, size in zip(fills, ctx.sizes, strict=True)
    ]
    return grads, [None] * n, [None] * n, [None] * n, [None] * n, None, None, None


_fill_all.register_gradient(_backward_fill, _setup_fill)


def _check_gradient(
    pos: Tensor, pos_splits: Tensor, grad: Tensor, offset_splits: Tensor, offsets: Tensor, dims: list[int]
) -> None:
    op = "fill_with_offset_map_gradient"
    _check_pos(op, pos, pos_splits, offset_splits, dims)
    if grad.dim() != 1:
        raise ConfigError(f"{op}: grad must be 1-D, got shape {list(grad.shape)}")


def _gradient_cpu(
    pos: Tensor, pos_splits: Tensor, grad: Tensor, offset_splits: Tensor, offsets: Tensor, dims: list[int]
) -> Tensor:
    pos, pos_splits, grad = pos.contiguous(), pos_splits.contiguous(), grad.contiguous()
    offset_splits, offsets = offset_splits.contiguous(), offsets.contiguous()
    lengths = pos_splits.diff().tolist()
    out = grad.new_empty(sum(length * dim for length, dim in zip(lengths, dims, strict=True)))
    _core.fill_with_offset_map_gradient(
        pos.data_ptr(), pos_splits.data_ptr(), list(dims),
        offset_splits.data_ptr(), offset_splits.numel() - 1, offsets.data_ptr(), offsets.numel(),
        grad.data_ptr(), grad.numel(), out.data_ptr(), out.numel(),
    )  # fmt: skip
    return out


_gradient = Op(
    "fill_with_offset_map_gradient(Tensor pos, Tensor pos_splits, Tensor grad, Tensor offset_splits, Tensor offsets,"
    " int[] dims) -> Tensor",
    check=_check_gradient,
    cpu=_gradient_cpu,
    reference=reference.fill_with_offset_map_gradient,
    backward=True,
    cuda="unique:fill_with_offset_map_gradient",
    sums=True,
    fake=lambda pos, pos_splits, grad, offset_splits, offsets, dims: grad.new_empty(new_size()),
)
