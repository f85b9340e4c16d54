"""Gradients that hold NaN or infinity: found on the device, told of later."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.table.cuda.backend import capturing
from shoal.table.cuda.updates import count_bad


class Judge:
    """What becomes of the bad gradients of one table."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._device = name, device
        self._told: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._skipped = 0
        self._skipped_there: Tensor | None = None

    def judge(self, grads: Tensor, dim: int, how: str) -> tuple[Tensor | None, Tensor | None]:
        """Gate and drop for `Group.insert`."""
        n = grads.numel() // dim
        if how == "ignore" or n == 0:
            return None, None
        if how == "skip":
            drop = torch.empty(n, dtype=torch.uint8, device=self._device)
            bad = count_bad(grads, dim, drop)
            self._skipped_there = bad if self._skipped_there is None else self._skipped_there + bad
            return None, drop
        bad = count_bad(grads, dim, None)
        self.tell(bad)
        return bad, None

    def tell(self, bad: Tensor) -> None:
        """Has the host told how many gradients are bad; `check` raises once it knows."""
        if self._device.type != "cuda":
            if int(bad):
                self._refuse(int(bad))
        elif not capturing(self._device):
            told = torch.empty(1, dtype=torch.int64, pin_memory=True)
            told.copy_(bad, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._told.append((told, event))

    def check(self, wait: bool = False) -> None:
        """Raises for the gradients of a call before that turned out to be bad."""
        while self._told and not capturing(self._device):
            told, event = self._told[0]
            if wait:
                event.synchronize()
            elif not event.query():
                return
            self._told.popleft()
            if int(told):
                self._refuse(int(told))

    def _refuse(self, rows: int) -> None:
        raise ConfigError(
            f"table {self._name!r}: {rows} rows of the gradients hold NaN or infinity; nothing was applied. Clip them, "
            "or set on_bad_gradient='skip'"
        )

    @property
    def skipped(self) -> int:
        """Occurrences passed over so far. Waits."""
        if self._skipped_there is not None:
            self._skipped += int(self._skipped_there)
            self._skipped_there = None
        return self._skipped

    @skipped.setter
    def skipped(self, count: int) -> None:
        self._skipped, self._skipped_there = count, None
