"""Ids on their way from the device to those who ask which were written: their writers do not wait for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal import _core

_UNDER_WAY = 32  # batches that may be under way; a further one waits for the first


class Marks:
    """What a table's writes tell a sync client's `TouchedKeySet`, and trackers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._client: Callable[[Tensor], Any] | None = None
        self.trackers: list[_core.Tracker] = []
        self._under_way: deque[tuple[Tensor, Tensor, torch.cuda.Event, bool]] = deque()
        self._lock = threading.Lock()
        self._waits = device.type != "cuda"

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
        if self._waits:
            self._tell(ids[rows >= 0].cpu(), trained)
            return
        home = torch.empty(ids.numel(), dtype=torch.int64, device="cpu", pin_memory=True)
        home.copy_(ids, non_blocking=True)
        written = torch.empty(ids.numel(), dtype=torch.bool, device="cpu", pin_memory=True)
        written.copy_(rows >= 0, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        with self._lock:
            self._under_way.append((home, written, event, trained))
        self.settle(leave=_UNDER_WAY)

    def _tell(self, ids: Tensor, trained: bool) -> None:
        ids = ids.contiguous()
        for tracker in self.trackers:
            tracker.wrote(ids.data_ptr(), ids.numel())
        if self._client is not None and trained:
            self._client(ids)

    def remove(self, ids: Tensor) -> None:
        """These ids, which had rows, were removed. Waits for the device."""
        if self.trackers and ids.numel():
            home = ids.cpu().contiguous()
            for tracker in self.trackers:
                tracker.removed(home.data_ptr(), home.numel())

    def replace(self, former: Tensor) -> None:
        """All rows were replaced; these ids had one before."""
        self.remove(former)
        for tracker in self.trackers:
            tracker.replaced()

    def settle(self, leave: int = 0) -> None:
        """Tells of what has arrived, and waits for it while more than ``leave`` batches are under way."""
        with self._lock:
            while self._under_way:
                home, written, event, trained = self._under_way[0]
                if len(self._under_way) <= leave and not event.query():
                    return
                event.synchronize()
                self._tell(home[written], trained)
                self._under_way.popleft()
