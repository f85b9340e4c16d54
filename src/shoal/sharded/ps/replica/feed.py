"""The leader's side of a shard on several servers: hands its log out, and holds answers until followers have it too."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from shoal.errors import DataError
from shoal.sharded.ps.protocol import Reply, Request, Status, error_reply
from shoal.sharded.ps.replica.log_reader import LogReader, RecordsGone
from shoal.sharded.ps.replica.terms import Terms, differs
from shoal.sharded.ps.server.backlog import Backlog, Waiting
from shoal.sharded.ps.server.writes import Applied

MAX_REPLY_BYTES = 8 << 20
TICK_S = 0.02
REMEMBERED_S = 60.0  # how long the log is kept for a follower that is silent


class Ack(StrEnum):
    """When a write is acknowledged."""

    LOCAL = "local"
    """When it is on this server's disk. The loss of the disk loses what followers had not asked for yet."""
    FOLLOWER = "follower"
    """When it is also on the disk of every follower that is in sync."""


@dataclass
class Follower:
    """What the leader knows of one follower."""

    after: int = 0
    """Records up to this one are on its disk."""
    heard: float = 0.0
    moved: float = 0.0
    """When it last had more than before, or everything. One that asks and does not move cannot write to its disk."""
    given: int = 0
    given_at: float = 0.0
    """The last record that there was when it was last answered, and when that was."""
    round_s: float = float("inf")
    """How long it took to store all that there was when it was last answered; 0 where it has everything."""
    near_since: float = field(default_factory=time.monotonic)
    """When it last lacked so much that nobody should wait for it."""
    reader: LogReader | None = None
    waiting: Waiting | None = None
    until: float = 0.0
    """When its question is answered though there is nothing new."""


class Feed:
    """Answers followers and lets go of answers. `loop` runs in a thread; any thread may call the rest.

    Args:
        directory: of the log.
        last: the number of the last record in it.
        terms: of the log.
        may_answer: whether this server still leads, as far as it can know.
        ack: when a write is acknowledged.
    """

    def __init__(
        self,
        directory: Path,
        backlog: Backlog,
        *,
        last: Callable[[], int],
        terms: Callable[[], Terms],
        may_answer: Callable[[], bool],
        ack: Ack = Ack.LOCAL,
    ) -> None:
        self._directory, self._backlog = directory, backlog
        self._last, self._terms, self._may_answer = last, terms, may_answer
        self.ack = ack
        self.counted: set[str] = set()
        """The followers whose disks an answer waits for."""
        self.followers: dict[str, Follower] = {}
        self._changed = threading.Condition()
        self._held: deque[Applied] = deque()
        self._answers: list[tuple[Waiting, Reply]] = []
        self._ended = False
        self._next = ""
        """The follower that leads from now on."""

    # --- what others tell -------------------------------------------------------------------------------------------

    def ask(self, waiting: Waiting) -> None:
        """A follower asks for records, and tells which it has."""
        with self._changed:
            try:
                wish = json.loads(bytes(waiting.request.values))
                name, after = str(wish["name"]), int(wish["after"])
                problem = differs(Terms.of(wish["terms"]), after, self._terms(), self._last())
                wait_s = min(10.0, max(0.0, float(wish["wait_s"])))
            except (ValueError, TypeError, KeyError, DataError) as error:
                self._answers.append((waiting, _refused(waiting.request, f"FOLLOW brings a JSON object ({error!r})")))
                self._changed.notify()
                return
            follower = self.followers.setdefault(name, Follower())
            if follower.waiting is not None:  # it has asked again over another connection
                self._answers.append((follower.waiting, self._reply(follower.waiting.request, b"")))
            follower.heard = time.monotonic()
            follower.waiting = None
            if problem:
                follower.after, follower.moved = 0, follower.heard
                self.counted.discard(name)
                self._answers.append((waiting, self._reply(waiting.request, b"", problem)))
            else:
                level = after >= self._last()
                if level or after > follower.after:
                    follower.moved = follower.heard
                stored_s = follower.heard - follower.given_at if after >= follower.given else float("inf")
                follower.round_s = 0.0 if level else stored_s
                follower.after, follower.waiting = after, waiting
                follower.until = follower.heard + wait_s
            if problem or self.ack is Ack.FOLLOWER:
                self._changed.notify()

    def wake(self) -> None:
        """There is a new record in the log, or fewer followers to wait for.

        A follower whose disk no answer waits for gets what has come at the next tick: a round for each record would
        take as much time as the records.
        """
        if self.ack is Ack.FOLLOWER:
            with self._changed:
                self._changed.notify()

    def pass_on(self, applied: Iterable[Applied]) -> list[Applied]:
        """Which answers may leave now that their writes are on this disk; the others leave by way of `loop`."""
        with self._changed:
            self._held.extend(applied)
            return self._released()

    def _released(self) -> list[Applied]:
        if not self._may_answer():
            return []
        known = self.acknowledged()
        released = []
        while self._held and self._held[0].number <= known:
            released.append(self._held.popleft())
        return released

    def acknowledged(self) -> int:
        """Records up to this one are as safe as was promised."""
        if self.ack is Ack.LOCAL:
            return 1 << 62
        return min((self.followers[name].after for name in self.counted if name in self.followers), default=1 << 62)

    @property
    def waiting(self) -> bool:
        """Whether answers wait for a follower's disk."""
        return bool(self._held)

    def needed_from(self) -> int | None:
        """The first record that a follower still needs of the log; None where nobody follows."""
        with self._changed:
            since = time.monotonic() - REMEMBERED_S
            return min((each.after + 1 for each in self.followers.values() if each.heard > since), default=None)

    def lag(self) -> dict[str, int]:
        """How many records each follower lacks."""
        with self._changed:
            return {name: max(0, self._last() - each.after) for name, each in self.followers.items()}

    def hand_over(self, name: str) -> None:
        """Tells the followers at once that this one leads."""
        with self._changed:
            self._next = name
            self._changed.notify()

    def refuse_held(self, why: str) -> list[tuple[Waiting, Reply]]:
        """Answers that cannot be given any more, as refusals that may be tried again elsewhere."""
        with self._changed:
            held, self._held = list(self._held), deque()
        return [(one.waiting, error_reply(one.waiting.request.request, Status.UNAVAILABLE, why)) for one in held]

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    # --- the thread -------------------------------------------------------------------------------------------------

    def loop(self) -> None:
        with self._backlog.outlet() as outlet:
            while True:
                with self._changed:
                    if not self._answers:
                        self._changed.wait(TICK_S)
                    ended = self._ended
                    ready = [(one.waiting, one.reply) for one in self._released()]
                    ready += self._answers
                    self._answers = []
                    asking = [(name, each) for name, each in self.followers.items() if each.waiting is not None]
                for name, follower in asking:
                    answer = self._serve(name, follower)
                    if answer is not None:
                        ready.append(answer)
                for waiting, reply in ready:
                    self._backlog.answer(outlet, waiting, reply)
                if ended:
                    return

    def _serve(self, name: str, follower: Follower) -> tuple[Waiting, Reply] | None:
        """The answer to a follower, if it has one now."""
        waiting, last = follower.waiting, self._last()
        if waiting is None or (last <= follower.after and time.monotonic() < follower.until and not self._next):
            return None
        data, problem = b"", ""
        if last > follower.after:
            follower.reader = follower.reader or LogReader(self._directory)
            try:
                data = follower.reader.read(follower.after, last, MAX_REPLY_BYTES)
            except RecordsGone as error:
                problem = str(error)
            except (OSError, DataError) as error:
                follower.reader = None
                problem = f"its log cannot be read: {error}"
        with self._changed:
            if follower.waiting is not waiting:
                return None
            follower.waiting = None
            follower.given, follower.given_at = last, time.monotonic()
        return waiting, self._reply(waiting.request, data, problem)

    def _reply(self, request: Request, data: bytes, problem: str = "") -> Reply:
        head: dict[str, Any] = {"terms": self._terms().spans, "last": self._last(), "problem": problem}
        if self._next:
            head["next"] = self._next
        return Reply(Status.OK, request.request, 0, [json.dumps(head).encode(), data])


def _refused(request: Request, why: str) -> Reply:
    return error_reply(request.request, Status.BAD_REQUEST, why)
