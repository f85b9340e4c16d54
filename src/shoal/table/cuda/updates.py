"""Gradients into the rows of a `Group`: launches of the optimizer kernels, one for each segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.table.cuda import optimizer_kernels as ok
from shoal.table.cuda.backend import interpreted
from shoal.table.cuda.group import Group, row_shape, signed
from shoal.table.cuda.launch import cdiv, launch, power_of_2
from shoal.table.cuda.layout import Segment

_AS_WRITTEN = ("ftrl", "group_ftrl")  # a difference of roots: without fused multiply-adds


@dataclass(frozen=True)
class Update:
    """What a batch of gradients comes with, besides ids and gradients."""

    rates: Sequence[Sequence[float]]
    """Learning rate of each segment, for each table of the group."""
    scales: Sequence[float]
    """Of one_bit segments, one for each segment."""
    step: int
    noise: int
    seed: int


def _multi(group: Group, s: Segment, update: Update, table: int | Tensor) -> tuple[float, Tensor | None]:
    """The rate of all rows, or the rates of the tables on the device."""
    if not isinstance(table, Tensor):
        return update.rates[table][s.index], None
    rates = [of_table[s.index] for of_table in update.rates]
    if len(set(rates)) == 1:
        return rates[0], None
    return 0.0, device_rates(group, tuple(rates))


def device_rates(group: Group, rates: tuple[float, ...]) -> Tensor:
    """Rates on the device; kept, since they rarely change."""
    cache: dict[tuple[float, ...], Tensor] = group.__dict__.setdefault("_rates", {})
    if rates not in cache:
        if len(cache) > 64:
            cache.clear()
        cache[rates] = torch.tensor(rates, dtype=torch.float32).to(group.device, non_blocking=True)
    return cache[rates]


def _constants(group: Group, s: Segment, warps: int) -> dict[str, Any]:
    cache: dict[tuple[int, int], dict[str, Any]] = group.__dict__.setdefault("_constants", {})
    if (s.index, warps) in cache:
        return cache[s.index, warps]
    options: dict[str, Any] = {"num_warps": warps}
    if s.kind in _AS_WRITTEN:
        options["enable_fp_fusion"] = False
    cache[s.index, warps] = made = {
        "OPT": s.native.opt,
        "NESTEROV": s.native.nesterov,
        "DECOUPLED": s.native.decoupled,
        "ROUND": s.native.stochastic_rounding,
        "ONE_BIT": s.codec == "one_bit",
        "INDEX": s.index,
        "D": s.dim,
        "WIDTH": s.width,
        "STRIDE": group.layout.stride,
        "WEIGHT": s.weight,
        "STATE": s.state,
        "DIM": group.layout.dim,
        **options,
    }
    return made


def apply_distinct(group: Group, rows: Tensor, ids: Tensor, table: int | Tensor, grads: Tensor, update: Update) -> None:
    """A step for each row; no two are equal. Rows may be marked FRESH."""
    n = rows.numel()
    for s in group.layout.segments:
        block, warps = distinct_shape(s.width)
        lr, rates = _multi(group, s, update, table)
        launch(
            ok.update_distinct,
            cdiv(n, block),
            rows,
            ids,
            table if rates is not None else rows,
            rates if rates is not None else grads,
            grads,
            group.arena.tensor,
            n,
            signed(update.seed),
            s.first,
            s.numbers(lr, update.scales[s.index]),
            update.step,
            signed(update.noise),
            MULTI=rates is not None,
            INIT=s.init,
            BLOCK=block,
            **_constants(group, s, warps),
        )


def apply_each(group: Group, rows: Tensor, order: Tensor, table: int | Tensor, grads: Tensor, update: Update) -> None:
    """A step for every occurrence in input order; ``rows`` are sorted, -1 first, with their positions in ``order``."""
    n = rows.numel()
    for s in group.layout.segments:
        block, warps = each_shape(s.width)
        lr, rates = _multi(group, s, update, table)
        launch(
            ok.update_each,
            cdiv(n, block),
            rows,
            order,
            table if rates is not None else rows,
            rates if rates is not None else grads,
            grads,
            group.arena.tensor,
            n,
            s.numbers(lr, update.scales[s.index]),
            update.step,
            signed(update.noise),
            MULTI=rates is not None,
            BLOCK=block,
            **_constants(group, s, warps),
        )


def apply_summed(group: Group, rows: Tensor, order: Tensor, table: int | Tensor, grads: Tensor, update: Update) -> None:
    """One step for each row with the sum of its gradients, added up in a fixed order; ``rows`` as for `apply_each`."""
    n = rows.numel()
    for s in group.layout.segments:
        tile, warps = summed_shape(s.width)
        tiles = cdiv(n, tile)
        lr, rates = _multi(group, s, update, table)
        opened = torch.empty(tiles, s.width, dtype=torch.float32, device=group.device)
        closed = torch.empty_like(opened)
        numbers = s.numbers(lr, update.scales[s.index])
        tables = (table if rates is not None else rows, rates if rates is not None else grads)
        launch(
            ok.update_summed,
            tiles,
            rows,
            order,
            *tables,
            grads,
            group.arena.tensor,
            opened,
            closed,
            n,
            numbers,
            update.step,
            signed(update.noise),
            MULTI=rates is not None,
            BLOCK=tile,
            **_constants(group, s, warps),
        )
        launch(
            ok.update_crossing,
            tiles,
            rows,
            order,
            *tables,
            opened,
            closed,
            group.arena.tensor,
            n,
            numbers,
            update.step,
            signed(update.noise),
            MULTI=rates is not None,
            TILE=tile,
            SPAN=4 if interpreted() else max(2, min(64, 4096 // s.width)),
            **_constants(group, s, 4 if s.width > 32 else 1),
        )


def count_bad(grads: Tensor, dim: int, drop: Tensor | None) -> Tensor:
    """How many rows of ``grads`` hold NaN or infinity, as an int64 on the device; marks them in ``drop`` (uint8)."""
    n = grads.numel() // dim
    bad = torch.zeros(1, dtype=torch.int64, device=grads.device)
    if n:
        width = power_of_2(dim)
        block, warps = row_shape(width)
        launch(
            ok.check_gradients,
            cdiv(n, block),
            grads,
            bad if drop is None else drop,
            bad,
            n,
            WANT_DROP=drop is not None,
            D=dim,
            WIDTH=width,
            BLOCK=block,
            num_warps=warps,
        )
    return bad


def distinct_shape(width: int) -> tuple[int, int]:
    if interpreted():
        return max(1, min(64, 8192 // width)), 1
    return max(1, min(64, 1024 // width)), 4


def each_shape(width: int) -> tuple[int, int]:
    if interpreted():
        return 16, 1
    return max(1, 256 // width), 1 if width <= 256 else 4


def summed_shape(width: int) -> tuple[int, int]:
    if interpreted():
        return 8, 1
    return max(2, min(32, 2048 // width)), 4
