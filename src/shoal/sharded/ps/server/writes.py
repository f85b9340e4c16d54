"""All writes, in order: one thread applies them, one waits for the disk, and one writes checkpoints."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from shoal.errors import ConfigError, DataError, DeadlineError, PeerError, ShoalError
from shoal.sharded.ps.protocol import Op, Reply, Request, Status, error_reply
from shoal.sharded.ps.server.backlog import Backlog, Waiting, expired
from shoal.sharded.ps.server.engine import ROOM_EVERY_S, Durability, Engine
from shoal.sharded.ps.server.shard import status_of
from shoal.sharded.ps.server.snapshot import ShardSnapshot

log = logging.getLogger("shoal.ps")

TICK_S = 0.2  # between two checks whether the server still runs
APPENDED = object()  # tells `sync_loop` that a record was added to the log


class Applied(NamedTuple):
    """A write whose reply can be sent once the log is on the disk up to ``number``."""

    waiting: Waiting
    reply: Reply
    number: int


class Writes:
    """Applies writes to a server's shard. Replies are sent once the writes are as durable as configured."""

    def __init__(
        self, engine: Engine, backlog: Backlog, stopped: threading.Event, tables: Sequence[Request] = ()
    ) -> None:
        self._engine, self._backlog, self._stopped = engine, backlog, stopped
        self._tables = list(tables)  # the server creates these once it can write
        self._syncs: SimpleQueue[Applied | object | None] = SimpleQueue()
        self._snapshots: SimpleQueue[tuple[Waiting, ShardSnapshot] | None] = SimpleQueue()
        self._own_checkpoint = threading.Lock()
        self.checkpoint_failures = 0
        self.appended: Callable[[], None] = lambda: None
        """Called when a record was added to the log."""
        self.safe: Callable[[list[Applied]], list[Applied]] = lambda done: done
        """Selects the writes, all on this disk, that can be answered now. It must answer the others itself later."""

    def end(self) -> None:
        """End every loop once its queued work is done."""
        self._backlog.writes.put(None)
        self._syncs.put(None)
        self._snapshots.put(None)

    # --- the threads ----------------------------------------------------------------------------------------------

    def loop(self) -> None:
        """Apply one write after another; with a log, `sync_loop` sends the replies."""
        engine = self._engine
        logs = engine.durability == Durability.LOG
        if logs:
            engine.logged = self._logged
        with self._backlog.outlet() as outlet:
            while (waiting := self._next()) is not None:
                if callable(waiting):
                    waiting()
                    continue
                reply = self._write(waiting)
                if reply is not None and logs:
                    self._syncs.put(Applied(waiting, reply, 0 if engine.log is None else engine.log.next_number - 1))
                elif reply is not None:
                    self._backlog.answer(outlet, waiting, reply)
                del waiting, reply  # frees the request's frames before the next wait

    def _logged(self) -> None:
        self._syncs.put(APPENDED)
        self.appended()

    def between(self, call: Callable[[], Any], timeout: timedelta) -> Any:
        """Call a function between two writes, in their thread; returns its result or raises its error."""
        done: SimpleQueue[Future[Any]] = SimpleQueue()
        result: Future[Any] = Future()

        def run() -> None:
            try:
                result.set_result(call())
            except BaseException as error:
                result.set_exception(error)
            done.put(result)

        self._backlog.writes.put(run)
        until = time.monotonic() + timeout.total_seconds()
        while _within(done, min(TICK_S, until - time.monotonic())) is None:
            if self._stopped.is_set():
                raise PeerError(f"shard {self._engine.shard.index}: the server has stopped")
            if time.monotonic() > until:
                raise DeadlineError(f"shard {self._engine.shard.index}: writes did not pause within {timeout}")
        return result.result()

    def _next(self) -> Waiting | Callable[[], Any] | None:
        """Wait for the next request. A server with a full disk checks for free space meanwhile."""
        while self._engine.read_only:
            if self._engine.make_room():
                self.make_tables()
                break
            try:
                return self._backlog.writes.get(timeout=ROOM_EVERY_S)
            except Empty:
                continue
        return self._backlog.writes.get()

    def make_tables(self) -> None:
        """Create the server's own tables. A read-only server only checks them, and creates them once it can write."""
        if self._engine.read_only:
            for request in self._tables:
                self._engine.shard.check(request)
            return
        for reply in self._engine.apply(self._tables):
            if reply.status != Status.OK:
                raise ConfigError(reply.text())

    def _write(self, waiting: Waiting) -> Reply | None:
        """Handle a write; returns its reply, or None if `checkpoint_loop` will reply."""
        request = waiting.request
        late = expired(request)
        if late is not None:
            return late
        if request.op == Op.CHECKPOINT:
            return self._begin_checkpoint(waiting)
        if request.op == Op.APPLY and request.read_version:
            self._backlog.metrics.staleness.add(max(0, self._engine.shard.version - request.read_version))
        return self._engine.apply([request])[0]

    def _begin_checkpoint(self, waiting: Waiting) -> Reply | None:
        if self._engine.in_checkpoint:
            return self._refused(waiting.request, "a checkpoint is already being written")
        try:
            if _names(waiting.request)[0]:
                self._engine.mark_checkpoint(waiting.request)
            self._snapshots.put((waiting, self._engine.begin_checkpoint()))
        except Exception as error:
            return self._failed(waiting.request, error)
        return None

    def begin_marked(self, request: Request) -> None:
        """Begin the checkpoint that the leader kept by name at this point in its log."""
        request.arrived = time.perf_counter()
        self._snapshots.put((self._backlog.take_in(lambda _: None, request), self._engine.begin_checkpoint()))

    def _failed(self, request: Request, error: Exception) -> Reply:
        log.error("the checkpoint failed", exc_info=error)
        self.checkpoint_failures += 1
        if isinstance(error, ShoalError):
            return error_reply(request.request, status_of(error), f"shard {self._engine.shard.index}: {error}")
        return self._refused(request, str(error))

    def _refused(self, request: Request, why: str) -> Reply:
        return error_reply(request.request, Status.UNAVAILABLE, f"shard {self._engine.shard.index}: {why}")

    def checkpoint_loop(self) -> None:
        """Write checkpoints to the disk while `loop` continues."""
        with self._backlog.outlet() as outlet:
            while (begun := self._snapshots.get()) is not None:
                waiting, snapshot = begun
                try:
                    path = self._engine.finish_checkpoint(snapshot, *_names(waiting.request))
                    reply = Reply(Status.OK, waiting.request.request, self._engine.shard.version, [path.encode()])
                except Exception as error:
                    reply = self._failed(waiting.request, error)
                self._backlog.answer(outlet, waiting, reply)
                del begun, waiting, snapshot

    def sync_loop(self) -> None:
        """Wait for the disk, once for all records logged meanwhile, then send the replies.

        A wait begins when a write is in the log, while the write is being applied.
        """
        engine = self._engine
        if engine.durability != Durability.LOG:
            return
        with self._backlog.outlet() as outlet:
            ended = False
            while not ended:
                items = [self._syncs.get(), *_rest(self._syncs)]
                ended = None in items
                done = [item for item in items if isinstance(item, Applied)]
                log_file = engine.log  # None while the server is read-only
                if log_file is not None and (
                    APPENDED in items or any(item.number > log_file.durable_number for item in done)
                ):
                    begin = time.perf_counter()
                    log_file.sync()  # an error here ends the server: the state of the disk is unknown
                    self._backlog.metrics.sync_seconds.add(time.perf_counter() - begin)
                for waiting, reply, _ in self.safe(done):
                    self._backlog.answer(outlet, waiting, reply)
                del items, done

    # --- the server's own writes ----------------------------------------------------------------------------------

    def evict(self) -> None:
        """Remove expired rows, in order with other writes; an eviction during a checkpoint is skipped."""
        for name, table in list(self._engine.shard.tables.items()):
            request = Request(Op.EVICT, req_time=table.max_update_time, counts=[0], names=(name,))
            request.arrived = time.perf_counter()
            self._backlog.add(lambda _: None, request)

    def checkpoint(self, timeout: timedelta) -> str:
        """Write a checkpoint; returns its path."""
        until = time.monotonic() + timeout.total_seconds()
        index = self._engine.shard.index
        with self._own_checkpoint:
            while True:
                replies: SimpleQueue[Reply] = SimpleQueue()
                request = Request(Op.CHECKPOINT)
                request.arrived = time.perf_counter()
                failures = self.checkpoint_failures
                self._backlog.add(replies.put, request)
                while (reply := _within(replies, min(TICK_S, until - time.monotonic()))) is None:
                    if self._stopped.is_set():  # there may be no thread left to reply
                        raise PeerError(f"shard {index}: no checkpoint was written: the server has stopped")
                    if time.monotonic() > until:
                        raise DeadlineError(f"shard {index}: no checkpoint was written within {timeout}")
                if reply.status == Status.OK:
                    return reply.text()
                if reply.status != Status.UNAVAILABLE or failures != self.checkpoint_failures:
                    raise PeerError(reply.text())
                time.sleep(0.02)  # a worker's checkpoint is being written


def _names(request: Request) -> tuple[str, list[str]]:
    """The name to keep a checkpoint under, if any, and the other names to keep."""
    if not memoryview(request.values).nbytes:
        return "", []
    try:
        keep_as, others = json.loads(bytes(request.values))
        if not isinstance(keep_as, str) or not all(isinstance(one, str) for one in others):
            raise ValueError("names must be strings")
    except (ValueError, TypeError) as error:
        raise DataError(f"CHECKPOINT must have no values, or a name and a list of names as JSON ({error})") from None
    return keep_as, list(others)


def _within(queue: SimpleQueue[Any], seconds: float) -> Any:
    """The next item; None if there is none within ``seconds``."""
    try:
        return queue.get(timeout=max(0.0, seconds))
    except Empty:
        return None


def _rest(queue: SimpleQueue[Any]) -> list[Any]:
    """All items now in a queue."""
    found = []
    while True:
        try:
            found.append(queue.get_nowait())
        except Empty:
            return found
