"""`Watch`: waits for started collectives, with a deadline and the names of the ranks that are missing."""

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
"""The most that a failed collective waits to hear who else is alive."""
_FAILED = "failed"
_abandoned: list[Any] = []
"""Groups that failed. Ending one waits for its operations, with the interpreter locked; those end by their timeout."""


class Watch:
    """What the ranks of one group say of themselves in its store when a collective fails.

    A rank whose collective fails says that it lives, and that it gave up; whoever still waits sees that, and does the
    same. Ranks that say nothing are missing. Failures are counted as ``ranks_failed_collectives``.
    """

    def __init__(self, group: Any, store: Any, rank: int, world_size: int) -> None:
        self._group = weakref.ref(group)
        self.store, self.rank, self.world_size = store, rank, world_size
        self.broken = ""
        """Why this group cannot be used any more."""
        self.missing: list[int] = []
        """Ranks that did not answer."""
        self.pulse: Pulse | None = None
        """Who notices ranks that are frozen or out of reach."""

    def start(self, what: str, begin: Callable[[], Any]) -> Any:
        """The handle of a collective that ``begin`` starts."""
        self.check()
        with self.naming(what):
            return begin()

    def check(self) -> None:
        """Raises where an earlier collective failed, or ranks are lost."""
        if not self.broken and self.pulse is not None and self.pulse.lost:
            self.broken, self.missing = self.pulse.why, list(self.pulse.lost)
        if self.broken:
            text = f"rank {self.rank}: an earlier exchange failed ({self.broken}); start the ranks again"
            raise PeerError(text, ranks=self.missing)

    def wait(self, what: str, work: Any, timeout_s: float, *, sliced: bool = True) -> None:
        """Waits for a started collective; its wait ends in time for the roll call to fit into ``timeout_s``.

        ``sliced`` waits look between slices whether another rank has given up: that one may be the only rank that can
        tell. A point-to-point wait cannot be sliced, since its timeout breaks the connection.
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
                    if sliced and work.is_completed():  # it failed, or it ended just after the slice did
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
        """An error of the process group inside becomes one that names the ranks that are missing."""
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
        """The error to raise, after a roll call that ends at ``until``; the group is broken from now on."""
        self.missing = missing = self.roll_call(until)
        why = re.sub(r"\s+", " ", str(error)).partition(". ")[0][:200]
        who = f"rank(s) {missing} did not answer; see their logs" if missing else "all ranks answer; see their logs"
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
        """Says that this rank lives, wakes those who wait for it, and lists who did not say so by ``until``."""
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
        except RuntimeError:  # the store went down with the rank that served it
            return [0] if self.rank != 0 else others

    def answer(self) -> bool:
        """Whether another rank gave up. This one, busy with other things, then says in the roll call that it lives."""
        if self.broken or not self.another_gave_up():
            return False
        try:
            self.store.set(_alive(self.rank), b"1")
        except RuntimeError:  # the store went down: the next collective will tell
            return False
        return True

    def another_gave_up(self) -> bool:
        """Whether a rank said so, or is lost."""
        if self.pulse is not None and self.pulse.lost:
            return True
        try:
            return self.store is not None and self.store.check([_FAILED])
        except RuntimeError:
            return False


def _alive(rank: int) -> str:
    return f"alive/{rank}"
