"""Lanes: the part of an epoch that one rank reads, and how the rest of an epoch is dealt to another number of ranks.

A lane is a list of complete units, or every W-th stripe of all units. When more or fewer ranks resume a run, each lane
keeps what only it can finish (its window, and the unit or stripes that it has begun), and units that no rank has begun
are dealt out again: every sample of the epoch is read once, however often the number of ranks changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

RULE = ("world", "rank", "striped", "units", "until")
LATER: dict[str, Any] = {"end": None, "lane": None, "lanes": []}
"""Fields that stream states of version 0.1 do not have, with their defaults."""
PLACE = ("epoch", "unit", "cursor", "stripe", "window", "batch", "end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A part of an epoch: the rule that selects it, and the position that reading has reached."""

    epoch: int
    world: int
    rank: int
    """Also the rank that seeds the order of windows."""
    striped: bool
    """Whether the stripes ``rank``, ``rank + world``, … of all units are read, rather than complete units."""
    units: tuple[int, ...] | None = None
    """Indices into the epoch's order of units; None: all if striped, else ``rank``, ``rank + world``, …."""
    until: int | None = None
    """The first stripe that is not read; None: all are read."""
    unit: int = 0
    """The index, among the lane's units, of the unit that the window begins in."""
    cursor: Any = None
    stripe: int = 0
    window: int = 0
    batch: int = 0
    end: Mapping[str, Any] | None = None
    """Where the window ends, once ``batch`` batches of it were taken: ``unit``, ``cursor`` and ``stripe``."""

    def chosen(self, count: int) -> Sequence[int]:
        """The indices of the lane's units among the ``count`` units in the epoch's order."""
        if self.units is not None:
            return self.units
        return range(count) if self.striped else range(self.rank, count, self.world)

    def rule(self) -> dict[str, Any]:
        """The rule without the position, as JSON values."""
        return {name: value for name, value in asdict(self).items() if name in RULE}


def lane_of(rule: Mapping[str, Any], place: Mapping[str, Any]) -> Lane:
    """Build a lane from JSON values."""
    units = rule["units"]
    rules = {name: rule[name] for name in RULE} | {"units": None if units is None else tuple(units)}
    return Lane(**rules, **{name: place[name] for name in PLACE})


def deal(
    lanes: Sequence[Lane], world: int, sizes: Callable[[int], Sequence[int]], read: Callable[[Lane], float]
) -> list[list[Lane]]:
    """Deal the unfinished lanes of an epoch, and of earlier ones, to ``world`` ranks; return the lanes of each rank.

    Args:
        lanes: all lanes that the previous ranks had not finished.
        sizes: the sizes of the units of an epoch, in its order.
        read: how much of a lane's current unit has been read, in the same measure as ``sizes``.
    """
    dealt: list[list[Lane]] = [[] for _ in range(world)]
    loads = [0.0] * world

    def give(lane: Lane, size: float) -> None:
        rank = loads.index(min(loads))
        dealt[rank].append(lane)
        loads[rank] += size

    last = max((lane.epoch for lane in lanes), default=0)
    for lane in lanes:
        if lane.epoch < last:
            give(lane, 0.0)
    current = [lane for lane in lanes if lane.epoch == last]
    total = sizes(last)
    open_stripes = [lane for lane in current if lane.striped and lane.until is None]
    furthest = max(open_stripes, key=lambda lane: _end(lane)["stripe"], default=None)
    free: list[int] = []
    for lane in current:
        if lane.striped:
            if lane.until is None and furthest is not None:
                lane = replace(lane, until=_end(furthest)["stripe"])
            if lane.batch or (lane.unit < len(total) and lane.stripe < (lane.until or 0)):
                give(lane, 1.0)
            continue
        chosen, end = lane.chosen(len(total)), _end(lane)
        begun = end["unit"] + (end["cursor"] is not None)
        free += chosen[begun:]
        if lane.batch or lane.unit < begun:
            left = sum(total[one] for one in chosen[lane.unit : begun]) - read(lane)
            give(replace(lane, units=tuple(chosen[:begun])), left)
    if furthest is not None and (end := _end(furthest))["unit"] < len(total):
        for rank in range(world):
            dealt[rank].append(_new(last, world, rank, True, end))
    shares: list[list[int]] = [[] for _ in range(world)]
    for unit in sorted(free, key=lambda one: (-total[one], one)):
        rank = loads.index(min(loads))
        shares[rank].append(unit)
        loads[rank] += total[unit]
    for rank, share in enumerate(shares):
        if share:
            lane = _new(last, world, rank, False, {"unit": 0, "cursor": None, "stripe": 0})
            dealt[rank].append(replace(lane, units=tuple(sorted(share))))
    return [sorted(each, key=lambda lane: lane.epoch) for each in dealt]


def _end(lane: Lane) -> Mapping[str, Any]:
    """Return where the next window of a lane begins."""
    return lane.end if lane.end is not None else {"unit": lane.unit, "cursor": lane.cursor, "stripe": lane.stripe}


def _new(epoch: int, world: int, rank: int, striped: bool, end: Mapping[str, Any]) -> Lane:
    """Make a lane in an epoch that has begun; its windows do not count from 0."""
    return Lane(epoch=epoch, world=world, rank=rank, striped=striped, window=1, **end)
