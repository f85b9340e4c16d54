"""`Room`: how many ids can be inserted into a group's tables before the host has to wait for the device.

At its end, every update reports to the host how many ids still fit into every table. All ids since then may be new and
in one table, so the host adds them up for all tables. While the sum is below the reported room, nothing waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.table.cuda.storage import Storage

_NUMBERS = (1 << 31) - 1
_EVENTS = 8  # the most pending events


class Room:
    """The remaining room of some storages. Every call must be in their turn. Kernels write reports to ``words``."""

    def __init__(self, storages: Sequence[Storage], places: Sequence[tuple[int, int]], words: Any) -> None:
        self._storages, self._places, self._words = storages, places, words
        self._cuda = storages[0].device.type == "cuda"
        self._number = 0
        self._since = 0  # number of updates since the last `recall`; only their reports are valid
        self._left = 0
        self._unreported: deque[int] = deque()  # number of ids of each update without a report, oldest first
        self._pending = 0  # their sum
        self._unsettled = 0  # ids that are not yet in the storages' counts
        self._events: deque[torch.cuda.Event] = deque()
        storages[0].turn.open(self)

    def take(self, need: int, make_room: Callable[[Any], None], batch: Any) -> int:
        """Allows an update to insert up to ``need`` ids into any table; returns the number that reports its end.

        ``make_room(batch)`` is called if they might not fit and no pending report can show that they do.
        """
        turn = self._storages[0].turn
        if turn.others(self):
            for account in turn.accounts():
                if account is not self:
                    account.spend(need)
        self._read_report()
        if self._pending + need > self._left and not self._fits_soon(need):
            for storage in self._storages:
                storage.look()
            make_room(batch)
            self.recall()
            self._left = min(storage.sure() for storage in self._storages)
            if any(storage.replayed for storage in self._storages):
                self._left //= 2  # the other half is for replays that the device has not reported
        self._unsettled += need
        self.spend(need)
        return self._number

    def _read_report(self) -> None:
        word = int(self._words[2])
        unreported = (self._number - word) & _NUMBERS
        if unreported < self._since:
            self._left = word >> 31
            while len(self._unreported) > unreported:
                self._pending -= self._unreported.popleft()

    def _fits_soon(self, need: int) -> bool:
        """Whether the ids fit once pending updates end; waits for as few of them as possible."""
        while self._events:
            self._events.popleft().synchronize()
            self._read_report()
            if self._pending + need <= self._left:
                return True
        return False

    def launched(self) -> None:
        """Called when the update of the last `take` has been launched."""
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
        self._unreported.append(count)
        self._pending += count

    def recall(self) -> None:
        self._since = self._left = self._pending = 0
        self._unreported.clear()
        self._events.clear()
