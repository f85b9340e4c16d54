"""`History`: what writers did to rows, by row; its checker says which update is missing, doubled or out of order.

Writers say when they begin an update and when it was acknowledged. An update that was acknowledged must have happened
once; one that was begun and not acknowledged (its writer was killed, or is still waiting) may have happened or not. Two
kinds of rows show which one is wrong:

- **added**: every update adds 1 to a row of its own, so the row says how often that update was applied;
- **set**: one writer sets a row to rising numbers, so a smaller one than was acknowledged came out of order, and a
  reader must see at least what was acknowledged before it began to read.
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
    """One thing that is wrong."""

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

    # --- noting -------------------------------------------------------------------------------------------------------

    def begin(self, writer: str, number: int, row: int, kind: Literal["add", "set"] = "add") -> None:
        """Before an update is sent: ``number`` is a writer's own, and for ``set`` what the row is set to."""
        with self._lock:
            self._updates[writer, number] = Update(writer, number, row, kind, time.monotonic())

    def acknowledge(self, writer: str, number: int) -> None:
        """When its answer came."""
        with self._lock:
            self._updates[writer, number].acknowledged_s = time.monotonic()

    def read(self, reader: str, row: int, value: float, began_s: float) -> None:
        """A read of a ``set`` row that began at a time of ``time.monotonic()`` and has ended now."""
        with self._lock:
            self._reads.append((reader, row, value, began_s, time.monotonic()))

    def load(self, path: Path) -> None:
        """The lines that a `Journal` of another process of this machine wrote; a torn last one was never begun."""
        for line in path.read_text().splitlines():
            try:
                what, writer, number, row, kind, at = json.loads(line)
            except ValueError:
                continue
            if what == "begin":
                self._updates[writer, number] = Update(writer, number, row, kind, at)
            else:
                self._updates[writer, number].acknowledged_s = at

    # --- asking -------------------------------------------------------------------------------------------------------

    @property
    def acknowledged(self) -> int:
        """Updates that were."""
        with self._lock:
            return sum(one.acknowledged_s is not None for one in self._updates.values())

    def longest_wait_s(self, since_s: float = 0.0) -> float:
        """From the beginning of an update to its acknowledgement, of those that began after a ``time.monotonic()``."""
        with self._lock:
            waits = [
                one.acknowledged_s - one.began_s
                for one in self._updates.values()
                if one.acknowledged_s is not None and one.began_s >= since_s
            ]
        return max(waits, default=0.0)

    def check(self, look: Callable[[Sequence[int]], Sequence[float]], others: Iterable[int] = ()) -> list[Finding]:
        """What is wrong with the rows as they are now.

        Args:
            look: the values of rows: how often 1 was added, or what it was set to; 0 for one that is not there.
            others: further rows, which nobody wrote to and which must be 0.
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
                found.append(Finding(FOREIGN, row, f"row {row}: nobody wrote to it and it is {value:g}"))
        return found + _check_reads(by_row, reads)


def _check_added(row: int, value: float, updates: list[Update]) -> list[Finding]:
    done = [one for one in updates if one.acknowledged_s is not None]
    if len(done) <= value <= len(updates):
        return []
    names = ", ".join(f"{one.writer}'s update {one.number}" for one in (done or updates)[:3])
    if value < len(done):
        return [Finding(MISSING, row, f"row {row}: {names}: acknowledged {len(done)} time(s), and it is {value:g}")]
    return [Finding(DOUBLED, row, f"row {row}: {names}: begun {len(updates)} time(s), and applied {value:g} times")]


def _check_set(row: int, value: float, updates: list[Update]) -> list[Finding]:
    last = max((one.number for one in updates if one.acknowledged_s is not None), default=0)
    most = max(one.number for one in updates)
    if value < last:
        return [
            Finding(ORDER, row, f"row {row}: {updates[0].writer} set it to {last}, acknowledged, and it is {value:g}")
        ]
    if value > most:
        return [Finding(FOREIGN, row, f"row {row}: {updates[0].writer} set it to {most} at most, and it is {value:g}")]
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
                Finding(FOREIGN, row, f"row {row}: {reader} read {value:g}, and no more than {most} was written")
            )
    return found


class Journal:
    """The history of one writer in a process of its own: lines that survive its being killed."""

    def __init__(self, path: Path, writer: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 (as long as its writer)
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
