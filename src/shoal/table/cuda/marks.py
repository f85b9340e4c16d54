"""Reports of written ids to a sync client and to trackers, for which writes do not wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shoal import _core
from shoal.table.cuda.budgets.arrivals import Arrivals


class Marks:
    """The receivers of a table's written ids: a sync client's `TouchedKeySet`, and trackers."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._client: Callable[[Tensor], Any] | None = None
        self._waits = False
        self.trackers: list[_core.Tracker] = []

    def set_client(self, keys: Any, number: int) -> None:
        """Sends trained ids to a set, which waits for pending ids before it is read."""
        self._client = lambda ids: keys.insert(ids, number)
        if hasattr(keys, "ask_first"):
            keys.ask_first(self)
        else:
            self._waits = True

    def add(self, ids: Tensor, rows: Tensor, trained: bool = True) -> None:
        """Reports the ids whose row is not -1 as written. ``trained``: by an optimizer."""
        if not self.trackers and (self._client is None or not trained):
            return
        self._arrivals.send((ids, rows >= 0), lambda ids, written: self._report(ids[written], trained))
        if self._waits:
            self.settle()

    def _report(self, ids: Tensor, trained: bool) -> None:
        ids = ids.contiguous()
        for tracker in self.trackers:
            tracker.wrote(ids.data_ptr(), ids.numel())
        if self._client is not None and trained:
            self._client(ids)

    def remove(self, ids: Tensor) -> None:
        """Reports ids that had rows as removed. Waits for the device."""
        if self.trackers and ids.numel():
            self.settle()
            self.removed(ids.cpu())

    def removed(self, ids: Tensor) -> None:
        """Reports ids in host memory as removed, in order with other reports."""
        ids = ids.contiguous()
        for tracker in self.trackers:
            tracker.removed(ids.data_ptr(), ids.numel())

    def replace(self, previous: Tensor) -> None:
        """Reports that all rows were replaced; ``previous`` are the ids that had a row before."""
        self.remove(previous)
        for tracker in self.trackers:
            tracker.replaced()

    def settle(self) -> None:
        """Reports everything that was written so far."""
        self._arrivals.settle()
