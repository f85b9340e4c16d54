"""Ids on their way from the device to a sync client's set of touched keys: their writers do not wait for them."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch
from torch import Tensor

_UNDER_WAY = 32  # batches that may be under way; a further one waits for the first


class Marks:
    """What a table's writes add to a `TouchedKeySet`, which asks for it before it tells what it holds."""

    def __init__(self, keys: Any, number: int, device: torch.device) -> None:
        self._keys, self._number, self._device = keys, number, device
        self._under_way: deque[tuple[Tensor, Tensor, torch.cuda.Event]] = deque()
        self._lock = threading.Lock()
        self._asked = hasattr(keys, "ask_first")
        if self._asked:
            keys.ask_first(self)

    def add(self, ids: Tensor, rows: Tensor) -> None:
        """Those of the ids that have a row, which is not -1, were written."""
        if self._device.type != "cuda" or not self._asked:
            self._keys.insert(ids[rows >= 0].cpu(), self._number)
            return
        home = torch.empty(ids.numel(), dtype=torch.int64, device="cpu", pin_memory=True)
        home.copy_(ids, non_blocking=True)
        written = torch.empty(ids.numel(), dtype=torch.bool, device="cpu", pin_memory=True)
        written.copy_(rows >= 0, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        with self._lock:
            self._under_way.append((home, written, event))
        self.settle(leave=_UNDER_WAY)

    def settle(self, leave: int = 0) -> None:
        """Puts what has arrived into the set, and waits for it while more than ``leave`` batches are under way."""
        with self._lock:
            while self._under_way:
                home, written, event = self._under_way[0]
                if len(self._under_way) <= leave and not event.query():
                    return
                event.synchronize()
                self._keys.insert(home[written], self._number)
                self._under_way.popleft()
