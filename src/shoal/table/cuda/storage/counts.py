"""`Counts`: the numbers that kernels keep in device memory, and what the host knows of them without waiting."""

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
_COPIES = 8  # that may be under way


class Counts:
    """How many rows are given out and how many ids each table has, on the device; and upper bounds of both here.

    Every batch may bring as many new ids as it has: that is what the host adds up, until a copy of the device's numbers
    has arrived, which it asks for when the bounds come near to the room.
    """

    def __init__(self, tables: int, device: torch.device) -> None:
        self.tables, self.device = tables, device
        self.words = torch.zeros(COMMON + WORDS * tables, dtype=torch.int64, device=device)
        self._copies: deque[tuple[Tensor, torch.cuda.Event, list[int]]] = deque()
        """Under way to the host, each with the ids that had been inserted when it was asked for."""
        self._homes: list[Tensor] = []  # where copies can arrive
        self._inserted = [0] * tables  # ids so far, of which some were new
        self._covered = [0] * tables  # those of them that what is known has counted
        self._known = [0] * self.words.numel()

    def start(self) -> None:
        """Those of tables without ids."""
        self.drop_copies()
        self.set(NEXT, 1)  # row 0 is nobody's
        for word in (TAKEN, FREE, LOST):
            self.set(word, 0)
        self.rows_freed()
        for table in range(self.tables):
            self.set_of(table, ik.SIZE.value, 0)
        self._covered = list(self._inserted)
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

    def rows_left(self) -> Tensor:
        """Rows that nobody has, on the device."""
        words = self.words
        return (words[FREE] + words[ROOM] - words[NEXT] - words[TAKEN]).clamp(min=0)

    def sure_sizes(self) -> list[int]:
        """Ids of each table when the host last knew."""
        return self._known[COMMON + ik.SIZE.value :: WORDS]

    def is_empty(self, table: int) -> bool:
        """Whether the host is sure that a table has no id."""
        return self.sure_sizes()[table] == 0 and self._inserted[table] == self._covered[table]

    def expect(self, table: int, count: int) -> None:
        """Ids of a table are about to be inserted, some of them new."""
        self._inserted[table] += count

    def add(self, counts: list[int], room: int) -> None:
        """Ids were inserted, some of them new."""
        for table, count in enumerate(counts):
            self._inserted[table] += count
        self.watch_if_near(room)

    def watch_if_near(self, room: int) -> None:
        """Has the counts sent when what may have come since the last look is much of the room that is left."""
        if 8 * self._pending() > room - self.rows_needed():
            self._watch()

    def _pending(self) -> int:
        """Ids since the counts were last known: as many new ones at most."""
        return sum(self._inserted) - sum(self._covered)

    def rows_needed(self, counts: list[int] | None = None) -> int:
        """Rows that there may be after so many more ids of each table."""
        taken = self._known[TAKEN] + self._pending() + sum(counts or ())
        return self._known[NEXT] + max(0, taken - self._known[FREE])

    def sizes_needed(self, counts: list[int]) -> list[int]:
        """Ids that each table may have after so many more."""
        numbers = zip(self.sure_sizes(), self._inserted, self._covered, counts, strict=True)
        return [size + inserted - covered + count for size, inserted, covered, count in numbers]

    def look(self, wait: bool = False) -> None:
        """Takes in what the device has counted so far, if it has arrived; ``wait``: all of it."""
        if self.device.type != "cuda":
            self._known, self._covered = self.now(), list(self._inserted)
            return
        while self._copies and (wait or self._copies[0][1].query()):
            self.wait_for_one()
        if wait and self._pending():
            self._watch()
            self.wait_for_one()

    def wait_for_one(self) -> bool:
        """Waits for the copy that was asked for first, while the device goes on with later calls; False: none is."""
        if not self._copies:
            return False
        home, event, covered = self._copies.popleft()
        event.synchronize()
        self._known, self._covered = home.tolist(), covered
        self._homes.append(home)
        return True

    def check_lost(self) -> None:
        """Raises when the host knows that a captured graph outran its reserve."""
        check_lost(self._known[LOST])

    def look_anew(self) -> None:
        """Waits for the device and takes all of its numbers in: they were changed other than by `add`."""
        self.drop_copies()
        self._known, self._covered = self.now(), list(self._inserted)

    def drop_copies(self) -> None:
        """What is under way to the host no longer counts."""
        while self.wait_for_one():
            pass

    def _watch(self) -> None:
        """Has the counts sent to the host, unless many copies are under way."""
        if self.device.type != "cuda" or len(self._copies) >= _COPIES:
            return
        home = self._homes.pop() if self._homes else torch.zeros_like(self.words, device="cpu", pin_memory=True)
        home.copy_(self.words, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._copies.append((home, event, list(self._inserted)))


def check_lost(lost: int) -> None:
    """Raises when a captured graph outran its reserve."""
    if lost:
        raise CapacityError(
            f"{lost} ids found no room in a captured graph; call reserve() or make_room() between its replays"
        )
