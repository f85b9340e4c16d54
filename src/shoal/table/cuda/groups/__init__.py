"""GPU tables as a `shoal.table.protocol.Group`: all in one launch sequence if their rows are plain, else one by one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from shoal.table.cuda.groups.fused import FusedGroup
from shoal.table.cuda.groups.single import SingleGroup

if TYPE_CHECKING:
    from shoal.table.cuda.table import CudaHashTable


def group_key(table: CudaHashTable) -> Hashable:
    """Tables with equal keys can form a group: equal row layouts and optimizers; seeds and rates can differ."""
    if not _fusable(table):
        return ("cuda", table.device, type(table), table.dim_size, table.serving, table.on_bad_gradient)
    segments = tuple(
        (s.dim, s.native.opt, s.native.nesterov, s.native.decoupled, s.init, s.first, s.accumulator, s.numbers(0, 0))
        for s in table._layout.segments
    )
    return ("cuda", table.device, segments, table.on_bad_gradient, table.deterministic)


def make_group(tables: tuple[Any, ...]) -> FusedGroup | SingleGroup:
    """The group of tables with equal keys."""
    return FusedGroup(tables) if _fusable(tables[0]) else SingleGroup(tables)


def _fusable(table: CudaHashTable) -> bool:
    """False for tables that ask the host about ids, fetch rows from it, or return values other than those stored."""
    layout = table._layout
    rounds = any(s.native.stochastic_rounding for s in layout.segments)
    return (
        table.grows
        and table.own_policy is None
        and not layout.serving
        and layout.plain
        and not rounds
        and not table._host.has_filter()
    )
