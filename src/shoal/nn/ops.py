"""The ops under the modules: reading a table with autograd, as `torch.library` ops that compile into a full graph.

The table is an integer handle (see `shoal.nn.slot`). A backward op takes the table's ``tape`` as an argument that it
changes: so the compiler neither drops it nor merges two of them that look alike. In plain eager mode the same functions
run in a `torch.autograd.Function`, since the dispatch of a Python op costs more than a small lookup.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import ConfigError
from shoal.nn.pooling import pool, pool_gradient, pooled_shape
from shoal.nn.slot import find_slot

# --- rows -------------------------------------------------------------------------------------------------------------


def _rows(
    ids: Tensor, anchor: Tensor, tape: Tensor, handle: int, dim: int, create: bool, padding: int | None
) -> Tensor:
    """float32 ``[N, dim]``: the rows of int64 ``ids`` ``[N]``; zeros for ``padding``.

    With ``create`` ids without a row get one (unless the table has an active filter).
    """
    slot = find_slot(handle)
    if padding is None:
        return slot.lookup(ids, create)
    keep = ids != padding
    out = torch.zeros(ids.shape[0], dim, dtype=torch.float32, device=ids.device)
    out[keep] = slot.lookup(ids[keep], create)
    return out


def _rows_gradient(grad: Tensor, ids: Tensor, tape: Tensor, handle: int, padding: int | None) -> Tensor:
    """Hands a gradient ``[N, D]`` to the table's slot; returns the (empty) gradient of the anchor."""
    if padding is not None:
        keep = ids != padding
        ids, grad = ids[keep], grad[keep]
    # A copy, since a gradient that waits for its step must not change with a tensor that the user holds. One that is
    # applied when this pass ends is held by autograd until then, which adds to no tensor that somebody else holds.
    slot = find_slot(handle)
    waits = slot.held or slot.fused is False
    grad = grad.to(torch.float32, memory_format=torch.contiguous_format, copy=waits)
    return _hand_over(handle, ids, grad, tape)


_rows_op = torch.library.custom_op("shoal::hash_rows", _rows, mutates_args=(), device_types="cpu")
_rows_gradient_op = torch.library.custom_op(
    "shoal::hash_rows_gradient", _rows_gradient, mutates_args=("tape",), device_types="cpu"
)


@_rows_op.register_fake
def _(ids: Tensor, anchor: Tensor, tape: Tensor, handle: int, dim: int, create: bool, padding: int | None) -> Tensor:
    return anchor.new_empty(ids.shape[0], dim)


@_rows_gradient_op.register_fake
def _(grad: Tensor, ids: Tensor, tape: Tensor, handle: int, padding: int | None) -> Tensor:
    return grad.new_empty(0, dtype=torch.float32)


def _rows_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, _, ctx.tape, ctx.handle, _, _, ctx.padding = inputs
    ctx.slot = find_slot(ctx.handle)  # a graph keeps its table alive
    ctx.save_for_backward(ids)


def _rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (ids,) = ctx.saved_tensors
    gradient = _rows_gradient if _is_plain() else _rows_gradient_op
    return None, gradient(grad, ids, ctx.tape, ctx.handle, ctx.padding), None, None, None, None, None


_rows_op.register_autograd(_rows_backward, setup_context=_rows_context)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:  # a setup_context of its own would cost 50 us a call
        out = _rows(*args)
        _rows_context(ctx, args, out)
        return out

    backward = staticmethod(_rows_backward)  # pyrefly: ignore[bad-override]


def hash_rows(*args: Any) -> Tensor:
    """`_rows` with its gradient, in whatever way this call is run."""
    return _call(_rows, _Rows, _rows_op, args)


# --- bags -------------------------------------------------------------------------------------------------------------


def _bag(
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    anchor: Tensor,
    tape: Tensor,
    handle: int,
    dim: int,
    kind: int,
    length: int,
    create: bool,
    padding: int | None,
    keep_rows: bool,
) -> tuple[Tensor, Tensor]:
    """The pooled rows of bags (see `pool_reference`), and with ``keep_rows`` the rows that were read.

    Bag ``b`` is ``ids[offsets[b]:offsets[b + 1]]``, less those that are ``padding``.
    """
    slot = find_slot(handle)
    try:  # before anything is created
        _core.check_offsets(offsets.data_ptr(), offsets.numel() - 1, ids.numel())
    except ValueError as error:
        raise ConfigError(f"table {slot.table.name!r}: {error}") from None
    ids, offsets, weights, _ = _without_padding(ids, offsets, weights, padding)
    if not keep_rows:
        return slot.lookup_pooled(ids, offsets, weights, kind, length, create), torch.empty(0, dim, device="cpu")
    rows = slot.lookup(ids, create)
    return pool(rows, offsets, weights, kind, length), rows


def _bag_gradient(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    rows: Tensor | None,
    tape: Tensor,
    handle: int,
    dim: int,
    kind: int,
    length: int,
    padding: int | None,
) -> tuple[Tensor, Tensor]:
    """Hands the gradients of rows to the table's slot; returns those of the anchor and, with ``rows``, of weights."""
    n = ids.shape[0]
    ids, offsets, weights, keep = _without_padding(ids, offsets, weights, padding)
    grad = grad.float().contiguous()
    grad_rows, grad_weights = pool_gradient(grad, ids.shape[0], dim, offsets, weights, rows, kind, length)
    if rows is not None and keep is not None:
        grad_weights = grad_weights.new_zeros(n).masked_scatter_(keep, grad_weights)
    return _hand_over(handle, ids, grad_rows, tape), grad_weights


_bag_op = torch.library.custom_op("shoal::hash_bag", _bag, mutates_args=(), device_types="cpu")
_bag_gradient_op = torch.library.custom_op(
    "shoal::hash_bag_gradient", _bag_gradient, mutates_args=("tape",), device_types="cpu"
)


@_bag_op.register_fake
def _(
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    anchor: Tensor,
    tape: Tensor,
    handle: int,
    dim: int,
    kind: int,
    length: int,
    create: bool,
    padding: int | None,
    keep_rows: bool,
) -> tuple[Tensor, Tensor]:
    out = anchor.new_empty(pooled_shape(offsets.shape[0] - 1, dim, kind, length))
    if not keep_rows:
        kept: Any = 0
    else:
        kept = ids.shape[0] if padding is None else torch.library.get_ctx().new_dynamic_size()
    return out, anchor.new_empty(kept, dim)


@_bag_gradient_op.register_fake
def _(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    rows: Tensor | None,
    tape: Tensor,
    handle: int,
    dim: int,
    kind: int,
    length: int,
    padding: int | None,
) -> tuple[Tensor, Tensor]:
    weighted = 0 if rows is None else ids.shape[0]
    return grad.new_empty(0, dtype=torch.float32), grad.new_empty(weighted, dtype=torch.float32)


def _bag_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ids, offsets, weights, _, ctx.tape, ctx.handle, *ctx.shape, _, ctx.padding, ctx.keep_rows = inputs
    ctx.slot = find_slot(ctx.handle)
    ctx.save_for_backward(ids, offsets, weights, output[1] if ctx.keep_rows else None)
    ctx.set_materialize_grads(False)


def _bag_backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 12
    ids, offsets, weights, rows = ctx.saved_tensors
    gradient: Any = _bag_gradient if _is_plain() else _bag_gradient_op
    anchor, grad_weights = gradient(grad, ids, offsets, weights, rows, ctx.tape, ctx.handle, *ctx.shape, ctx.padding)
    return None, None, grad_weights if ctx.keep_rows else None, anchor, *(None,) * 8


_bag_op.register_autograd(_bag_backward, setup_context=_bag_context)


class _Bag(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:  # a setup_context of its own would cost 50 us a call
        out = _bag(*args)
        _bag_context(ctx, args, out)
        return out

    backward = staticmethod(_bag_backward)  # pyrefly: ignore[bad-override]


def hash_bag(*args: Any) -> Tensor:
    """The first result of `_bag`, with its gradient, in whatever way this call is run."""
    return _call(_bag, _Bag, _bag_op, args)[0]


# --- both -------------------------------------------------------------------------------------------------------------

_dispatch_modes = torch._C._len_torch_dispatch_stack


def _is_plain() -> bool:
    """Nobody traces: no compiler, no fake tensors, no mode."""
    return not torch.compiler.is_compiling() and not _dispatch_modes()


def _call(plain: Any, function: Any, op: Any, args: tuple[Any, ...]) -> Any:
    if torch.compiler.is_compiling() or _dispatch_modes():
        return op(*args)
    return function.apply(*args) if torch.is_grad_enabled() else plain(*args)


def _hand_over(handle: int, ids: Tensor, grads: Tensor, tape: Tensor) -> Tensor:
    find_slot(handle).add_gradient(ids, grads)
    tape.add_(1)
    return torch.zeros(0, device="cpu")


def _without_padding(
    ids: Tensor, offsets: Tensor, weights: Tensor | None, padding: int | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The bags less their padding, and which ids are left."""
    if padding is None:
        return ids, offsets, weights, None
    keep = ids != padding
    left = torch.zeros(ids.numel() + 1, dtype=torch.int64, device="cpu")  # how many of the ids before each place
    torch.cumsum(keep, 0, out=left[1:])
    return ids[keep], left[offsets], None if weights is None else weights[keep], keep
