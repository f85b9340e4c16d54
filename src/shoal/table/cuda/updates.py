"""Application of gradients to the rows of a `Storage`: launches of the optimizer kernels, one per segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.table.cuda.backend import interpreted
from shoal.table.cuda.kernels import optimizers as ok
from shoal.table.cuda.launch import Bound, cdiv, power_of_2, signed
from shoal.table.cuda.layout import Segment
from shoal.table.cuda.shapes import crossing_shape, distinct_shape, each_shape, row_shape, summed_shape
from shoal.table.cuda.storage import Storage


@dataclass(frozen=True)
class Update:
    """The parameters of an update, besides ids and gradients."""

    rates: Sequence[Sequence[float]]
    """The learning rate of each segment, for each table of the storage."""
    scales: Sequence[float]
    """The scales of one_bit segments, one per segment."""
    step: int
    noise: int
    seed: int


def update_rows(
    storage: Storage,
    ids: Tensor,
    rows: Tensor,
    table: int | Tensor,
    grads: Tensor,
    update: Update,
    dedup: bool,
    distinct: bool,
    deterministic: bool,
) -> None:
    """Applies the gradients of ids to their ``rows``, which `Storage.insert` returned."""
    if distinct:
        return _apply_distinct(storage, rows, ids, table, grads, update)
    storage.arena.start_fresh(rows, ids, update.seed)
    if deterministic:
        # Sorted by id, so that equal batches are summed in the same order whatever rows their ids have.
        order = torch.sort(ids, stable=True)[1]
        if isinstance(table, Tensor):
            order = order[torch.sort(table[order], stable=True)[1]]
        order = order[torch.sort(rows[order] < 0, stable=True)[1]]  # rejected ids last, where they change no sums
        ordered = rows[order]
    else:
        ordered, order = torch.sort(rows, stable=True)
    apply: Callable[..., None] = _apply_summed if dedup else _apply_each
    return apply(storage, ordered, order, table, grads, update)


def _multi(storage: Storage, s: Segment, update: Update, table: int | Tensor) -> tuple[float, Tensor | None]:
    """The rate for all rows, or the tables' rates as a tensor on the device."""
    if not isinstance(table, Tensor):
        return update.rates[table][s.index], None
    rates = tuple(of_table[s.index] for of_table in update.rates)
    if rates.count(rates[0]) == len(rates):
        return rates[0], None
    return 0.0, storage.keep(("rates", rates), lambda: _sent(storage, rates))


def _sent(storage: Storage, rates: tuple[float, ...]) -> Tensor:
    pinned = torch.tensor(rates, dtype=torch.float32, device="cpu", pin_memory=storage.device.type == "cuda")
    return storage.hold(pinned).to(storage.device, non_blocking=True)  # a captured graph repeats the copy


def _kernel(storage: Storage, fn: Any, s: Segment, multi: bool, warps: int, **further: Any) -> Bound:
    """An optimizer kernel for a segment."""

    def make() -> Bound:
        return Bound.of(
            fn, OPT=s.native.opt, NESTEROV=s.native.nesterov, DECOUPLED=s.native.decoupled,
            ROUND=s.native.stochastic_rounding, ONE_BIT=s.codec == "one_bit", INDEX=s.index, D=s.dim, WIDTH=s.width,
            STRIDE=storage.layout.stride, WEIGHT=s.weight, STATE=s.state, DIM=storage.layout.dim, MULTI=multi,
            **further, num_warps=warps, enable_fp_fusion=s.fp_fusion,
        )  # fmt: skip

    return storage.keep((fn, s.index, multi), make)


def _apply_distinct(
    storage: Storage, rows: Tensor, ids: Tensor, table: int | Tensor, grads: Tensor, update: Update
) -> None:
    """Makes a step on each of the distinct rows, which can be marked FRESH."""
    n = rows.numel()
    for s in storage.layout.segments:
        block, warps = distinct_shape(s.width)
        lr, rates = _multi(storage, s, update, table)
        tables = (rows, grads) if rates is None else (table, rates)
        _kernel(storage, ok.update_distinct, s, rates is not None, warps, INIT=s.init, BLOCK=block)(
            cdiv(n, block), rows, ids, *tables, grads, storage.arena.tensor, n, signed(update.seed), s.first,
            s.numbers(lr, update.scales[s.index]), update.step, signed(update.noise),
        )  # fmt: skip


def _apply_each(
    storage: Storage, rows: Tensor, order: Tensor, table: int | Tensor, grads: Tensor, update: Update
) -> None:
    """Makes a step per occurrence in input order; ``rows`` are sorted, -1 first, with their positions in ``order``."""
    n = rows.numel()
    for s in storage.layout.segments:
        block, warps = each_shape(s.width)
        lr, rates = _multi(storage, s, update, table)
        tables = (rows, grads) if rates is None else (table, rates)
        _kernel(storage, ok.update_each, s, rates is not None, warps, BLOCK=block)(
            cdiv(n, block), rows, order, *tables, grads, storage.arena.tensor, n,
            s.numbers(lr, update.scales[s.index]), update.step, signed(update.noise),
        )  # fmt: skip


def _apply_summed(
    storage: Storage, rows: Tensor, order: Tensor, table: int | Tensor, grads: Tensor, update: Update
) -> None:
    """Makes one step per row with the sum of its gradients, added in a fixed order; ``rows`` as for `_apply_each`."""
    n = rows.numel()
    for s in storage.layout.segments:
        tile, warps = summed_shape(s.width)
        at_once, span, crossing_warps = crossing_shape(s.width)
        tiles = cdiv(n, tile)
        lr, rates = _multi(storage, s, update, table)
        tables = (rows, grads) if rates is None else (table, rates)
        room = (tiles * s.width + 3) & ~3  # both are aligned to 16 bytes
        opened, closed = torch.empty(2, room, dtype=torch.float32, device=storage.device).unbind()
        rest = (n, s.numbers(lr, update.scales[s.index]), update.step, signed(update.noise))
        held = 0 if interpreted() else s.held
        ahead = {"HELD": held, "LINES": power_of_2(cdiv(max(held, s.dim), 32) + 1)}
        _kernel(storage, ok.update_summed, s, rates is not None, warps, **ahead, BLOCK=tile)(
            tiles, rows, order, *tables, grads, storage.arena.tensor, opened, closed, *rest
        )
        crossing = {**ahead, "TILE": tile, "TILES": at_once, "SPAN": span}
        _kernel(storage, ok.update_crossing, s, rates is not None, crossing_warps, **crossing)(
            cdiv(tiles, at_once), rows, order, *tables, opened, closed, storage.arena.tensor, *rest
        )


def count_bad(grads: Tensor, dim: int, drop: Tensor | None, before: Tensor | None = None) -> Tensor:
    """The number of rows of ``grads`` with NaN or infinity, as int64 on the device; marks them in ``drop`` (uint8).

    The number is added to ``before``, the result of another call, if that is given.
    """
    n = grads.numel() // dim
    bad = torch.zeros(1, dtype=torch.int64, device=grads.device) if before is None else before
    if n:
        width = power_of_2(dim)
        block, warps = row_shape(width)
        ok_check = Bound.of(ok.check_gradients, WANT_DROP=drop is not None, D=dim, WIDTH=width, BLOCK=block,
                            num_warps=warps)  # fmt: skip
        ok_check(cdiv(n, block), grads, bad if drop is None else drop, bad, n)
    return bad
