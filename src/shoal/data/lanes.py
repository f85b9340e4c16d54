"""Lanes: what one rank reads of an epoch, and how what is left of an epoch is dealt to another number of ranks.

A lane is a list of units that are read whole, or every W-th stripe of all units. Where a run is resumed by more or
fewer ranks, each lane keeps what only it can finish (its window, and the unit or the stripes that it is in the middle
of), and what nobody has begun is dealt out anew: every sample of the epoch is read once, however often ranks change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

RULE = ("world", "rank", "striped", "units", "until")
LATER: dict[str, Any] = {"end": None, "lane": None, "lanes": []}
"""What the states of streams of version 0.1 lack."""
PLACE = ("epoch", "unit", "cursor", "stripe", "window", "batch", "end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """What is read of an epoch, by whose rule, and up to where it was."""

    epoch: int
    world: int
    rank: int
    """Also a number in the order of windows."""
    striped: bool
    """Whether the stripes ``rank``, ``rank + world``, … of all units are read, rather than whole units."""
    units: tuple[int, ...] | None = None
    """Which units of the epoch's order; None: ``rank``, ``rank + world``, … unless striped, else all."""
    until: int | None = None
    """The first stripe that is not read; None: all are."""
    unit: int = 0
    """The place, among the lane's units, of the one that the window begins in."""
    cursor: Any = None
    stripe: int = 0
    window: int = 0
    batch: int = 0
    end: Mapping[str, Any] | None = None
    """Where the window ends, if ``batch`` batches of it were taken: ``unit``, ``cursor`` and ``stripe``."""

    def chosen(self, count: int) -> Sequence[int]:
        """The lane's units, of ``count`` in the epoch's order."""
        if self.units is not None:
            return self.units
        return range(count) if self.striped else range(self.rank, count, self.world)

    def rule(self) -> dict[str, Any]:
        """What is read, without where: JSON values."""
        return {name: value for name, value in asdict(self).items() if name in RULE}


def lane_of(rule: Mapping[str, Any], place: Mapping[str, Any]) -> Lane:
    """From JSON values."""
    units = rule["units"]
    rules = {name: rule[name] for name in RULE} | {"units": None if units is None else tuple(units)}
    return Lane(**rules, **{name: place[name] for name in PLACE})


def deal(
    lanes: Sequence[Lane], world: int, sizes: Callable[[int], Sequence[int]], read: Callable[[Lane], float]
) -> list[list[Lane]]:
    """What each of ``world`` ranks reads, in this order, of the lanes that are left of an epoch and of those before.

    Args:
        lanes: all that the former ranks had not finished.
        sizes: of the units of an epoch, in its order.
        read: how much of the unit that a lane is in has been read, in the measure of sizes.
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
    """Where the next window of a lane begins."""
    return lane.end if lane.end is not None else {"unit": lane.unit, "cursor": lane.cursor, "stripe": lane.stripe}


def _new(epoch: int, world: int, rank: int, striped: bool, end: Mapping[str, Any]) -> Lane:
    """A lane in an epoch that has begun: its windows do not count from 0."""
    return Lane(epoch=epoch, world=world, rank=rank, striped=striped, window=1, **end)
