"""`Room`: how many ids may come to the tables of a group before the host has to look how many there are.

Every update tells the host, at its end, how many ids still fit into every table. All that came since may be new and of
one table: that is what the host counts, one number for all tables, and nobody waits while it is less than what fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.table.cuda.storage import Storage

_NUMBERS = (1 << 31) - 1
_EVENTS = 8  # that may be under way


class Room:
    """What is left of the room of some storages, whose turn it is in every call. ``heard`` is what kernels write."""

    def __init__(self, storages: Sequence[Storage], places: Sequence[tuple[int, int]], heard: Any) -> None:
        self._storages, self._places, self._heard = storages, places, heard
        self._cuda = storages[0].device.type == "cuda"
        self._number = 0
        self._since = 0  # updates since what was told before no longer holds
        self._left = 0
        self._unheard: deque[int] = deque()  # ids of updates that the device has not told of, the oldest first
        self._pending = 0  # their sum
        self._unsettled = 0  # ids that the storages do not know of
        self._events: deque[torch.cuda.Event] = deque()
        storages[0].turn.open(self)

    def take(self, need: int, make_room: Callable[[Any], None], batch: Any) -> int:
        """Lets an update bring up to ``need`` ids to any table; the number by which it tells of its end.

        ``make_room(batch)`` is called where they might not fit, when nothing is under way that could tell otherwise.
        """
        turn = self._storages[0].turn
        if turn.others(self):
            for account in turn.accounts():
                if account is not self:
                    account.spend(need)
        self._hear()
        if self._pending + need > self._left and not self._fits_soon(need):
            for storage in self._storages:
                storage.look()
            make_room(batch)
            self.recall()
            self._left = min(storage.sure() for storage in self._storages)
            if any(storage.replayed for storage in self._storages):
                self._left //= 2  # the other half is for replays until the device tells of them
        self._unsettled += need
        self.spend(need)
        return self._number

    def _hear(self) -> None:
        word = int(self._heard[2])
        unheard = (self._number - word) & _NUMBERS
        if unheard < self._since:
            self._left = word >> 31
            while len(self._unheard) > unheard:
                self._pending -= self._unheard.popleft()

    def _fits_soon(self, need: int) -> bool:
        """Waits no longer than for updates before the last ones, if that is enough."""
        while self._events:
            self._events.popleft().synchronize()
            self._hear()
            if self._pending + need <= self._left:
                return True
        return False

    def launched(self) -> None:
        """The update that took last is under way."""
        if self._cuda and 2 * self._pending > self._left:
            while self._events and self._events[0].query():
                self._events.popleft()
            if len(self._events) < _EVENTS:
                event = torch.cuda.Event()
                event.record()
                self._events.append(event)

    # --- as `Account` -------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        if self._unsettled:
            for place, table in self._places:
                self._storages[place].counts.expect(table, self._unsettled)
            self._unsettled = 0

    def spend(self, count: int) -> None:
        self._number = (self._number + 1) & _NUMBERS
        self._since += 1
        self._unheard.append(count)
        self._pending += count

    def recall(self) -> None:
        self._since = self._left = self._pending = 0
        self._unheard.clear()
        self._events.clear()
