"""`Turn`: one call at a time, from any thread and stream, for storages that are used together."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.table.cuda.backend import capturing

_serials = itertools.count()
_sharing = threading.Lock()


class Account(Protocol):
    """Counts inserted ids without updating the storages each time, as `shoal.table.cuda.groups.room.Room` does."""

    def settle(self) -> None:
        """Reports to the storages how many ids may have been inserted."""

    def spend(self, count: int) -> None:
        """Notes that up to ``count`` ids are inserted by others."""

    def recall(self) -> None:
        """Invalidates the known remaining room."""


class Turn:
    """The lock of storages, and the stream of their last call. During a call, their device is the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._index = device.index
        self._serial = next(_serials)
        self._lock = threading.RLock()
        self._devices: list[int] = []  # the current device before each `enter`
        self._streams: list[torch.cuda.Stream] = []  # streams of previous calls
        self.stream: int | None = None
        """The CUDA handle of the last call's stream."""
        self.writes = 0
        """The number of calls so far that wrote to several of the storages."""
        self.storages: weakref.WeakSet[Any] = weakref.WeakSet()
        self._accounts: list[weakref.ref[Any]] = []

    def enter(self) -> None:
        """Starts a call; the current stream waits for that of the previous call."""
        self._lock.acquire()
        if not self._cuda:
            return
        try:
            device = torch._C._cuda_getDevice()
            if device != self._index:
                torch.cuda.set_device(self._index)
            handle = torch._C._cuda_getCurrentRawStream(self._index)
            if handle != self.stream:
                self._follow(handle)
        except BaseException:
            self._lock.release()
            raise
        self._devices.append(device)

    def leave(self) -> None:
        """Ends the call."""
        if self._cuda:
            device = self._devices.pop()
            if device != self._index:
                torch.cuda.set_device(device)
        self._lock.release()

    def _follow(self, handle: int) -> None:
        if capturing(self._device):
            return
        stream = torch.cuda.current_stream(self._device)
        for before in self._streams:
            stream.wait_stream(before)
        # Memory that torch allocated on one stream is used on another, so it must not be reused too early.
        for storage in self.storages:
            for tensor in (storage.counts.words, storage.spare, *storage.kept.values()):
                if isinstance(tensor, Tensor):
                    tensor.record_stream(stream)
        self._streams, self.stream = [stream], handle

    # --- accounts -----------------------------------------------------------------------------------------------------

    def open(self, account: Account) -> None:
        """Registers an account over some of the storages, for as long as it is referenced."""
        self._accounts.append(weakref.ref(account))

    def others(self, account: Account) -> bool:
        """Whether there are more accounts than this one."""
        return len(self._accounts) > 1 and any(other is not account for other in self.accounts())

    def accounts(self) -> Iterator[Account]:
        """The accounts that still exist."""
        if any(ref() is None for ref in self._accounts):
            self._accounts = [ref for ref in self._accounts if ref() is not None]
        for ref in self._accounts:
            account = ref()
            if account is not None:
                yield account


def share_turn(storages: Iterable[Any]) -> None:
    """Makes storages share one turn from now on, so that a call over all of them takes one lock."""
    with _sharing:
        turns: list[Turn] = sorted({storage.turn for storage in storages}, key=lambda turn: turn._serial)
        first, *rest = turns
        for turn in turns:
            turn._lock.acquire()
        try:
            for turn in rest:
                first._streams, first.stream = first._streams + turn._streams, None
                first._accounts += turn._accounts
                first.writes += turn.writes + 1
                for storage in list(turn.storages):
                    storage.turn = first
                    first.storages.add(storage)
        finally:
            for turn in reversed(turns):
                turn._lock.release()
