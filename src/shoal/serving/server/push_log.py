"""What was pushed to each row of a served table, by whom and how new it is."""

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from shoal.fid import distinct
from shoal.stamps import Stamp

MARKS = 1024
"""Where there are more marks, those that no row has are looked for."""


class Mark(NamedTuple):
    """Where pushed rows come from; the greater of two marks is the newer one."""

    stamp: Stamp
    read_at: float = 0.0
    """Unix time by which they had been read."""
    source: str = ""
    """Who learnt them, "" where the sender did not say."""

    @classmethod
    def at(cls, read_at: float) -> "Mark":
        """Of rows whose sender says no more than when they were read: as new as a run that began then."""
        return cls(Stamp(int(read_at * 1e9), 0), read_at)


class Pushed(NamedTuple):
    """Rows that were pushed: int64 ids, the mark of each, and whether it was a deletion."""

    ids: np.ndarray
    marks: list[Mark]
    of: np.ndarray
    """Which of ``marks`` each id has."""
    gone: np.ndarray

    def where(self, wanted: Callable[[Mark], bool]) -> "Pushed":
        """Those with a mark that is wanted."""
        kept = np.fromiter(map(wanted, self.marks), bool, len(self.marks))[self.of]
        return Pushed(self.ids[kept], self.marks, self.of[kept], self.gone[kept])


class _Ids(NamedTuple):
    """Distinct rising ids, and for each twice the number of its mark, plus 1 for a deletion."""

    ids: np.ndarray
    codes: np.ndarray


class PushLog:
    """id -> the newest mark that it was pushed with. Thread-safe.

    Takes 16 bytes per distinct id. Nothing is dropped. Each source has a list of sorted parts, each at least twice as
    long as the next, so that a push costs little however much has been pushed before.
    """

    def __init__(self) -> None:
        self._marks: list[Mark] = []
        self._most_marks = MARKS
        self._of: dict[str, list[_Ids]] = {}
        self._newest: dict[str, Stamp] = {}
        self._lock = threading.Lock()

    def add(self, ids: torch.Tensor, mark: Mark, gone: bool = False) -> None:
        """Ids that were pushed, or deleted by a push."""
        if len(ids):
            with self._lock:
                once = distinct(ids.numpy())
                self._append(mark.source, _Ids(once, np.full(len(once), 2 * self._number(mark) + gone)))

    def extend(self, pushed: Pushed) -> None:
        """Takes over what another log has."""
        with self._lock:
            self._most_marks = max(self._most_marks, len(self._marks) + len(pushed.marks) + 1)  # none of them goes
            numbers = np.fromiter(map(self._number, pushed.marks), np.int64, len(pushed.marks))
            sources = np.array([mark.source for mark in pushed.marks], object)
            for source in dict.fromkeys(sources):
                mine = (sources == source)[pushed.of]
                codes = 2 * numbers[pushed.of[mine]] + pushed.gone[mine]
                self._append(source, _Ids(pushed.ids[mine], codes))

    def older(self, ids: torch.Tensor, mark: Mark) -> torch.Tensor | None:
        """bool ``[n]``: the ids that ``mark`` is not older than; None = all of them, which is how it usually is."""
        with self._lock:
            newer = [source for source, stamp in self._newest.items() if stamp > mark.stamp]
            if not newer:
                return None
            is_newer = np.fromiter((each.stamp > mark.stamp for each in self._marks), bool, len(self._marks))
            parts = [part for source in newer for part in self._of.get(source, ())]
        wanted, blocked = ids.numpy(), np.zeros(len(ids), bool)
        for part in parts:
            at = np.searchsorted(part.ids, wanted)
            at[at == len(part.ids)] = 0
            blocked |= (part.ids[at] == wanted) & is_newer[part.codes[at] >> 1]
        return torch.from_numpy(~blocked)

    def pushed(self) -> Pushed:
        """All of them, ids rising."""
        with self._lock:
            marks, parts = list(self._marks), [part for each in self._of.values() for part in each]
        if not parts:
            empty = np.empty(0, np.int64)
            return Pushed(empty, marks, empty, empty.astype(bool))
        ids, codes = (np.concatenate(each) for each in zip(*parts, strict=True))
        order = np.lexsort((_ranks(marks)[codes >> 1], ids))  # stable: of equal stamps the later one counts
        ids, codes = ids[order], codes[order]
        last = np.append(ids[1:] != ids[:-1], True)
        ids, codes = ids[last], codes[last]
        return Pushed(ids, marks, codes >> 1, (codes & 1).astype(bool))

    def _number(self, mark: Mark) -> int:
        if not self._marks or self._marks[-1] != mark:
            if len(self._marks) >= self._most_marks:
                self._forget_marks()
            self._marks.append(mark)
        if mark.source not in self._newest or mark.stamp > self._newest[mark.source]:
            self._newest[mark.source] = mark.stamp
        return len(self._marks) - 1

    def _forget_marks(self) -> None:
        """Those that no row has any more."""
        parts = [part for each in self._of.values() for part in each]
        used = distinct(np.concatenate([part.codes >> 1 for part in parts])) if parts else np.empty(0, np.int64)
        numbers = np.zeros(len(self._marks), np.int64)
        numbers[used] = np.arange(len(used))
        self._of = {
            source: [_Ids(part.ids, 2 * numbers[part.codes >> 1] + (part.codes & 1)) for part in each]
            for source, each in self._of.items()
        }
        self._marks = [self._marks[number] for number in used]
        self._most_marks = max(MARKS, 2 * len(used))

    def _append(self, source: str, part: _Ids) -> None:
        if not len(part.ids):
            return
        parts = self._of.setdefault(source, [])
        parts.append(part)
        while len(parts) > 1 and len(parts[-2].ids) < 2 * len(parts[-1].ids):
            newer, older = parts.pop(), parts.pop()
            parts.append(_merged(older, newer, self._marks))


def _merged(one: _Ids, two: _Ids, marks: list[Mark]) -> _Ids:
    """Both; of an id that both have the newer mark, of equal stamps that of ``two``."""
    ids, codes = np.concatenate([one.ids, two.ids]), np.concatenate([one.codes, two.codes])
    order = np.argsort(ids, kind="stable")
    ids, codes = ids[order], codes[order]
    twice = np.flatnonzero(ids[1:] == ids[:-1])
    if len(twice):
        rank = _ranks(marks)
        first_is_newer = rank[codes[twice] >> 1] > rank[codes[twice + 1] >> 1]
        kept = np.ones(len(ids), bool)
        kept[np.where(first_is_newer, twice + 1, twice)] = False
        ids, codes = ids[kept], codes[kept]
    return _Ids(ids, codes)


def _ranks(marks: list[Mark]) -> np.ndarray:
    """The place of each mark among their stamps; equal stamps have equal ranks."""
    places = {stamp: place for place, stamp in enumerate(sorted({mark.stamp for mark in marks}))}
    return np.fromiter((places[mark.stamp] for mark in marks), np.int64, len(marks))
