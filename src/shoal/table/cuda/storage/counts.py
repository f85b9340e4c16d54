"""`Counts`: the counters that kernels keep in device memory, and bounds that the host knows without waiting."""

from __future__ import annotations

import itertools
from collections import deque

import torch
from torch import Tensor

from shoal.errors import CapacityError
from shoal.table.cuda.kernels import index as ik

COMMON, WORDS = ik.COMMON_WORDS.value, ik.TABLE_WORDS.value
TAKEN, FREE, NEXT, ROOM, LOST = (x.value for x in (ik.TAKEN, ik.FREE, ik.NEXT, ik.ROOM, ik.LOST))
_moves = itertools.count(1)
_COPIES = 8  # the most pending copies


class Counts:
    """The number of rows in use and of ids in each table, on the device, and upper bounds of both on the host.

    All ids of a batch may be new, so the host adds them all to its bounds. When the bounds approach the room, it
    requests a copy of the device's counters, which replaces the bounds when it arrives.
    """

    def __init__(self, tables: int, device: torch.device) -> None:
        self.tables, self.device = tables, device
        self.words = torch.zeros(COMMON + WORDS * tables, dtype=torch.int64, device=device)
        self._copies: deque[tuple[Tensor, torch.cuda.Event, list[int]]] = deque()
        """Pending copies, each with the number of ids that had been inserted when it was requested."""
        self._buffers: list[Tensor] = []  # host memory for copies
        self._inserted = [0] * tables  # ids inserted so far, new or not
        self._covered = [0] * tables  # ids included in the last known counters
        self._known = [0] * self.words.numel()

    def start(self) -> None:
        """Sets the counters of empty tables."""
        self.drop_copies()
        self.set(NEXT, 1)  # row 0 is never used
        for word in (TAKEN, FREE, LOST):
            self.set(word, 0)
        self.rows_freed()
        for table in range(self.tables):
            self.set_of(table, ik.SIZE.value, 0)
        self._covered = list(self._inserted)
        self._known = [0] * self.words.numel()
        self._known[NEXT] = 1

    def rows_freed(self) -> None:
        """Called when rows were freed: row numbers found before can belong to other ids from now on."""
        self.set(ik.MOVED.value, next(_moves))

    def set(self, word: int, value: int) -> None:
        self.words[word].fill_(value)

    def set_of(self, table: int, word: int, value: int) -> None:
        self.words[COMMON + WORDS * table + word].fill_(value)

    def of(self, table: int) -> Tensor:
        """The words from those of a table on."""
        return self.words[COMMON + WORDS * table :]

    def now(self) -> list[int]:
        """All counters; waits for the device."""
        return self.words.tolist()

    def sizes(self) -> list[int]:
        """The number of ids of each table; waits for the device."""
        counts = self.now()
        check_lost(counts[LOST])
        return counts[COMMON + ik.SIZE.value :: WORDS]

    def rows_left(self) -> Tensor:
        """The number of unused rows, on the device."""
        words = self.words
        return (words[FREE] + words[ROOM] - words[NEXT] - words[TAKEN]).clamp(min=0)

    def sure_sizes(self) -> list[int]:
        """The last known number of ids of each table."""
        return self._known[COMMON + ik.SIZE.value :: WORDS]

    def is_empty(self, table: int) -> bool:
        """Whether the host is sure that a table has no id."""
        return self.sure_sizes()[table] == 0 and self._inserted[table] == self._covered[table]

    def expect(self, table: int, count: int) -> None:
        """Notes that ids of a table are about to be inserted, any of which may be new."""
        self._inserted[table] += count

    def add(self, counts: list[int], room: int) -> None:
        """Notes that ids were inserted, any of which may be new."""
        for table, count in enumerate(counts):
            self._inserted[table] += count
        self.watch_if_near(room)

    def watch_if_near(self, room: int) -> None:
        """Requests the counters if the ids inserted since the last copy could fill much of the remaining room."""
        if 8 * self._pending() > room - self.rows_needed():
            self._watch()

    def _pending(self) -> int:
        """The number of ids inserted since the counters were last known; an upper bound of the new ones."""
        return sum(self._inserted) - sum(self._covered)

    def rows_needed(self, counts: list[int] | None = None) -> int:
        """An upper bound of the rows after inserting ``counts`` more ids of each table."""
        taken = self._known[TAKEN] + self._pending() + sum(counts or ())
        return self._known[NEXT] + max(0, taken - self._known[FREE])

    def sizes_needed(self, counts: list[int]) -> list[int]:
        """An upper bound of each table's ids after inserting ``counts`` more."""
        numbers = zip(self.sure_sizes(), self._inserted, self._covered, counts, strict=True)
        return [size + inserted - covered + count for size, inserted, covered, count in numbers]

    def look(self, wait: bool = False) -> None:
        """Reads the counters that have arrived; with ``wait``, waits for all pending copies."""
        if self.device.type != "cuda":
            self._known, self._covered = self.now(), list(self._inserted)
            return
        while self._copies and (wait or self._copies[0][1].query()):
            self.wait_for_one()
        if wait and self._pending():
            self._watch()
            self.wait_for_one()

    def wait_for_one(self) -> bool:
        """Waits for the oldest pending copy, while the device continues with later calls; False: there is none."""
        if not self._copies:
            return False
        buffer, event, covered = self._copies.popleft()
        event.synchronize()
        self._known, self._covered = buffer.tolist(), covered
        self._buffers.append(buffer)
        return True

    def check_lost(self) -> None:
        """Raises if a captured graph is known to have run out of reserved memory."""
        check_lost(self._known[LOST])

    def look_anew(self) -> None:
        """Waits for the device and reads all counters, because they were changed without `add`."""
        self.drop_copies()
        self._known, self._covered = self.now(), list(self._inserted)

    def drop_copies(self) -> None:
        """Discards pending copies."""
        while self.wait_for_one():
            pass

    def _watch(self) -> None:
        """Sends the counters to the host, unless many copies are pending."""
        if self.device.type != "cuda" or len(self._copies) >= _COPIES:
            return
        buffer = self._buffers.pop() if self._buffers else torch.zeros_like(self.words, device="cpu", pin_memory=True)
        buffer.copy_(self.words, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._copies.append((buffer, event, list(self._inserted)))


def check_lost(lost: int) -> None:
    """Raises if a captured graph ran out of reserved memory."""
    if lost:
        raise CapacityError(
            f"there was no room for {lost} ids in a captured graph; call reserve() or make_room() between its replays"
        )
