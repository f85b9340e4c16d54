"""The step number and time of an update: numbers, or device tensors that a captured CUDA graph reads."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.errors import UnsupportedError
from shoal.table.protocol import Group, Step

if TYPE_CHECKING:
    from shoal.nn.keeper import TableKeeper

_counting = threading.Lock()


class StepCounter:
    """The number of the next update. The host counts until a CUDA graph captures an update; from then on the device
    does, because the host does not see replays."""

    def __init__(self) -> None:
        self._number = 0
        self.counted: Tensor | None = None
        """int64 ``[1]``: number of updates since the first capture; None before that."""

    @property
    def number(self) -> int:
        return self._number if self.counted is None else self._number + int(self.counted)

    @number.setter
    def number(self, number: int) -> None:
        self._number = int(number)
        if self.counted is not None:
            self.counted.zero_()

    def on_device(self) -> Tensor:
        """Return the number as int64 ``[1]``; `counted` must be set."""
        assert self.counted is not None
        return self.counted + self._number


class GroupClock:
    """Device tensors of a group whose updates can be captured, made by its first update outside a capture."""

    def __init__(self, device: torch.device, seconds: int) -> None:
        self.counted = torch.zeros(1, dtype=torch.int64, device=device)
        self.seconds = torch.full((1,), int(seconds), dtype=torch.int64, device=device)
        """The timestamp that a replay writes; see `refresh`."""


_clocks: weakref.WeakKeyDictionary[Any, GroupClock] = weakref.WeakKeyDictionary()


def next_step(group: Group, keepers: Sequence[TableKeeper]) -> Step:
    """Count an update of some tables of a group in backward, and return its step.

    Tables with different numbers of updates continue from the largest.
    """
    seconds = keepers[0].time()
    if not group.traits.capturable:
        return Step(_count(keepers), seconds)
    clock = _clocks.get(group)
    capturing = torch.cuda.is_current_stream_capturing()
    if clock is None and not capturing:
        clock = _clocks[group] = GroupClock(group.traits.device, seconds)
    if not capturing and not [keeper for keeper in keepers if keeper.counter.counted is not None]:
        return Step(_count(keepers), seconds)
    if clock is None:
        raise UnsupportedError(
            f"table {keepers[0].name!r}: a step must run once without capture before a CUDA graph captures it"
        )
    counter = _shared(keepers, clock)
    number = counter.on_device()
    assert counter.counted is not None
    counter.counted.add_(1)
    return Step(number, clock.seconds if capturing else seconds)


def _count(keepers: Sequence[TableKeeper]) -> int:
    with _counting:
        if len(keepers) == 1:
            counter = keepers[0].counter
            counter._number = (number := counter._number) + 1
            return number
        counters = [keeper.counter for keeper in keepers]
        number = max([counter._number for counter in counters])
        for counter in counters:
            counter._number = number + 1
    return number


def _shared(keepers: Sequence[TableKeeper], clock: GroupClock) -> StepCounter:
    """Return the common counter of the tables, which counts on the device."""
    counter = keepers[0].counter
    if any(keeper.counter is not counter for keeper in keepers) or counter.counted is None:
        ready = [keeper.counter for keeper in keepers if keeper.counter.counted is not None]
        if ready:
            counter = ready[0]
        else:
            counter = StepCounter()
            counter._number = max(keeper.counter._number for keeper in keepers)
            counter.counted = clock.counted
        for keeper in keepers:
            keeper.counter = counter
    return counter


def refresh(groups: Iterable[tuple[Group, TableKeeper]]) -> None:
    """Write the current time to the tensors that the captured updates of groups read."""
    for group, keeper in groups:
        clock = _clocks.get(group)
        if clock is not None:
            clock.seconds.fill_(int(keeper.time()))


def _after_fork() -> None:
    global _counting
    _counting = threading.Lock()  # the thread that may hold it does not exist in the child


os.register_at_fork(after_in_child=_after_fork)
