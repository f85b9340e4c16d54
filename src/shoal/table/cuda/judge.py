"""Gradients and values that hold NaN or infinity: found on the device, told of later."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.table.cuda.backend import capturing
from shoal.table.cuda.updates import count_bad


class Told:
    """What kernels find out about the arguments of a group's calls, written to host memory: nobody waits for it.

    Three numbers: the bad gradients of all updates so far, whether there were offsets that are none, and what `Room`
    hears.
    """

    def __init__(self, whose: str, group: Any) -> None:
        self._whose, self._device, self._group = whose, group.device, weakref.ref(group)
        device = self._device
        self.count = torch.zeros(3, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self.words = self._now = self.count.numpy()
        self._known = 0
        self._lock = threading.Lock()

    def check(self, wait: bool = False) -> None:
        """Raises for arguments of a call before that turned out to be bad."""
        if wait and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._now[0] != self._known:
            with self._lock:
                bad, self._known = int(self._now[0]) - self._known, int(self._now[0])
            refuse_if(bad, self._whose, "gradients")
        if self._now[1]:
            self._now[1] = 0
            raise ConfigError(
                f"{self._whose}: offsets must rise from 0 to the number of ids, which the offsets of an earlier batch "
                "did not; what was read and updated with them is undefined"
            )

    def over(self) -> bool:
        """Whether nothing will be told any more, of a group that is gone."""
        return self._group() is None


class Judge:
    """What becomes of the bad gradients and values of one table."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._device = name, device
        self._told: deque[tuple[Tensor, torch.cuda.Event, str, str]] = deque()
        self._skipped = 0
        self._skipped_there: Tensor | None = None
        self.listens: list[Told] = []
        """What groups that this table is in were told."""
        self._checking = threading.Lock()

    def judge(self, grads: Tensor, dim: int, how: str, what: str = "gradients") -> tuple[Tensor | None, Tensor | None]:
        """Gate and drop for `Storage.insert`; ``what`` they are, for the message."""
        n = grads.numel() // dim
        if how == "ignore" or n == 0:
            return None, None
        if how == "skip":
            drop = torch.empty(n, dtype=torch.uint8, device=self._device)
            bad = count_bad(grads, dim, drop)
            self.skip_counter().add_(bad)
            return None, drop
        bad = count_bad(grads, dim, None)
        self.tell(bad, what=what)
        return bad, None

    def tell(self, bad: Tensor, whose: str | None = None, what: str = "gradients") -> None:
        """Has the host told how many rows are bad, of this table or of others; `check` raises once it knows."""
        whose = whose or f"table {self._name!r}"
        if self._device.type != "cuda":
            refuse_if(int(bad), whose, what)
        elif not capturing(self._device):
            told = torch.empty(1, dtype=torch.int64, device="cpu", pin_memory=True)
            told.copy_(bad, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._told.append((told, event, whose, what))

    def check(self, wait: bool = False) -> None:
        """Raises for the gradients or values of a call before that turned out to be bad."""
        if capturing(self._device):
            return
        for told in self.listens:
            told.check(wait)
        if wait:
            self.listens = [told for told in self.listens if not told.over()]
        if not self._told:
            return
        with self._checking:
            while self._told:
                told, event, whose, what = self._told[0]
                if wait:
                    event.synchronize()
                elif not event.query():
                    return
                self._told.popleft()
                refuse_if(int(told), whose, what)

    def skip_counter(self) -> Tensor:
        """int64 on the device: occurrences passed over since the host last knew. Where it is does not change."""
        if self._skipped_there is None:
            self._skipped_there = torch.zeros(1, dtype=torch.int64, device=self._device)
        return self._skipped_there

    @property
    def skipped(self) -> int:
        """Occurrences passed over so far. Waits."""
        if self._skipped_there is not None:
            self._skipped += int(self._skipped_there)
            self._skipped_there.zero_()
        return self._skipped

    @skipped.setter
    def skipped(self, count: int) -> None:
        self._skipped = count
        if self._skipped_there is not None:
            self._skipped_there.zero_()


def refuse_if(bad: int, whose: str, what: str) -> None:
    """Raises when rows are bad."""
    if bad:
        if what == "scores":
            raise ConfigError(f"{whose}: scores must not be NaN, got {bad} that are; nothing was applied")
        rows = f"1 row of the {what} holds" if bad == 1 else f"{bad} rows of the {what} hold"
        hint = " Clip them, or set on_bad_gradient='skip'" if what == "gradients" else ""
        raise ConfigError(f"{whose}: {rows} NaN or infinity; nothing was applied.{hint}")
