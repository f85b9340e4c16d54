"""When each row of a served table was pushed last, so that pushes that are newer than an export are known."""

import threading

import numpy as np
import torch

MERGE_ROWS = 1_000_000


class PushLog:
    """id -> the latest time at which its row was read from the trainer. Thread-safe.

    Takes 16 bytes per distinct id and at most as much again for pushes that are not merged yet. Nothing is dropped.
    """

    def __init__(self) -> None:
        self._ids = np.empty(0, np.int64)  # distinct, sorted
        self._times = np.empty(0, np.float64)
        self._recent: list[tuple[np.ndarray, np.ndarray | float]] = []
        self._recent_rows = 0
        self._lock = threading.Lock()
        self._merging = threading.Lock()

    def add(self, ids: torch.Tensor, times: np.ndarray | float) -> None:
        """Ids that were pushed, and when: one time for all of them, or one for each."""
        with self._lock:
            self._recent.append((ids.numpy().copy(), times))  # copied: it may be a part of a whole message
            self._recent_rows += len(ids)
            merge = self._recent_rows > max(MERGE_ROWS, len(self._ids)) and not self._merging.locked()
        if merge:  # away from the push that filled it up
            threading.Thread(target=self._merge, name="shoal-pushed", daemon=True).start()

    def since(self, time: float) -> tuple[torch.Tensor, np.ndarray, int]:
        """(ids whose row was read at ``time`` or later, their times, how many others there are)."""
        ids, times = self._merge()
        newer = times >= time
        return torch.from_numpy(ids[newer]), times[newer], int(len(ids) - newer.sum())

    def _merge(self) -> tuple[np.ndarray, np.ndarray]:
        with self._merging:
            with self._lock:
                recent = list(self._recent)
            if recent:
                ids = np.concatenate([self._ids, *(each for each, _ in recent)])
                times = np.concatenate([self._times, *(np.broadcast_to(at, each.shape) for each, at in recent)])
                order = np.lexsort((times, ids))
                ids, times = ids[order], times[order]
                last = np.append(ids[1:] != ids[:-1], True)[: len(ids)]
                self._ids, self._times = ids[last], times[last]
                with self._lock:  # only now: what cannot be merged for lack of memory is not lost
                    del self._recent[: len(recent)]
                    self._recent_rows = sum(len(each) for each, _ in self._recent)
            return self._ids, self._times
