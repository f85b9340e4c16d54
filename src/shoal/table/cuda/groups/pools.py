"""`pool_bags`: the launches that pool the rows of bags, one per segment of a row and per way to pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.table.cuda.groups.plan import Plan
from shoal.table.cuda.kernels import pooled as pk
from shoal.table.cuda.launch import cdiv, power_of_2
from shoal.table.cuda.layout import Segment
from shoal.table.cuda.shapes import pool_shape
from shoal.table.protocol import Found, Missing

if TYPE_CHECKING:
    from shoal.table.cuda.groups.fused import FusedGroup


def pool_bags(
    group: FusedGroup, plan: Plan, found: Found, padded: bool, offsets: Tensor, weights: Tensor | None, out: Tensor,
    marks: Tensor | None, missing: Missing,
) -> None:  # fmt: skip
    """Writes the pooled rows of bags, and the marks for max if requested. Must be called in the group's turn."""
    width = out.stride(0)
    unit = plan.unit if width % plan.unit == 0 else 1
    described, ids = group.described, found.ids
    each = (offsets.shape[0] - 1) // plan.features
    given = (ids, offsets, ids if weights is None else weights, plan.tables, plan.columns[unit])
    where = (described.words, described.origin, found.where, found.came, out)
    size = (group.report.count, ids.shape[0], plan.features)
    for s in group.layout.segments:
        initial = missing == "initial" and s.init != 0
        how = (weights is not None, initial, unit, s.index)
        if plan.sums.count:
            own = plan.sums
            block, warps = pool_shape(s.width)
            key = ("sums", own.covers_all, own.kind, how)
            kernel = group._kernels.get(key) or group.kernel(
                key, pk.pool, {**_constants(group, s, how, own.covers_all), "KIND": own.kind, "WIDTH": s.width,
                               "BAGS": block, "num_warps": warps},
            )  # fmt: skip
            kernel(
                own.count * cdiv(each, block), *given, plan.combiners, own.numbers, *where, *size, own.count, each,
                width // unit, *s.first,
            )  # fmt: skip
        if plan.largest.count:
            own = plan.largest
            columns = power_of_2(max(8, s.weight % 8 + s.dim))
            block, warps = pool_shape(columns)
            key = ("largest", own.covers_all, marks is not None, how)
            kernel = group._kernels.get(key) or group.kernel(
                key, pk.pool_largest, {**_constants(group, s, how, own.covers_all), "MARK": marks is not None,
                                       "WIDTH": columns, "BYTES": group.mark_bytes, "BAGS": block,
                                       "num_warps": warps},
            )  # fmt: skip
            kernel(
                own.count * cdiv(each, block), *given, own.numbers, *where, group.no_marks if marks is None else marks,
                *size, own.count, each, width // unit, *s.first,
            )  # fmt: skip
        if plan.firsts.count:
            own = plan.firsts
            block, warps = pool_shape(s.width)
            key = ("first", own.covers_all, padded, how)
            kernel = group._kernels.get(key) or group.kernel(
                key, pk.pool_first, {**_constants(group, s, how, own.covers_all), "PAD": padded, "WIDTH": s.width,
                                     "DIM": group.dim, "BAGS": block, "num_warps": warps},
            )  # fmt: skip
            kernel(
                own.count * cdiv(each, block), *given, plan.lengths, own.numbers, *where, *size, own.count, each,
                width // unit, *s.first,
            )  # fmt: skip


def _constants(group: FusedGroup, s: Segment, how: tuple[bool, bool, int, int], covers_all: bool) -> dict[str, Any]:
    weighted, initial, unit, _ = how
    return {
        "SOME": not covers_all, "WEIGHTED": weighted, "INITIAL": initial, "INIT": s.init, "INDEX": s.index, "D": s.dim,
        "STRIDE": group.layout.stride, "WEIGHT": s.weight, "UNIT": unit,
    }  # fmt: skip
