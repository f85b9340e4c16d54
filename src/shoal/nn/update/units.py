"""`Unit`: an update of one group; updates are merged so that each table is in only one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shoal.background.lane import Lane
from shoal.table.pooling import row_gradients
from shoal.table.protocol import Features, Group, Part, Step, groups_of

if TYPE_CHECKING:
    from shoal.nn.keeper import TableKeeper

RowsByTable = dict["TableKeeper", list[tuple[Tensor, Tensor]]]
"""Ids and gradients of rows, ``[N]`` and ``[N, dim]``, of several tables."""


class Unit(NamedTuple):
    """Gradients that make one step of the tables of a group."""

    group: Group
    keepers: tuple[TableKeeper, ...]
    """The keepers of the group's tables, in their order."""
    parts: list[Part]
    rows: RowsByTable | None = None
    """The source of the parts, if they do not come from a forward."""

    def touched(self) -> list[TableKeeper]:
        """The tables that the parts update."""
        if len(self.keepers) == 1:
            return [self.keepers[0]]
        if len(self.parts) == 1:
            places = _distinct(self.parts[0].features.tables)
        else:
            places = _distinct(tuple([place for part in self.parts for place in part.features.tables]))
        return [self.keepers[place] for place in places]


@lru_cache(maxsize=256)
def _distinct(places: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(places)))


def expand(part: Part, dim: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the table, ids and row gradients of each feature of a part, without padding. Waits for the device."""
    sizes = part.found.sizes(part.features)
    rows = row_gradients(part, dim)
    for table, ids, grads in zip(part.features.tables, part.found.ids.split(sizes), rows.split(sizes), strict=True):
        if part.features.padding is not None:
            keep = ids != part.features.padding
            ids, grads = ids[keep], grads[keep]
        yield table, ids, grads


def disjoint(units: Sequence[Unit]) -> list[Unit]:
    """Merge updates so that each table is in only one of them and each of its ids makes one step.

    Groups that share a table are updated by rows, all their tables together.
    """
    users: dict[TableKeeper, int] = {}
    for unit in units:
        for keeper in unit.touched():
            users[keeper] = users.get(keeper, 0) + 1
    if all(count == 1 for count in users.values()):
        return list(units)
    alone, rows = [], {}
    for unit in units:
        if all(users[keeper] == 1 for keeper in unit.touched()):
            alone.append(unit)
        else:
            add_rows(rows, unit)
    return alone + row_units(rows)


def add_rows(rows: RowsByTable, unit: Unit) -> None:
    """Expand the parts of an update into ``rows``."""
    for part in unit.parts:
        for table, ids, grads in expand(part, unit.group.dim):
            rows.setdefault(unit.keepers[table], []).append((ids, grads))


def row_units(rows: RowsByTable) -> list[Unit]:
    """Return updates of rows by table, with as few groups as possible."""
    keepers = list(rows)
    units = []
    for group, places in groups_of([keeper.table for keeper in keepers]):
        own = {keepers[place]: rows[keepers[place]] for place in places}
        counts = torch.tensor([sum(ids.numel() for ids, _ in parts) for parts in own.values()], device="cpu")
        ids = torch.cat([ids for parts in own.values() for ids, _ in parts]).to(group.traits.device)
        grads = torch.cat([grads for parts in own.values() for _, grads in parts]).to(group.traits.device)
        features = Features(tables=tuple(range(len(places))))
        found = group.find(ids, counts, features, missing="zeros")
        units.append(Unit(group, tuple(own), [Part(found, features, grads)], own))
    return units


def lane_of(keepers: Iterable[TableKeeper]) -> Lane | None:
    """Return the thread that reads and updates the rows of some tables; None: the calling thread does."""
    for keeper in keepers:
        if keeper.lane is not None:
            return keeper.lane
    return None


def update_all(updates: Iterable[tuple[Unit, Step]]) -> None:
    """Make updates of groups, each table in only one of them; groups over the same ranks share their exchange.

    If tables have a lane, it makes the updates later, with the given steps.
    """
    updates = list(updates)
    lane = lane_of(keeper for unit, _ in updates for keeper in unit.keepers)
    if lane is None:
        _update_now(updates)
    else:
        lane.submit(lambda: _update_now(updates))


def _update_now(updates: Sequence[tuple[Unit, Step]]) -> None:
    shared: dict[Hashable, list[tuple[Unit, Step]]] = {}
    for unit, step in updates:
        key = unit.group.traits.shares
        if key is None:
            unit.group.update(unit.parts, step=step)
        else:
            shared.setdefault((key, unit.group.traits.device), []).append((unit, step))
    for own in shared.values():
        groups: list[Any] = [unit.group for unit, _ in own]
        steps = [
            group.update_steps(unit.parts, step=step) for group, (unit, step) in zip(groups, own, strict=True)
        ]  # fmt: skip
        groups[0].together(steps)


def have_one_clock(touched: Sequence[TableKeeper]) -> bool:
    """Whether some tables have the same clock."""
    first = touched[0].clock
    return not [keeper for keeper in touched if keeper.clock is not first]


def by_clock(unit: Unit, touched: Sequence[TableKeeper]) -> list[Unit]:
    """Return the update unchanged, or one per table if the clocks of its tables, ``touched``, differ."""
    if have_one_clock(touched):
        return [unit]
    rows: RowsByTable = {}
    add_rows(rows, unit)
    return [one for keeper, parts in rows.items() for one in row_units({keeper: parts})]
