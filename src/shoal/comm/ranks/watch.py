"""`Watch`: waits for started collectives, with a deadline and errors that name the missing ranks."""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

from shoal.comm.ranks.restarts.pulse import Pulse
from shoal.errors import DeadlineError, PeerError, ShoalError
from shoal.metrics import emit_counter

SLICE_S = 0.2
_SLICE, _NOTHING = timedelta(seconds=SLICE_S), nullcontext()
ROLL_CALL_S = 3.0
"""How long a failed collective waits, at most, for other ranks to report that they are alive."""
_FAILED = "failed"
_abandoned: list[Any] = []
"""Failed groups, kept alive: destroying one blocks, with the GIL held, until its operations time out."""


class Watch:
    """Reports of one group's ranks, in its store, when a collective fails.

    A rank whose collective fails reports that it is alive and has given up; ranks that still wait see that and do the
    same. Ranks that report nothing are missing. Failures are counted as ``ranks_failed_collectives``.
    """

    def __init__(self, group: Any, store: Any, rank: int, world_size: int) -> None:
        self._group = weakref.ref(group)
        self.store, self.rank, self.world_size = store, rank, world_size
        self.broken = ""
        """Why this group can no longer be used; "" while it can."""
        self.missing: list[int] = []
        """Ranks that did not answer."""
        self.pulse: Pulse | None = None
        """Detects ranks that are frozen or unreachable."""

    def start(self, what: str, begin: Callable[[], Any]) -> Any:
        """Start a collective with ``begin`` and return its handle."""
        self.check()
        with self.naming(what):
            return begin()

    def check(self) -> None:
        """Raise if an earlier collective failed, or ranks are lost."""
        if not self.broken and self.pulse is not None and self.pulse.lost:
            self.broken, self.missing = self.pulse.why, list(self.pulse.lost)
        if self.broken:
            text = f"rank {self.rank}: an earlier exchange failed ({self.broken}); start the ranks again"
            raise PeerError(text, ranks=self.missing)

    def wait(self, what: str, work: Any, timeout_s: float, *, sliced: bool = True) -> None:
        """Wait for a started collective, leaving enough of ``timeout_s`` for the roll call.

        A ``sliced`` wait checks between slices whether another rank has given up, because only that rank may have
        noticed the failure. A point-to-point wait cannot be sliced, because its timeout breaks the connection.
        """
        begin = time.monotonic()
        end = begin + max(timeout_s - min(2.0, timeout_s / 4), 0.05)
        try:
            while True:
                left = max(end - time.monotonic(), 0.001)
                limit = _SLICE if sliced and left >= SLICE_S else timedelta(seconds=left)
                try:
                    with self._inside():
                        work.wait(limit)
                    return
                except RuntimeError:
                    if sliced and work.is_completed():  # it failed, or completed just after the slice ended
                        work.wait()
                        return
                    if not sliced or time.monotonic() >= end:
                        raise
                    if self.another_gave_up():
                        raise RuntimeError("another rank gave up") from None
        except RuntimeError as error:
            now = time.monotonic()
            until = min(now + min(ROLL_CALL_S, timeout_s / 2), begin + timeout_s)
            raise self.failed(what, error, until, waited_s=now - begin if now >= end else None) from error

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Turn a process group error in the enclosed code into one that names the missing ranks."""
        try:
            with self._inside():
                yield
        except RuntimeError as error:
            if isinstance(error, ShoalError):
                raise
            raise self.failed(what, error, time.monotonic() + ROLL_CALL_S) from error

    def _inside(self) -> AbstractContextManager[None]:
        return _NOTHING if self.pulse is None else self.pulse.inside()

    def failed(self, what: str, error: Exception, until: float, *, waited_s: float | None = None) -> Exception:
        """Mark the group as broken and return the error to raise, after a roll call that ends at ``until``."""
        self.missing = missing = self.roll_call(until)
        why = re.sub(r"\s+", " ", str(error)).partition(". ")[0][:200]
        who = f"rank(s) {missing} did not answer; see their logs" if missing else "all ranks answered; see their logs"
        kind: type[DeadlineError | PeerError] = PeerError
        text = f"rank {self.rank}: {what} failed ({why}); {who}"
        if waited_s is not None or re.search(r"time[d ]*.?out", why, re.IGNORECASE):
            kind = DeadlineError
            waited = f"waited {waited_s:.3g} s in {what}" if waited_s is not None else f"waited in {what} ({why})"
            text = f"rank {self.rank} {waited}; {who}, or raise the timeout"
        raised = kind(text, ranks=missing)
        self.broken = text
        emit_counter("ranks_failed_collectives", 1, f"call={what}")
        return raised

    def roll_call(self, until: float) -> list[int]:
        """Report that this rank is alive, wake ranks that wait for it, and list ranks not heard from by ``until``."""
        if not self.broken:
            _abandoned.append(self._group())
        self.broken = self.broken or "this rank gave up"
        others = [r for r in range(self.world_size) if r != self.rank]
        if self.store is None:
            return []
        if self.pulse is not None and self.pulse.lost:
            return list(self.pulse.lost)
        try:
            self.store.set(_alive(self.rank), b"1")
            self.store.set(_FAILED, b"1")
            while others := [r for r in others if not self.store.check([_alive(r)])]:
                if time.monotonic() >= until:
                    break
                time.sleep(0.02)
            return others
        except RuntimeError:  # the store is gone with the rank that served it
            return [0] if self.rank != 0 else others

    def answer(self) -> bool:
        """Whether another rank gave up; if so, report that this one is alive."""
        if self.broken or not self.another_gave_up():
            return False
        try:
            self.store.set(_alive(self.rank), b"1")
        except RuntimeError:  # the store is gone: the next collective will fail
            return False
        return True

    def another_gave_up(self) -> bool:
        """Whether a rank reported that it gave up, or is lost."""
        if self.pulse is not None and self.pulse.lost:
            return True
        try:
            return self.store is not None and self.store.check([_FAILED])
        except RuntimeError:
            return False


def _alive(rank: int) -> str:
    return f"alive/{rank}"
