"""The leader's side of a replicated shard: sends its log to followers, and holds replies until they have it."""

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
    """When it is on this server's disk. If the disk is lost, so are writes that followers had not fetched yet."""
    FOLLOWER = "follower"
    """When it is also on the disk of every follower that is in sync."""


@dataclass
class Follower:
    """The leader's record of one follower."""

    after: int = 0
    """Records up to this one are on its disk."""
    heard_at: float = 0.0
    moved: float = 0.0
    """When it last made progress or had all records. One that asks without progress cannot write to its disk."""
    given: int = 0
    """The last record of the log when it was last answered."""
    given_at: float = 0.0
    """When it was last answered."""
    round_s: float = float("inf")
    """How long it took to store the records up to ``given``; 0 if it has all records."""
    near_since: float = field(default_factory=time.monotonic)
    """When it was last too far behind for writes to wait for it."""
    reader: LogReader | None = None
    waiting: Waiting | None = None
    until: float = 0.0
    """When its request is answered even if there are no new records."""


class Feed:
    """Answers followers and releases held replies. `loop` runs in a thread; any thread can call the other methods.

    Args:
        directory: the log's directory.
        backlog: sends the replies.
        last: returns the number of the last record.
        terms: returns the log's terms.
        may_answer: returns whether this server still leads, as far as it can know.
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
        """The followers that must have a write on their disk before it is acknowledged."""
        self.followers: dict[str, Follower] = {}
        self._changed = threading.Condition()
        self._held: deque[Applied] = deque()
        self._answers: list[tuple[Waiting, Reply]] = []
        self._ended = False
        self._next = ""
        """The follower that this leader has handed over to; "" before that."""

    # --- calls from other threads -----------------------------------------------------------------------------------

    def ask(self, waiting: Waiting) -> None:
        """Handle a follower's request for records, which reports the records that it has."""
        with self._changed:
            try:
                wish = json.loads(bytes(waiting.request.values))
                name, after = str(wish["name"]), int(wish["after"])
                problem = differs(Terms.of(wish["terms"]), after, self._terms(), self._last())
                wait_s = min(10.0, max(0.0, float(wish["wait_s"])))
            except (ValueError, TypeError, KeyError, DataError) as error:
                why = f"FOLLOW must have a JSON object ({error!r})"
                self._answers.append((waiting, error_reply(waiting.request.request, Status.BAD_REQUEST, why)))
                self._changed.notify()
                return
            follower = self.followers.setdefault(name, Follower())
            if follower.waiting is not None:  # it has asked again over another connection
                self._answers.append((follower.waiting, self._reply(follower.waiting.request, b"")))
            follower.heard_at = time.monotonic()
            follower.waiting = None
            if problem:
                follower.after, follower.moved = 0, follower.heard_at
                self.counted.discard(name)
                self._answers.append((waiting, self._reply(waiting.request, b"", problem)))
            else:
                level = after >= self._last()
                if level or after > follower.after:
                    follower.moved = follower.heard_at
                stored_s = follower.heard_at - follower.given_at if after >= follower.given else float("inf")
                follower.round_s = 0.0 if level else stored_s
                follower.after, follower.waiting = after, waiting
                follower.until = follower.heard_at + wait_s
            if problem or self.ack is Ack.FOLLOWER:
                self._changed.notify()

    def wake(self) -> None:
        """Report that the log has a new record, or that there are fewer followers to wait for.

        With `Ack.LOCAL`, followers get new records at the next tick: a round per record would take as long as the
        records themselves.
        """
        if self.ack is Ack.FOLLOWER:
            with self._changed:
                self._changed.notify()

    def pass_on(self, applied: Iterable[Applied]) -> list[Applied]:
        """Take replies to writes that are on this disk; returns those to send now. `loop` sends the others later."""
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
        """Records up to this one are as durable as configured."""
        if self.ack is Ack.LOCAL:
            return 1 << 62
        counted = tuple(self.counted)  # another thread may change it meanwhile
        return min((self.followers[name].after for name in counted if name in self.followers), default=1 << 62)

    @property
    def waiting(self) -> bool:
        """Whether answers wait for a follower's disk."""
        return bool(self._held)

    def needed_from(self) -> int | None:
        """The first log record that a follower still needs; None without followers."""
        with self._changed:
            since = time.monotonic() - REMEMBERED_S
            return min((each.after + 1 for each in self.followers.values() if each.heard_at > since), default=None)

    def lag(self) -> dict[str, int]:
        """How many records each follower is behind."""
        with self._changed:
            return {name: max(0, self._last() - each.after) for name, each in self.followers.items()}

    def hand_over(self, name: str) -> None:
        """Tell all followers at once that ``name`` leads."""
        with self._changed:
            self._next = name
            self._changed.notify()

    def refuse_held(self, why: str) -> list[tuple[Waiting, Reply]]:
        """Refusals of the held writes, which can no longer be acknowledged here; workers retry them elsewhere."""
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
                    asking = [each for each in self.followers.values() if each.waiting is not None]
                for follower in asking:
                    answer = self._serve(follower)
                    if answer is not None:
                        ready.append(answer)
                for waiting, reply in ready:
                    self._backlog.answer(outlet, waiting, reply)
                if ended:
                    return

    def _serve(self, follower: Follower) -> tuple[Waiting, Reply] | None:
        """The reply to a follower; None if it must wait."""
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
