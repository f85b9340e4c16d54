"""`History`: the updates of writers by row; its checker reports updates that are missing, doubled or out of order.

Writers record the beginning and the acknowledgement of each update. An acknowledged update must have been applied
exactly once; one without an acknowledgement (its writer was killed, or is still waiting) may have been applied or not.
There are two kinds of rows:

- **added**: every update adds 1 to a separate row, which counts how often that update was applied;
- **set**: one writer sets a row to rising numbers, so a number smaller than the last acknowledged one is out of order,
  and a reader must see at least the last number acknowledged before its read began.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

MISSING, DOUBLED, ORDER, FOREIGN = "missing", "doubled", "out of order", "nobody's"
Fault = Literal["missing", "doubled", "out of order", "nobody's"]


class Finding(NamedTuple):
    """An error in one row."""

    kind: Fault
    row: int
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(slots=True)
class Update:
    """One update of one writer."""

    writer: str
    number: int
    row: int
    kind: Literal["add", "set"]
    began_s: float
    acknowledged_s: float | None = None


class History:
    """Updates and reads of several writers: threads (`begin`, `acknowledge`, `read`) or processes (`load`)."""

    def __init__(self) -> None:
        self._updates: dict[tuple[str, int], Update] = {}
        self._reads: list[tuple[str, int, float, float, float]] = []
        self._lock = threading.Lock()

    # --- recording ----------------------------------------------------------------------------------------------------

    def begin(self, writer: str, number: int, row: int, kind: Literal["add", "set"] = "add") -> None:
        """Record an update before it is sent; ``number`` is unique per writer and, for ``set``, the row's new value."""
        with self._lock:
            self._updates[writer, number] = Update(writer, number, row, kind, time.monotonic())

    def acknowledge(self, writer: str, number: int) -> None:
        """Record that an update was acknowledged."""
        with self._lock:
            self._updates[writer, number].acknowledged_s = time.monotonic()

    def read(self, reader: str, row: int, value: float, began_s: float) -> None:
        """Record a read of a ``set`` row that began at ``began_s`` (``time.monotonic()``) and ends now."""
        with self._lock:
            self._reads.append((reader, row, value, began_s, time.monotonic()))

    def load(self, path: Path) -> None:
        """Load the lines that another process's `Journal` wrote on this machine; a torn last line is ignored."""
        for line in path.read_text().splitlines():
            try:
                what, writer, number, row, kind, at = json.loads(line)
            except ValueError:
                continue
            if what == "begin":
                self._updates[writer, number] = Update(writer, number, row, kind, at)
            else:
                self._updates[writer, number].acknowledged_s = at

    # --- checking -----------------------------------------------------------------------------------------------------

    @property
    def acknowledged(self) -> int:
        """The number of acknowledged updates."""
        with self._lock:
            return sum(one.acknowledged_s is not None for one in self._updates.values())

    def longest_wait_s(self, since_s: float = 0.0) -> float:
        """The longest time from beginning to acknowledgement, among updates begun after ``since_s``."""
        with self._lock:
            waits = [
                one.acknowledged_s - one.began_s
                for one in self._updates.values()
                if one.acknowledged_s is not None and one.began_s >= since_s
            ]
        return max(waits, default=0.0)

    def check(self, look: Callable[[Sequence[int]], Sequence[float]], others: Iterable[int] = ()) -> list[Finding]:
        """Return the findings for the rows' current values.

        Args:
            look: returns the values of rows: how often 1 was added, or the value set; 0 for a missing row.
            others: further rows, which no writer wrote and which must be 0.
        """
        with self._lock:
            updates, reads = list(self._updates.values()), list(self._reads)
        by_row: dict[int, list[Update]] = defaultdict(list)
        for one in updates:
            by_row[one.row].append(one)
        rows = sorted(by_row)
        found: list[Finding] = []
        for row, value in zip(rows, look(rows) if rows else (), strict=True):
            sets = [one for one in by_row[row] if one.kind == "set"]
            found += _check_set(row, value, sets) if sets else _check_added(row, value, by_row[row])
        foreign = sorted(set(others) - by_row.keys())
        for row, value in zip(foreign, look(foreign) if foreign else (), strict=True):
            if value:
                found.append(Finding(FOREIGN, row, f"row {row}: nobody wrote to it, but it is {value:g}"))
        return found + _check_reads(by_row, reads)


def _check_added(row: int, value: float, updates: list[Update]) -> list[Finding]:
    done = [one for one in updates if one.acknowledged_s is not None]
    if len(done) <= value <= len(updates):
        return []
    names = ", ".join(f"{one.writer}'s update {one.number}" for one in (done or updates)[:3])
    if value < len(done):
        return [Finding(MISSING, row, f"row {row}: {names}: acknowledged {len(done)} time(s), but it is {value:g}")]
    return [Finding(DOUBLED, row, f"row {row}: {names}: begun {len(updates)} time(s), but applied {value:g} times")]


def _check_set(row: int, value: float, updates: list[Update]) -> list[Finding]:
    last = max((one.number for one in updates if one.acknowledged_s is not None), default=0)
    most = max(one.number for one in updates)
    if value < last:
        return [
            Finding(ORDER, row, f"row {row}: {updates[0].writer} set it to {last}, acknowledged, but it is {value:g}")
        ]
    if value > most:
        return [Finding(FOREIGN, row, f"row {row}: {updates[0].writer} set it to {most} at most, but it is {value:g}")]
    return []


def _check_reads(by_row: dict[int, list[Update]], reads: list[tuple[str, int, float, float, float]]) -> list[Finding]:
    found = []
    for reader, row, value, began, ended in reads:
        updates = by_row.get(row, [])
        least = max((one.number for one in updates if (one.acknowledged_s or began) < began), default=0)
        most = max((one.number for one in updates if one.began_s <= ended), default=0)
        if value < least:
            found.append(Finding(ORDER, row, f"row {row}: {reader} read {value:g} after {least} was acknowledged"))
        elif value > most:
            found.append(
                Finding(FOREIGN, row, f"row {row}: {reader} read {value:g}, but no more than {most} was written")
            )
    return found


class Journal:
    """The history of one writer in a separate process, as lines in a file that survive a kill."""

    def __init__(self, path: Path, writer: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  closed by `close`
        self.writer = writer

    def begin(self, number: int, row: int, kind: Literal["add", "set"] = "add") -> None:
        self._write("begin", number, row, kind)

    def acknowledge(self, number: int) -> None:
        self._write("end", number, 0, "")

    def close(self) -> None:
        self._file.close()

    def _write(self, *given: Any) -> None:
        what, number, row, kind = given
        self._file.write(json.dumps([what, self.writer, number, row, kind, time.monotonic()]) + "\n")
