"""`Pulse`: detects frozen ranks and unreachable hosts before a collective's deadline.

A process that dies closes its connections, so its peers notice at once. One that is stopped, or whose host has lost
power or network, does not. So every rank increments a count in the store once a second; a rank whose count does not
change for ``lost_after_s`` is lost. Each rank measures that time in its own beats, so that a rank which was itself
frozen does not report the others.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from shoal.errors import ConfigError
from shoal.switches import switch

BEAT_S = 1.0
CLOSE_S = 2.0
"""How long `Pulse.close` waits for calls to the store."""
GRACE_S = 3.0
"""How long a call may take to fail by itself after ranks are lost, before the process exits."""
EXIT_CODE = 75
"""Exit code of a process that is stuck in a call because other ranks are lost (EX_TEMPFAIL: try again)."""
_LOST_S = 10
_ENDED = b"ended"
_log = logging.getLogger(__name__)


class Pulse:
    """Sends one rank's beats and watches those of the others.

    Args:
        store: a separate connection to the store of these ranks; calls on it may hang.
        lost_after_s: seconds without a beat after which a rank is lost.
        leaves: whether to exit when ranks are lost and a call does not return; a launcher restarts the process.
    """

    def __init__(self, store: Any, rank: int, world_size: int, *, lost_after_s: float, leaves: bool) -> None:
        self._store, self.rank, self._world = store, rank, world_size
        self._patience, self._leaves = max(2, round(lost_after_s / BEAT_S)), leaves
        self._count, self._answered = 0, 0
        self._seen: dict[int, tuple[bytes, int]] = {}
        """By rank: its last count, and this rank's own count when that arrived."""
        self.lost: tuple[int, ...] = ()
        """Lost ranks; a rank stays lost."""
        self.why = ""
        self._calls: set[object] = set()
        """Running collectives."""
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        store.set(_key(rank), b"0")  # before the group is made, so that every rank's count exists afterwards

    def start(self) -> Pulse:
        """Start the beats; the group must exist on all ranks."""
        for name, run in (("shoal-beat", self._beat), ("shoal-pulse", self._watch)):
            self._start(name, run)
        return self

    def _start(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Stop the beats, without the others reporting this rank as lost.

        Waits for its threads unless the store hangs, because a thread inside a store call during interpreter shutdown
        aborts the process.
        """
        if not self._ended.is_set():
            self._ended.set()
            self._start("shoal-beat-end", self._leave)
        end = time.monotonic() + CLOSE_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Mark the enclosed code as waiting for other ranks."""
        call = object()
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)

    def _leave(self) -> None:
        with suppress(RuntimeError):  # the store is already gone
            self._store.set(_key(self.rank), _ENDED)

    def _beat(self) -> None:
        """Exchange beats through the store, whose calls may hang."""
        while not self._ended.wait(BEAT_S):
            try:
                self._exchange()
            except RuntimeError:
                return  # `_watch` notices the missing answers

    def _exchange(self) -> None:
        """Publish this rank's count and read those of the others."""
        self._store.set(_key(self.rank), str(self._count).encode())
        counts = self._store.multi_get([_key(rank) for rank in range(self._world)])
        self._answered = self._count
        for rank, count in enumerate(counts):
            if count == _ENDED or self._seen.get(rank, (None, 0))[0] != count:
                self._seen[rank] = (count, self._count)

    def _watch(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._count += 1
            self.judge()
            if self.lost:
                _log.error("rank %d: %s", self.rank, self.why)
                self._leave_call()
                return

    def judge(self) -> None:
        """Decide which ranks are lost: sets ``lost`` and ``why``."""
        if self._count - self._answered > self._patience:
            self.lost, self.why = (0,), f"the store of the ranks has not answered for {self._patience:g} s"
            return
        late = [
            rank for rank, (count, at) in sorted(self._seen.items())
            if rank != self.rank and count != _ENDED and self._count - at > self._patience
        ]  # fmt: skip
        if late:
            self.lost, self.why = tuple(late), f"rank(s) {late} have not been heard from for {self._patience:g} s"

    def _leave_call(self) -> None:
        """Exit the process if it stays in a call that waits for lost ranks."""
        if not self._leaves:
            return
        atexit.register(_end)  # ending a group waits for its operations, which wait for lost ranks
        while not self._ended.is_set():
            before = set(self._calls)
            if self._ended.wait(GRACE_S) or not before & self._calls:
                continue
            print(f"shoal: rank {self.rank} waits in a call and exits: {self.why}", file=sys.stderr, flush=True)
            _end()


def _end() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(EXIT_CODE)


def pulse_wanted() -> float:
    """Seconds without a beat after which a rank is lost; 0: never.

    ``SHOAL_RANK_LOST_S`` if set, else 10 under a launcher that restarts ranks. Otherwise 0: a frozen rank is waited for
    until the collective's deadline.
    """
    seconds = switch("SHOAL_RANK_LOST_S", _LOST_S if restarts_allowed() else 0)
    if seconds < 0:
        raise ConfigError(f"environment variable SHOAL_RANK_LOST_S must be >= 0, got {seconds}")
    return float(seconds)


def restarts_allowed() -> bool:
    """Whether a launcher restarts the ranks when one fails."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") not in ("", "0")


def _key(rank: int) -> str:
    return f"shoal.beat/{rank}"
