"""What was pushed to each row of a served table, by whom and how new it is."""

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from shoal.stamps import Stamp

MERGE_ROWS = 1_000_000


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


class PushLog:
    """id -> the newest mark that it was pushed with. Thread-safe.

    Takes 16 bytes per distinct id and at most as much again for pushes that are not merged yet. Nothing is dropped.
    """

    def __init__(self) -> None:
        self._marks: list[Mark] = []
        self._ids = np.empty(0, np.int64)  # distinct, sorted
        self._of = np.empty(0, np.int64)  # 2 * number of the mark + whether it was a deletion
        self._recent: list[tuple[np.ndarray, np.ndarray | int]] = []
        self._recent_rows = 0
        self._newest: Mark | None = None
        self._lock = threading.Lock()
        self._merging = threading.Lock()

    def add(self, ids: torch.Tensor, mark: Mark, gone: bool = False) -> None:
        """Ids that were pushed, or deleted by a push."""
        if not len(ids):
            return
        with self._lock:
            number = self._number(mark)
            self._recent.append((ids.numpy().copy(), 2 * number + gone))  # copied: it may be a part of a whole message
            self._recent_rows += len(ids)
            merge = self._recent_rows > max(MERGE_ROWS, len(self._ids)) and not self._merging.locked()
        if merge:  # away from the push that filled it up
            threading.Thread(target=self.pushed, name="shoal-pushed", daemon=True).start()

    def extend(self, pushed: Pushed) -> None:
        """Takes over what another log has."""
        with self._lock:
            numbers = np.fromiter(map(self._number, pushed.marks), np.int64, len(pushed.marks))
            self._recent.append((pushed.ids, 2 * numbers[pushed.of] + pushed.gone))
            self._recent_rows += len(pushed.ids)

    def _number(self, mark: Mark) -> int:
        if not self._marks or self._marks[-1] != mark:
            self._marks.append(mark)
        if self._newest is None or mark.stamp > self._newest.stamp:
            self._newest = mark
        return len(self._marks) - 1

    def older(self, ids: torch.Tensor, mark: Mark) -> torch.Tensor | None:
        """bool ``[n]``: the ids that ``mark`` is not older than; None = all of them, which is how it usually is."""
        with self._lock:
            if self._newest is None or self._newest.stamp <= mark.stamp:
                return None
        known = self.pushed()
        newer = np.fromiter((each.stamp > mark.stamp for each in known.marks), bool, len(known.marks))[known.of]
        blocked = known.ids[newer]
        return torch.from_numpy(~np.isin(ids.numpy(), blocked))

    def pushed(self) -> Pushed:
        """All of them, ids rising."""
        with self._merging:
            with self._lock:
                recent, marks = list(self._recent), list(self._marks)
            if recent:
                ids = np.concatenate([self._ids, *(each for each, _ in recent)])
                of = np.concatenate([self._of, *(np.broadcast_to(codes, each.shape) for each, codes in recent)])
                rank = np.empty(len(marks), np.int64)
                rank[sorted(range(len(marks)), key=lambda number: marks[number].stamp)] = np.arange(len(marks))
                order = np.lexsort((rank[of >> 1], ids))  # stable: of equal stamps the later one counts
                ids, of = ids[order], of[order]
                last = np.append(ids[1:] != ids[:-1], True)[: len(ids)]
                self._ids, self._of = ids[last], of[last]
                with self._lock:  # only now: what cannot be merged for lack of memory is not lost
                    del self._recent[: len(recent)]
                    self._recent_rows = sum(len(each) for each, _ in self._recent)
                    if not self._recent:  # marks that no row has any more are forgotten
                        used, codes = np.unique(self._of >> 1, return_inverse=True)
                        marks = self._marks = [marks[number] for number in used]
                        self._of = 2 * codes + (self._of & 1)
            return Pushed(self._ids, marks, self._of >> 1, (self._of & 1).astype(bool))
