"""The follower's side of a replicated shard: takes the leader's records and applies them."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from shoal.errors import DeadlineError, PeerError
from shoal.sharded.ps.replica.log_reader import records
from shoal.sharded.ps.replica.peer import Peer
from shoal.sharded.ps.server.engine import FULL, ROOM_EVERY_S, Engine
from shoal.sharded.ps.server.writes import Writes

if TYPE_CHECKING:
    from shoal.sharded.ps.replica.replication import Replication

log = logging.getLogger("shoal.ps")

PAUSE_S = 0.1  # after a request that failed
ASK_S = 1.0  # how long a leader waits for records before it answers that there are none
APPLY_S = timedelta(minutes=10)


class Following:
    """What a server does while it follows. `loop` runs in a thread."""

    def __init__(self, server: Replication, engine: Engine, writes: Writes) -> None:
        self._server, self._engine, self._writes = server, engine, writes
        self._full = False
        self.fresh_at = 0.0
        """When this server last had all of its leader's records, by `time.monotonic`."""

    def loop(self, stopped: threading.Event) -> None:
        """Request records from the leader and apply them, until this server leads or must restart."""
        server = self._server
        peer: Peer | None = None
        try:
            while not stopped.is_set() and server.follows:
                leader = server.leader
                if not leader:
                    stopped.wait(PAUSE_S / 2)
                    continue
                if peer is None or not peer.address.endswith(leader):
                    if peer is not None:
                        peer.close()
                    peer = server.connect(leader)
                try:
                    self._take_some(peer, lambda: not stopped.is_set() and server.leader == leader)  # noqa: B023
                except (DeadlineError, PeerError) as error:
                    log.debug("%s", error)
                    stopped.wait(PAUSE_S)
                except OSError as error:
                    self._wait_for_room(error, stopped)
        finally:
            if peer is not None:
                peer.close()

    def _wait_for_room(self, error: OSError, stopped: threading.Event) -> None:
        """Pause while the disk is full, until there is room; answers do not wait for it."""
        if error.errno not in FULL:
            raise error
        assert self._engine.log is not None
        self._engine.log.sync()
        if not self._full:
            log.error("shard %d: %s has no room for the leader's log (%s); it resumes when there is room",
                      self._engine.shard.index, self._server.directory, error.strerror)  # fmt: skip
        self._full = True
        stopped.wait(ROOM_EVERY_S)

    def _take_some(self, peer: Peer, keep_waiting: Callable[[], bool]) -> None:
        engine, server = self._engine, self._server
        assert engine.log is not None
        asked = time.monotonic()
        head, data = server.fetch_records(peer, engine.log.durable_number, ASK_S, keep_waiting)
        if server.leads:
            return
        if head["problem"]:
            server.step_down(f"this server cannot follow {peer.address}: {head['problem']}")
            return
        if head.get("next") == server.name:
            server.look()
            time.sleep(0.02)  # this server is about to lead; there are no records to take
            return
        server.use_terms(head)
        server.term = max(server.term, server.terms.newest)
        todo = list(records(data, engine.log.next_number))
        todo_count = len(todo)
        while todo:
            taken = self._writes.between(functools.partial(self._apply, todo), APPLY_S)
            if taken is None:
                return
            todo = todo[taken:]
            if not taken:
                time.sleep(PAUSE_S / 4)  # until a checkpoint is written
        engine.log.sync()
        if todo_count and self._full:
            log.warning("shard %d: there is room again; it resumes following", engine.shard.index)
            self._full = False
        if engine.log.next_number > head["last"]:
            self.fresh_at = asked

    def _apply(self, todo: list[tuple[int, bytes, memoryview, memoryview]]) -> int | None:
        """Apply records in the thread of writes; None if this server has begun to lead."""
        return None if self._server.leads else self._engine.take(todo, self._writes.begin_marked)
