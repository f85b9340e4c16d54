"""One server's role in a group: whether it leads or follows, and how that changes."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from shoal.durable import write_whole
from shoal.errors import DataError, DeadlineError, PeerError, ShoalError
from shoal.sharded.ps.protocol import Op, Reply, Request, Status, error_reply
from shoal.sharded.ps.replica import transfer
from shoal.sharded.ps.replica.board import Board, ShardState, claim, handed_over, joined, without
from shoal.sharded.ps.replica.feed import Ack, Feed, Follower
from shoal.sharded.ps.replica.following import Following
from shoal.sharded.ps.replica.peer import Peer
from shoal.sharded.ps.replica.terms import Terms
from shoal.sharded.ps.security import ClientKeys
from shoal.sharded.ps.server.backlog import Backlog, Waiting
from shoal.sharded.ps.server.engine import FULL, Engine
from shoal.sharded.ps.server.writes import Writes

log = logging.getLogger("shoal.ps")

TICK_S = 0.1
APPLY_S = timedelta(minutes=10)
FAREWELL_S = 0.2  # during which a former leader still refers workers to the new one, before it restarts
NEAR = 1000  # replies can begin to wait for a follower that stays at most this many records behind
SHORT_S = 0.05  # or for one that stores its records within this time
ANYBODY = frozenset({Op.INFO, Op.FOLLOW, Op.FETCH, Op.HANDOVER, Op.PUBLISH})


class Role(StrEnum):
    LEADER = "leader"
    FOLLOWER = "follower"
    """Follows the leader, or waits for one."""


class Replication:
    """Makes a server the leader or a follower, according to the registry. Pass it to `ParameterServer`.

    Args:
        board: the state of this shard in the registry.
        name: the name of this server, always the same for a directory; see `server_name`.
        ack: when a write is acknowledged.
        address: the address at which others reach this server; None for the one it listens on.
        keys: the CURVE keys for connections to the other servers of the group, if they use CURVE.
        stale_reads: how old the rows of a follower's answers can be; None if only the leader answers.
        follower_timeout: answers do not wait for a follower that is silent for longer.
        force_lead: lead even if that can lose acknowledged writes.
    """

    def __init__(
        self,
        board: Board,
        *,
        name: str,
        ack: Ack | str = Ack.LOCAL,
        address: str | None = None,
        keys: ClientKeys | None = None,
        stale_reads: timedelta | None = None,
        follower_timeout: timedelta = timedelta(seconds=2),
        force_lead: bool = False,
    ) -> None:
        self.board, self.name, self.ack = board, name, Ack(ack)
        self.role = Role.FOLLOWER
        self.term = 0
        self.leader = ""
        """The address of the leader; "" if unknown."""
        self.rebuild = ""
        """Why the server must stop and start from the leader's checkpoint, or as a follower."""
        self.promoted: Callable[[], None] = lambda: None
        """Called when this server becomes the leader."""
        self._address, self._keys, self._force_lead = address, keys, force_lead
        self._stale_reads = stale_reads
        self._follower_timeout_s = follower_timeout.total_seconds()
        self._handing_over = False
        self._contact_until = 0.0
        """No other server can lead before this time, by the last reading of the registry that confirmed this role."""
        self._deciding = threading.Lock()
        """Held from reading the registry until the result has taken effect."""
        self._look_now = threading.Event()
        """Set when the registry may have changed."""
        self._waits = ""
        self._state: ShardState | None = None
        self._counted_since: dict[str, int] = {}

    # --- before the server starts -----------------------------------------------------------------------------------

    def prepare(self, directory: Path, context: Any) -> None:
        """Prepare the directory so that the server can follow the leader, if there is one."""
        self.directory, self._context = directory, context
        self.terms = Terms.read(directory)
        state, members = self.board.read(), self.board.members()
        if state is None or state.leader == self.name or state.leader not in members:
            return
        peer = Peer(context, members[state.leader], self._keys)
        try:
            last = transfer.last_record(directory)
            head, _ = self.fetch_records(peer, last, 0.0)
            why = head["problem"]
            if not why and not last and head["last"] > transfer.MANY:
                why = f"it is empty, and the leader's log has {head['last']} records"
            if why:
                transfer.set_aside(directory, f"this server cannot continue its own log: {why}")
                number = transfer.take(directory, peer)
                log.info("took the checkpoint of record %d from %s", number, members[state.leader])
            self.use_terms(head)
        except (DeadlineError, PeerError) as error:
            log.warning("the leader %s does not answer yet: %s", members[state.leader], error)
        finally:
            peer.close()

    def give_up_directory(self, damage: DataError) -> bool:
        """Move a damaged directory's files aside if another server leads; returns whether it did.

        The name is moved as well: a server that the registry lists as in sync must not lead without its rows.
        """
        state, members = self.board.read(), self.board.members()
        if state is None or state.leader == self.name or state.leader not in members:
            return False
        why = f"this server's directory is damaged ({damage}), and {state.leader} leads the shard"
        transfer.set_aside(self.directory, why, identity=True)
        self.rebuild = why
        return True

    def attach(self, engine: Engine, backlog: Backlog, writes: Writes, stop: Callable[[str], None]) -> None:
        """Set the server's components; ``stop`` ends the server, with a reason."""
        self._engine, self._backlog, self._writes, self._stop = engine, backlog, writes, stop
        assert engine.log is not None
        self.feed = Feed(
            self.directory, backlog, last=self._last, terms=lambda: self.terms, may_answer=self.may_answer, ack=self.ack
        )
        self._following = Following(self, engine, writes)
        engine.marks_checkpoints = True
        engine.retain = self.feed.needed_from

    def _last(self) -> int:
        assert self._engine.log is not None
        return self._engine.log.next_number - 1

    # --- calls from the server --------------------------------------------------------------------------------------

    def may_answer(self) -> bool:
        """Whether this server can answer reads and writes: it leads, and no other server can lead yet."""
        return self.leads and not self.rebuild and self.in_contact()

    def in_contact(self) -> bool:
        """Whether the registry has confirmed this server's role so recently that no other server can lead."""
        return time.monotonic() < self._contact_until and self.board.is_member()

    def refusal(self, request: Request) -> Reply | None:
        """The reply to a request that this server must not serve now; None if it can serve it."""
        if request.op in ANYBODY:
            return None
        shard = self._engine.shard.index
        if self.leads and not self.rebuild:
            if self._handing_over and (request.op.writes or request.op == Op.CHECKPOINT):
                return error_reply(request.request, Status.UNAVAILABLE, f"shard {shard} is being handed over")
            if request.op != Op.CHECKPOINT and not self.in_contact():  # another leader may have acknowledged writes
                text = f"shard {shard}: this server has lost contact with the registry, and another one may lead"
                return Reply(Status.NOT_LEADER, request.request, 0, [text.encode(), b""])
            return None
        if request.op == Op.CHECKPOINT and not len(request.values):
            return None  # a checkpoint of its own rows; the group shares those kept by name
        if self._reads_stale():
            if not request.op.writes and request.op != Op.CHECKPOINT:
                return None
            if request.op == Op.CREATE and self._engine.shard.has(request):  # a reader opens an existing table
                return Reply(Status.OK, request.request, self._engine.shard.version, [])
        where = f"; {self.leader} leads" if self.leader else "; no server leads yet"
        text = f"shard {shard}: this server is a follower{where}"
        return Reply(Status.NOT_LEADER, request.request, 0, [text.encode(), self.leader.encode()])

    def serves_reads(self) -> bool:
        return self.may_answer() or self._reads_stale()

    def _reads_stale(self) -> bool:
        if self.leads or self._stale_reads is None:
            return False
        return self.lag_s() <= self._stale_reads.total_seconds()

    def lag_s(self) -> float:
        """The time since this server last had all of its leader's records; 0 for the leader."""
        return 0.0 if self.leads else time.monotonic() - self._following.fresh_at

    def info(self) -> dict[str, Any]:
        in_sync = list(self._state.in_sync) if self._state is not None else []
        info: dict[str, Any] = {
            "role": self.role.value, "name": self.name, "term": self.term, "leader": self.leader, "in_sync": in_sync,
            "ack": self.ack.value,
        }  # fmt: skip
        if self.leads:
            info["follower_lag"] = self.feed.lag()
        else:
            info["lag_s"] = round(min(self.lag_s(), 1e9), 3)
        return info

    def gauges(self) -> dict[str, Any]:
        """The gauges for Prometheus."""
        leads = self.leads
        lags = self.feed.lag() if leads else {}
        return {
            "leads": int(self.may_answer()),
            "term": self.term,
            "registry_contact": int(self.in_contact()),
            "followers_in_sync": max(0, len(self._state.in_sync) - 1) if leads and self._state is not None else 0,
            "follower_lag_records": max(lags.values(), default=0),
            "follower_lag_seconds": min(self.lag_s(), 1e9),
        }

    def ask(self, waiting: Waiting) -> None:
        """Handle a follower's request for records."""
        self.feed.ask(waiting)

    def give(self, request: Request) -> list[Any]:
        """The answer to FETCH."""
        if not self.leads:
            raise DataError(f"{self.name} does not lead; ask the leader")
        wish = json.loads(bytes(request.values) or b"{}")
        return transfer.give(self.directory, wish, self._last(), lambda: self._writes.checkpoint(APPLY_S))

    # --- the threads ------------------------------------------------------------------------------------------------

    def coordinate(self, stopped: threading.Event, address: str) -> None:
        """Follow the registry's state; the loop of a thread."""
        address = self._address or address
        away = False
        while not stopped.is_set() and not self.rebuild:
            try:
                with self._deciding:
                    begin = time.monotonic()
                    lease_s = self.board.join(self.name, address)
                    state, members = self.board.read(), self.board.members()
                    if away:
                        log.warning("shard %d: the registry can be reached again", self._engine.shard.index)
                    away = False
                    self._state = state
                    if self.leads:
                        self._keep_leading(state)
                    else:
                        self._keep_following(state, members)
                    if not self.rebuild:  # only now: after a lost session another server may lead
                        self._contact_until = begin + lease_s
            except ShoalError as error:
                log.error("%s", error)
            except Exception as error:  # a registry's client can raise anything
                if isinstance(error, OSError) and error.errno in FULL:
                    log.error("shard %d: %s is full: %s", self._engine.shard.index, self.directory, error)
                elif not away:
                    log.error("shard %d: the registry does not answer: %r", self._engine.shard.index, error)
                away = True
            self._look_now.wait(TICK_S)
            self._look_now.clear()

    def _keep_leading(self, state: ShardState | None) -> None:
        if state is None or state.leader != self.name or state.term != self.term:
            self.step_down(f"term {self.term} is over: {state.leader if state else 'no server'} leads the shard now")
            return
        now, feed = time.monotonic(), self.feed
        for follower, known in list(feed.followers.items()):
            if self._is_late(known, now):
                self._counted_since.pop(follower, None)
                if follower not in state.in_sync:
                    feed.counted.discard(follower)
            elif follower not in feed.counted:
                if self._is_near(known, now):
                    feed.counted.add(follower)
                    self._counted_since[follower] = self._last()
            elif (
                follower not in state.in_sync
                and known.after >= self._counted_since.get(follower, 1 << 62)
                and self.board.change(state, after := joined(state, follower))
            ):
                log.info("shard %d: follower %s is in sync", self._engine.shard.index, follower)
                self._state = state = after
        for follower in state.in_sync:
            if follower == self.name:
                continue
            late = feed.followers.get(follower)
            if late is None or self._is_late(late, now):
                if not self.board.change(state, after := without(state, follower)):
                    return
                log.warning(
                    "shard %d: follower %s is silent or cannot store records; writes are acknowledged without it",
                    self._engine.shard.index,
                    follower,
                )
                self._state = state = after  # before the writes that waited for the follower are answered
                feed.counted.discard(follower)
                feed.wake()

    def _is_late(self, follower: Follower, now: float) -> bool:
        """Whether a follower is silent, or keeps asking for the same records."""
        return now - follower.heard_at > self._follower_timeout_s or (
            follower.after < self._last() and now - follower.moved > 2 * self._follower_timeout_s
        )

    def _is_near(self, follower: Follower, now: float) -> bool:
        """Whether replies can begin to wait for a follower: it stores records quickly, or stays within `NEAR`."""
        if self._last() - follower.after > NEAR:
            follower.near_since = now
        return follower.round_s <= SHORT_S or now - follower.near_since > self._follower_timeout_s

    def _keep_following(self, state: ShardState | None, members: dict[str, str]) -> None:
        self.leader = members.get(state.leader, "") if state is not None and state.leader != self.name else ""
        if state is not None and state.leader == self.name and state.term > self.term and self.term:
            self._lead(state.term, "the previous leader handed the shard over")
            return
        after, why = claim(state, self.name, members)
        if after is None and self._force_lead and state is not None and state.leader not in members:
            after, why = (
                ShardState(term=state.term + 1, leader=self.name, in_sync=(self.name,)),
                "--force-lead was given",
            )
        if after is None:
            if why != self._waits:
                log.info("shard %d: %s", self._engine.shard.index, why)
                self._waits = why
        elif self.board.change(state, after):
            self._state = after
            self._lead(after.term, why)

    def _lead(self, term: int, why: str) -> None:
        def begin() -> None:
            assert self._engine.log is not None
            self._engine.log.sync()
            self.terms = self.terms.begin(term, self._last() + 1)
            self.terms.write(self.directory)
            self._engine.begin_run()
            self.term, self.role, self._force_lead = term, Role.LEADER, False
            self._writes.make_tables()

        self._writes.between(begin, APPLY_S)
        log.warning("shard %d: %s leads in term %d: %s", self._engine.shard.index, self.name, term, why)
        self.promoted()

    def step_down(self, why: str) -> None:
        """Answer nothing from here on; the server restarts as a follower."""
        self.rebuild = why
        with self._backlog.outlet() as outlet:
            for waiting, reply in self.feed.refuse_held(why):
                self._backlog.answer(outlet, waiting, reply)
        farewell = threading.Timer(FAREWELL_S, self._stop, [why])
        farewell.daemon = True
        farewell.start()

    def follow(self, stopped: threading.Event) -> None:
        """Request records from the leader and apply them; the loop of a thread."""
        self._following.loop(stopped)

    @property
    def leads(self) -> bool:
        return self.role is Role.LEADER

    @property
    def follows(self) -> bool:
        """Whether this server takes records: it neither leads nor is about to restart."""
        return not self.leads and not self.rebuild

    def connect(self, address: str) -> Peer:
        """Connect to another server of the group."""
        return Peer(self._context, address, self._keys)

    def fetch_records(
        self, peer: Peer, after: int, wait_s: float, keep_waiting: Callable[[], bool] = lambda: True
    ) -> tuple[dict[str, Any], memoryview]:
        """Ask the leader for the records after one; return its state and the records."""
        wish = {"name": self.name, "after": after, "terms": self.terms.spans, "wait_s": wait_s}
        reply = peer.ask(Op.FOLLOW, wish, wait_s + 4.0, keep_waiting)
        head, data = reply.payload
        return json.loads(bytes(head)), memoryview(data).cast("B")

    def use_terms(self, head: dict[str, Any]) -> None:
        """Take over the leader's terms, on disk as well."""
        terms = Terms.of(head["terms"])
        if terms != self.terms:
            terms.write(self.directory)
            self.terms = terms

    def look(self) -> None:
        """Read the registry again soon."""
        self._look_now.set()

    # --- a planned change -------------------------------------------------------------------------------------------

    def hand_over(self, seconds: float = 10.0) -> str:
        """Hand the lead to a follower that is in sync and return its name. Writes wait in the meantime.

        Raises:
            PeerError: no follower is in sync, or none caught up in time; this server remains the leader.
        """
        state = self._state
        others = [name for name in (state.in_sync if state is not None else ()) if name != self.name]
        if not self.leads or state is None or not others:
            raise PeerError(f"{self.name} cannot hand over: it does not lead, or no follower is in sync")
        until = time.monotonic() + seconds
        self._handing_over = True
        try:
            last = self._writes.between(self._last, timedelta(seconds=seconds))
            while time.monotonic() < until:
                for name in others:
                    known = self.feed.followers.get(name)
                    if known is not None and known.after >= last and not self.feed.waiting:
                        with self._deciding:
                            self._contact_until = 0.0  # from here on the other server can lead
                            if self.board.change(state, handed_over(state, name)):
                                self.feed.hand_over(name)
                                self.leader = self.board.members().get(name, "")
                                self.step_down(f"handed over to {name}")
                                return name
                            state = self.board.read() or state
                        self._look_now.set()
                time.sleep(0.005)
        finally:
            if not self.rebuild:
                self._handing_over = False
        raise PeerError(f"no follower of {self.name} had all records within {seconds:g} s; {self.name} still leads")

    def close(self) -> None:
        self.feed.end()
        self._look_now.set()
        self.leave()

    def leave(self) -> None:
        """End this server's membership, even if it could not start."""
        with contextlib.suppress(Exception):
            self.board.close()


def server_name(directory: Path) -> str:
    """The name of the server of a directory, created on first use. Another directory is another server."""
    path = directory / "name"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        directory.mkdir(parents=True, exist_ok=True)
        name = f"s-{secrets.token_hex(6)}"
        write_whole(path, name)
        return name
