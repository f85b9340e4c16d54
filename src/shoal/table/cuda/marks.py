"""What a table's writes tell those who ask which ids were written: their writers do not wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shoal import _core
from shoal.table.cuda.budgets.arrivals import Arrivals


class Marks:
    """Who is told of a table's writes: a sync client's `TouchedKeySet`, and trackers."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._client: Callable[[Tensor], Any] | None = None
        self._waits = False
        self.trackers: list[_core.Tracker] = []

    def set_client(self, keys: Any, number: int) -> None:
        """Has trained ids go into a set, which asks for those under way before it tells what it holds."""
        self._client = lambda ids: keys.insert(ids, number)
        if hasattr(keys, "ask_first"):
            keys.ask_first(self)
        else:
            self._waits = True

    def add(self, ids: Tensor, rows: Tensor, trained: bool = True) -> None:
        """Those of the ids that have a row, which is not -1, were written. ``trained``: by an optimizer."""
        if not self.trackers and (self._client is None or not trained):
            return
        self._arrivals.send((ids, rows >= 0), lambda home, written: self._tell(home[written], trained))
        if self._waits:
            self.settle()

    def _tell(self, ids: Tensor, trained: bool) -> None:
        ids = ids.contiguous()
        for tracker in self.trackers:
            tracker.wrote(ids.data_ptr(), ids.numel())
        if self._client is not None and trained:
            self._client(ids)

    def remove(self, ids: Tensor) -> None:
        """These ids, which had rows, were removed. Waits for the device."""
        if self.trackers and ids.numel():
            self.settle()
            self.removed(ids.cpu())

    def removed(self, ids: Tensor) -> None:
        """The same, of ids in host memory, in turn."""
        ids = ids.contiguous()
        for tracker in self.trackers:
            tracker.removed(ids.data_ptr(), ids.numel())

    def replace(self, former: Tensor) -> None:
        """All rows were replaced; these ids had one before."""
        self.remove(former)
        for tracker in self.trackers:
            tracker.replaced()

    def settle(self) -> None:
        """Tells of everything that was written so far."""
        self._arrivals.settle()
