"""`Plan`: the calls of groups that answer a batch with certain features, and the places of their results."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.background.lane import Lane
from shoal.errors import UnsupportedError
from shoal.nn.keeper import TableKeeper, keeper_of
from shoal.nn.update.units import lane_of
from shoal.table.protocol import FIRSTN, MAX, Features, Group, groups_of

_handles = itertools.count()
_plans: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()


class Feature(NamedTuple):
    """A feature of a module: the number of its table in the module, and how the rows of a bag are pooled."""

    table: int
    kind: int = -1
    """As in `shoal.table.protocol`; -1: rows are not pooled."""
    length: int = 0
    combiner: Any = None
    """A `Combiner` with its own ``combine``."""


class Call:
    """One group's part in every batch: one find, and pooled rows or rows."""

    __slots__ = (
        "checked", "device", "features", "fused", "group", "keepers", "marked", "of", "output", "places", "touched",
    )  # fmt: skip

    def __init__(self, group: Group, of: Feature, places: list[int], features: Features, fused: bool) -> None:
        self.group = group
        self.device = group.traits.device
        self.of = of
        """One of its features; if it is not fused, all are pooled in the same way."""
        self.places = places
        """The positions of its features in the batch."""
        self.features = features
        self.fused = fused
        self.checked = fused and group.traits.checks_bags
        """Whether the group checks offsets itself."""
        self.marked = fused and MAX in features.combiners
        """Whether its gradient needs the marks of its pooled rows."""
        self.output = 0
        """The number of the read's result that holds its rows."""
        self.keepers = tuple([keeper_of(table) for table in group.tables])
        self.touched: list[TableKeeper] = [self.keepers[place] for place in sorted(set(features.tables))]


class Place(NamedTuple):
    """The place of a feature's result: columns of the pooled rows, or the result of a call."""

    column: int
    width: int
    call: int = -1
    index: int = 0
    length: int = 0
    """Number of rows that firstn puts side by side in its columns; 0 if the result is one row."""

    def shaped(self, columns: Tensor) -> Tensor:
        """Reshape its columns to the result of a feature that its group pooled."""
        return columns.unflatten(1, (self.length, self.width // self.length)) if self.length else columns


class Plan:
    """The calls for a batch whose features come in a certain order. Compiled graphs refer to it by its ``handle``."""

    def __init__(self, calls: list[Call], width: int, places: list[Place], order: list[int], by_rows: bool) -> None:
        self.calls = calls
        self.width = width
        """Number of columns of the pooled rows."""
        self.places = places
        """The place of each feature, in the order of the batch."""
        self.order = order
        """The numbers of the features in the order of the result."""
        self.by_rows = by_rows
        self.fused = all(call.fused for call in calls)
        self.marked = any(call.marked for call in calls)
        self.sequences = len({place.length for place in places}) == 1 and places[0].length > 0
        """Whether every feature is a sequence of the same number of rows."""
        alike = self.sequences and len({place.width for place in places}) == 1
        self.sequence = (places[0].length, places[0].width // places[0].length) if alike else None
        """Number of rows and columns of each feature, if all have the same."""
        self.whole = len(calls) == 1 and calls[0].places == list(range(len(places)))
        """Whether the batch is, unchanged, the input of the only call."""
        shares = {call.group.traits.shares for call in calls}
        self.shared = len(calls) > 1 and len(shares) == 1 and None not in shares and one_device(calls)
        """Whether the calls share their exchanges between ranks."""
        self.device: torch.device = calls[0].device if calls else torch.device("cpu")
        self.anchor, self.tape = _anchor_and_tape(self.device)
        self.root = None if self.device.type == "cpu" else _anchor_and_tape(torch.device("cpu"))[0]
        """An anchor in host memory if ``anchor`` is not: with it backward mostly ends, and updates rows, in the thread
        that began it, instead of the thread of a device."""
        self.handle = next(_handles)
        self.opaque: dict[int, tuple[Any, ...]] = {}
        """dtype, shape and device of each call's `Found.where` and ``came``, which compiled graphs pass as bytes."""
        self._touched = list(dict.fromkeys(keeper for call in calls for keeper in call.touched))
        outputs = itertools.count(1 if width else 0)
        for call in calls:
            call.output = 0 if call.fused else next(outputs)
        _plans[self.handle] = self

    def lane(self) -> Lane | None:
        """The thread that makes the calls; None: the reading thread."""
        return lane_of(self._touched)


def one_device(calls: Sequence[Call]) -> bool:
    return len({call.device for call in calls}) == 1


@cache
def _anchor_and_tape(device: torch.device) -> tuple[Tensor, Tensor]:
    """Make an empty tensor that requires gradients, so that autograd calls us, and a tape for compiled graphs."""
    with torch.inference_mode(False):
        return torch.zeros(0, requires_grad=True, device=device), torch.zeros(1, dtype=torch.int64, device=device)


def find_plan(handle: int) -> Plan:
    """Return the plan with a handle."""
    plan = _plans.get(handle)
    if plan is None:
        raise UnsupportedError(f"a compiled graph uses plan {handle} of a deleted module; compile the model again")
    return plan


def make_plan(
    tables: Sequence[Any],
    features: Sequence[Feature],
    *,
    order: Sequence[int] | None = None,
    padding: int | None = None,
    by_rows: bool = False,
) -> Plan:
    """Make the plan for features in the order of a batch.

    Args:
        order: the numbers of the features in the order of the result; by default that of the batch.
        by_rows: read rows even if a group could pool them, because the weights require a gradient.
    """
    order = list(range(len(features))) if order is None else list(order)
    group_of = {place: (group, own.index(place)) for group, own in groups_of(tables) for place in own}
    dims = [group_of[feature.table][0].dim for feature in features]
    columns, width = [-1] * len(features), 0
    fuses = [not by_rows and feature.kind in group_of[feature.table][0].traits.pools for feature in features]
    lengths = [feature.length if feature.kind == FIRSTN else 0 for feature in features]
    widths = [max(1, length) * dim for length, dim in zip(lengths, dims, strict=True)]
    for number in order:
        if fuses[number]:
            columns[number], width = width, width + widths[number]
    members: dict[tuple[int, Hashable], list[int]] = {}
    for number, feature in enumerate(features):
        group = group_of[feature.table][0]
        alike = None if fuses[number] else (feature.kind, feature.length, id(feature.combiner))
        members.setdefault((id(group), alike), []).append(number)
    calls, places = [], [Place(c, w, length=n) for c, w, n in zip(columns, widths, lengths, strict=True)]
    for (_, alike), own in members.items():
        group = group_of[features[own[0]].table][0]
        which = tuple([group_of[features[number].table][1] for number in own])
        if alike is None:
            kinds, at = tuple([features[number].kind for number in own]), tuple([columns[number] for number in own])
            rows = tuple([max(1, lengths[number]) for number in own]) if FIRSTN in kinds else ()
            asked = Features(which, kinds, at, width, padding, rows)
        else:
            asked = Features(which, padding=padding)
            for index, number in enumerate(own):
                places[number] = Place(-1, dims[number], len(calls), index)
        calls.append(Call(group, features[own[0]], own, asked, alike is None))
    return Plan(calls, width, places, order, by_rows)
