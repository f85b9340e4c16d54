"""Detection of NaN and infinity in gradients and values: found on the device, reported later."""

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


class GroupReport:
    """Problems with a group's arguments that kernels report through host memory, without a wait.

    Three numbers: the bad gradients of all updates so far, whether there were invalid offsets, and the number for
    `Room`.
    """

    def __init__(self, whose: str, group: Any) -> None:
        self._whose, self._device, self._group = whose, group.device, weakref.ref(group)
        device = self._device
        self.count = torch.zeros(3, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self.words = self._now = self.count.numpy()
        self._known = 0
        self._lock = threading.Lock()

    def check(self, wait: bool = False) -> None:
        """Raises if the arguments of an earlier call turned out to be bad."""
        if wait and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._now[0] != self._known:
            with self._lock:
                bad, self._known = int(self._now[0]) - self._known, int(self._now[0])
            refuse_if(bad, self._whose, "gradients")
        if self._now[1]:
            self._now[1] = 0
            raise ConfigError(
                f"{self._whose}: offsets must rise from 0 to the number of ids, but those of an earlier batch did not; "
                "the rows read and updated with them are undefined"
            )

    def over(self) -> bool:
        """Whether the group no longer exists and no more reports will come."""
        return self._group() is None


class Judge:
    """The handling of bad gradients and values of one table."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._device = name, device
        self._pending: deque[tuple[Tensor, torch.cuda.Event, str, str]] = deque()
        self._skipped = 0  # to be added to the number on the device, which is never reset: writes may be counting
        self._skipped_on_device: Tensor | None = None
        self.reports: list[GroupReport] = []
        """The reports of groups that contain this table."""
        self._checking = threading.Lock()

    def judge(self, grads: Tensor, dim: int, how: str, what: str = "gradients") -> tuple[Tensor | None, Tensor | None]:
        """The arguments ``gate`` and ``drop`` of `Storage.insert`; ``what`` names the values in the message."""
        n = grads.numel() // dim
        if how == "ignore" or n == 0:
            return None, None
        if how == "skip":
            drop = torch.empty(n, dtype=torch.uint8, device=self._device)
            bad = count_bad(grads, dim, drop)
            self.skip_counter().add_(bad)
            return None, drop
        bad = count_bad(grads, dim, None)
        self.report(bad, what=what)
        return bad, None

    def report(self, bad: Tensor, whose: str | None = None, what: str = "gradients") -> None:
        """Sends the number of bad rows, of this table or of others, to the host; `check` raises when it has arrived."""
        whose = whose or f"table {self._name!r}"
        if self._device.type != "cuda":
            refuse_if(int(bad), whose, what)
        elif not capturing(self._device):
            count = torch.empty(1, dtype=torch.int64, device="cpu", pin_memory=True)
            count.copy_(bad, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending.append((count, event, whose, what))

    def check(self, wait: bool = False) -> None:
        """Raises if the gradients or values of an earlier call turned out to be bad."""
        if capturing(self._device):
            return
        for report in self.reports:
            report.check(wait)
        if wait:
            self.reports = [report for report in self.reports if not report.over()]
        if not self._pending:
            return
        with self._checking:
            while self._pending:
                count, event, whose, what = self._pending[0]
                if wait:
                    event.synchronize()
                elif not event.query():
                    return
                self._pending.popleft()
                refuse_if(int(count), whose, what)

    def skip_counter(self) -> Tensor:
        """int64 on the device: occurrences skipped so far. Its address never changes."""
        if self._skipped_on_device is None:
            self._skipped_on_device = torch.zeros(1, dtype=torch.int64, device=self._device)
        return self._skipped_on_device

    @property
    def skipped(self) -> int:
        """Occurrences skipped so far. Waits for the device."""
        return self._skipped + self._count_on_device()

    @skipped.setter
    def skipped(self, count: int) -> None:
        self._skipped = count - self._count_on_device()

    def _count_on_device(self) -> int:
        return 0 if self._skipped_on_device is None else int(self._skipped_on_device)


def refuse_if(bad: int, whose: str, what: str) -> None:
    """Raises if any rows are bad."""
    if bad:
        if what == "scores":
            raise ConfigError(f"{whose}: scores must not be NaN, got {bad} NaN; nothing was applied")
        rows = f"1 row of the {what} holds" if bad == 1 else f"{bad} rows of the {what} hold"
        hint = " Clip them, or set on_bad_gradient='skip'" if what == "gradients" else ""
        raise ConfigError(f"{whose}: {rows} NaN or infinity; nothing was applied.{hint}")
