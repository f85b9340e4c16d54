"""`Pulse`: notices ranks that are frozen, and hosts that have vanished, before the deadline of a collective.

A process that dies closes its connections, and its peers are told at once. One that is stopped, or whose host has lost
power or network, says nothing. Here every rank counts in the store, once a second; a rank whose count stands still for
``lost_after_s`` is lost. Seconds are counted in a rank's own beats: one that was frozen itself blames nobody.
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
"""How long `Pulse.close` waits for calls of the store."""
GRACE_S = 3.0
"""How long a call may take to end by itself when ranks are lost, before the process ends."""
EXIT_CODE = 75
"""Of a process that cannot end otherwise, since others are lost (EX_TEMPFAIL: try again)."""
_LOST_S = 10
_ENDED = b"ended"
_log = logging.getLogger(__name__)


class Pulse:
    """The beats of one rank, and who else beats.

    Args:
        store: a connection of its own to the store of these ranks; calls on it may hang.
        lost_after_s: how long a rank may be silent.
        leaves: whether to end the process when ranks are lost and a call does not end; a launcher starts it again.
    """

    def __init__(self, store: Any, rank: int, world_size: int, *, lost_after_s: float, leaves: bool) -> None:
        self._store, self.rank, self._world = store, rank, world_size
        self._patience, self._leaves = max(2, round(lost_after_s / BEAT_S)), leaves
        self._count, self._answered = 0, 0
        self._seen: dict[int, tuple[bytes, int]] = {}
        """By rank: its last count, and our own when that was new."""
        self.lost: tuple[int, ...] = ()
        """Ranks that are lost; none comes back."""
        self.why = ""
        self._calls: set[object] = set()
        """Collectives under way."""
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        store.set(_key(rank), b"0")  # before the group is made, so that every rank's is there afterwards

    def start(self) -> Pulse:
        """Begins to count; the group must exist on all ranks."""
        for name, run in (("shoal-beat", self._beat), ("shoal-pulse", self._watch)):
            self._start(name, run)
        return self

    def _start(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Ends; the others do not miss this rank.

        Waits for its threads, unless the store hangs: one that is in a call of the store while the interpreter ends
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
        """Code that waits for other ranks."""
        call = object()
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)

    def _leave(self) -> None:
        with suppress(RuntimeError):  # the store has gone already
            self._store.set(_key(self.rank), _ENDED)

    def _beat(self) -> None:
        """Talks to the store, which may hang."""
        while not self._ended.wait(BEAT_S):
            try:
                self._exchange()
            except RuntimeError:
                return  # `_watch` sees that nothing is answered

    def _exchange(self) -> None:
        """Says that this rank counts, and asks whether the others do."""
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
        """Sets ``lost`` and ``why``."""
        if self._count - self._answered > self._patience:
            self.lost, self.why = (0,), f"the store of the ranks has not answered for {self._patience:g} s"
            return
        late = [
            rank for rank, (count, at) in sorted(self._seen.items())
            if rank != self.rank and count != _ENDED and self._count - at > self._patience
        ]  # fmt: skip
        if late:
            self.lost, self.why = tuple(late), f"rank(s) {late} have not been heard of for {self._patience:g} s"

    def _leave_call(self) -> None:
        """Ends the process if it stays in a call that waits for what is lost."""
        if not self._leaves:
            return
        atexit.register(_end)  # ending a group waits for its operations, which wait for what is lost
        while not self._ended.is_set():
            before = set(self._calls)
            if self._ended.wait(GRACE_S) or not before & self._calls:
                continue
            print(f"shoal: rank {self.rank} ends: {self.why}, and it waits for them", file=sys.stderr, flush=True)
            _end()


def _end() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(EXIT_CODE)


def pulse_wanted() -> float:
    """After how many seconds a silent rank is lost; 0: never.

    Under a launcher that starts ranks again it is ``SHOAL_RANK_LOST_S``, 10 unless set. Without one a rank that stands
    still is waited for until the deadline of the collective, unless the variable is set.
    """
    seconds = switch("SHOAL_RANK_LOST_S", _LOST_S if restarts_allowed() else 0)
    if seconds < 0:
        raise ConfigError(f"environment variable SHOAL_RANK_LOST_S must be >= 0, got {seconds}")
    return float(seconds)


def restarts_allowed() -> bool:
    """Whether a launcher starts the ranks again when one fails."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") not in ("", "0")


def _key(rank: int) -> str:
    return f"shoal.beat/{rank}"
