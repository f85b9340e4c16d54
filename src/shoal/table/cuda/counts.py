"""`Counts`: the numbers that kernels keep in device memory, and what the host knows of them without waiting."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from shoal.errors import CapacityError
from shoal.table.cuda.kernels import index as ik

COMMON, WORDS = ik.COMMON_WORDS.value, ik.TABLE_WORDS.value
TAKEN, FREE, NEXT, ROOM, LOST = (x.value for x in (ik.TAKEN, ik.FREE, ik.NEXT, ik.ROOM, ik.LOST))
_moves = itertools.count(1)


class Counts:
    """How many rows are given out and how many ids each table has, on the device; and upper bounds of both here.

    Every batch may bring as many new ids as it has: that is what the host adds up, until a copy of the device's numbers
    has arrived, which it asks for when the bounds come near to the room.
    """

    def __init__(self, tables: int, device: torch.device) -> None:
        self.tables, self.device = tables, device
        self.words = torch.zeros(COMMON + WORDS * tables, dtype=torch.int64, device=device)
        self._pinned = torch.zeros_like(self.words, device="cpu", pin_memory=device.type == "cuda")
        self._event: torch.cuda.Event | None = None
        self._pending = [0] * tables  # ids since the counts were last known: as many new ones at most
        self._covered = [0] * tables
        self._known = [0] * self.words.numel()

    def start(self) -> None:
        """Those of tables without ids."""
        self.drop_copy()
        self.set(NEXT, 1)  # row 0 is nobody's
        for word in (TAKEN, FREE, LOST):
            self.set(word, 0)
        self.rows_freed()
        for table in range(self.tables):
            self.set_of(table, ik.SIZE.value, 0)
        self._pending = [0] * self.tables
        self._known = [0] * self.words.numel()
        self._known[NEXT] = 1

    def rows_freed(self) -> None:
        """Row numbers that somebody was told before may be others' from now on."""
        self.set(ik.MOVED.value, next(_moves))

    def set(self, word: int, value: int) -> None:
        self.words[word].fill_(value)

    def set_of(self, table: int, word: int, value: int) -> None:
        self.words[COMMON + WORDS * table + word].fill_(value)

    def of(self, table: int) -> Tensor:
        """The words from a table's on."""
        return self.words[COMMON + WORDS * table :]

    def now(self) -> list[int]:
        """All of them; waits for the device."""
        return self.words.tolist()

    def sizes(self) -> list[int]:
        """Ids of each table; waits for the device."""
        counts = self.now()
        check_lost(counts[LOST])
        return counts[COMMON + ik.SIZE.value :: WORDS]

    def sure_sizes(self) -> list[int]:
        """Ids of each table when the host last knew."""
        return self._known[COMMON + ik.SIZE.value :: WORDS]

    def is_empty(self, table: int) -> bool:
        """Whether the host is sure that a table has no id."""
        return self.sure_sizes()[table] == 0 and not self._pending[table]

    def expect(self, table: int, count: int) -> None:
        """Ids of a table are about to be inserted, some of them new."""
        self._pending[table] += count

    def add(self, counts: list[int], room: int) -> None:
        """Ids were inserted, some of them new."""
        for table, count in enumerate(counts):
            self._pending[table] += count
        # Only when what may have come since the last look is much of the room that is left.
        if 8 * sum(self._pending) > room - self.rows_needed():
            self._watch()

    def rows_needed(self, counts: list[int] | None = None) -> int:
        """Rows that there may be after so many more ids of each table."""
        taken = self._known[TAKEN] + sum(self._pending) + sum(counts or ())
        return self._known[NEXT] + max(0, taken - self._known[FREE])

    def sizes_needed(self, counts: list[int]) -> list[int]:
        """Ids that each table may have after so many more."""
        return [s + p + c for s, p, c in zip(self.sure_sizes(), self._pending, counts, strict=True)]

    def look(self, wait: bool = False) -> None:
        """Takes in what the device has counted so far, if it has arrived; ``wait``: all of it."""
        if self.device.type != "cuda":
            self._known = self.now()
            self._pending = [0] * self.tables
            return
        while True:
            if self._event is not None:
                if wait:
                    self._event.synchronize()
                elif not self._event.query():
                    return
                self._known = self._pinned.tolist()
                self._pending = [p - c for p, c in zip(self._pending, self._covered, strict=True)]
                self._event = None
            if not wait or not any(self._pending):
                return
            self._watch()

    def check_lost(self) -> None:
        """Raises when the host knows that a captured graph outran its reserve."""
        check_lost(self._known[LOST])

    def look_anew(self) -> None:
        """Waits for the device and takes all of its numbers in: they were changed other than by `add`."""
        self.drop_copy()
        self._pending = [0] * self.tables
        self._known = self.now()

    def drop_copy(self) -> None:
        """What is under way to the host no longer counts."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    def _watch(self) -> None:
        """Has the counts sent to the host, unless that is under way."""
        if self.device.type != "cuda" or self._event is not None:
            return
        self._pinned.copy_(self.words, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()
        self._covered = list(self._pending)


def check_lost(lost: int) -> None:
    """Raises when a captured graph outran its reserve."""
    if lost:
        raise CapacityError(
            f"{lost} ids found no room in a captured graph; call reserve() or make_room() between its replays"
        )
