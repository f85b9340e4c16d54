"""GPU tables as a `shoal.table.protocol.Group`: in one launch sequence where their rows are plain, else one by one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from shoal.table.cuda.groups.fused import FusedGroup
from shoal.table.cuda.groups.single import SingleGroup

if TYPE_CHECKING:
    from shoal.table.cuda.table import CudaHashTable


def group_key(table: CudaHashTable) -> Hashable:
    """Tables with equal keys can be one group: equal rows and optimizers, while seeds and learning rates may differ."""
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
    """Not what asks the host about ids, brings its rows from there, or shows other numbers than rows hold."""
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
