"""The parameter server: a thread for the sockets, threads for large reads, one for writes and two for the disk."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, DataError, PeerError, ShoalError
from shoal.observe.endpoint import HttpPort
from shoal.observe.security import ServerSecurity
from shoal.sharded.ps.archive.uploading import Uploading
from shoal.sharded.ps.limits import Limits, check_duration
from shoal.sharded.ps.metrics import Metrics
from shoal.sharded.ps.protocol import VERSION, Op, Request
from shoal.sharded.ps.replica.replication import Replication
from shoal.sharded.ps.security import ServerKeys, check_bind, check_clients, check_port, zmq_module
from shoal.sharded.ps.server.backlog import Backlog
from shoal.sharded.ps.server.engine import ROOM_EVERY_S, Durability, Engine
from shoal.sharded.ps.server.reads import Publish, Reads
from shoal.sharded.ps.server.sockets import Sockets
from shoal.sharded.ps.server.status import ShownShard
from shoal.sharded.ps.server.writes import Writes

log = logging.getLogger("shoal.ps")


class StartAgain(PeerError):
    """The server's directory was set aside: start a new `ParameterServer` on it, which copies the leader's rows."""


class ParameterServer:
    """Serves one `Engine` over ZeroMQ until `stop`.

    >>> from shoal.sharded.ps import Engine, ParameterServer, Shard
    >>> with ParameterServer(Engine(Shard(0, 1))) as server:
    ...     server.address.startswith("tcp://127.0.0.1:")
    True
    """

    def __init__(
        self,
        engine: Engine,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        http_host: str = "127.0.0.1",
        http_port: int | None = 0,
        keys: ServerKeys | None = None,
        insecure: bool = False,
        http_security: ServerSecurity | None = None,
        limits: Limits | None = None,
        read_threads: int = 2,
        checkpoint_every: timedelta | None = None,
        evict_every: timedelta | None = None,
        tables: Sequence[Request] = (),
        publish: Publish | None = None,
        replication: Replication | None = None,
        group: str = "",
        archive: Callable[[ParameterServer], Uploading] | None = None,
        archive_every: timedelta = timedelta(seconds=5),
    ) -> None:
        check_bind(host, keys, insecure)
        if keys is not None:
            check_clients(keys)
        check_port(port, "port")
        check_port(http_port or 0, "http_port")
        if read_threads < 1:
            raise ConfigError(f"a server must have at least 1 thread for large reads, got {read_threads}")
        for period, what in ((checkpoint_every, "checkpoint_every"), (evict_every, "evict_every")):
            if period is not None:
                check_duration(period, what)
        self.engine = engine
        self.limits = limits or Limits()
        engine.shard.max_reply_bytes = self.limits.max_message_bytes
        self.metrics = Metrics()
        self.fatal: str | None = None
        """Why the server had to end."""
        self.address = ""
        self.http_address = self.http_url = ""
        self._zmq = zmq_module()
        self._bind = (host, port, keys)
        self._http_bind = (http_host, http_port)
        self._http_security = replace(http_security or ServerSecurity(), allow_insecure=insecure)
        if http_port is not None:
            self._http_security.check_bind(_address(http_host, http_port))
        self._read_threads = read_threads
        self._checkpoint_every = checkpoint_every
        self._evict_every = evict_every
        self._tables = tables
        self._publish = publish
        self.replication = replication
        self._group = group
        self._archive, self._archive_every = archive, archive_every
        self.uploading: Uploading | None = None
        self._draining = threading.Event()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._http: HttpPort | None = None

    def start(self) -> ParameterServer:
        """Recover, bind and serve; returns when the server accepts requests."""
        engine = self.engine
        self._context = self._zmq.Context()
        try:
            engine.lock()
            if self.replication is not None:
                self._check_replicated()
                assert engine.checkpoints is not None
                self.replication.prepare(engine.checkpoints.directory, self._context)
            try:
                engine.recover()
            except DataError as error:
                if self.replication is None or not self.replication.give_up_directory(error):
                    raise
                raise StartAgain(self.replication.rebuild) from error
            self._backlog = Backlog(self._zmq, self._context, self.metrics)
            self._reads = Reads(engine.shard, self._backlog, self.limits, self.info, self._publish)
            self._reads.more[Op.LEARNT] = engine.learnt
            self._writes = Writes(engine, self._backlog, self._stopped, self._tables)
            if self.replication is None:
                self._writes.make_tables()
            else:
                self._join_group(self.replication)
            self._bind_sockets()
        except BaseException:
            if self.replication is not None:
                self.replication.leave()
            self._context.term()
            engine.close()
            raise
        self._spawn("ps-io", self._sockets.serve, self._stopped)
        self._spawn("ps-write", self._writes.loop)
        self._spawn("ps-sync", self._writes.sync_loop)
        self._spawn("ps-snapshot", self._writes.checkpoint_loop)
        for i in range(self._read_threads):
            self._spawn(f"ps-read-{i}", self._reads.loop)
        if self._checkpoint_every is not None:
            self._spawn("ps-checkpoint", self._every, self._checkpoint_every, self.checkpoint)
        if self._evict_every is not None:
            self._spawn("ps-evict", self._every, self._evict_every, self._evict)
        if self._archive is not None:
            self.uploading = self._archive(self)
            self._spawn("ps-archive", self.uploading.loop, self._stopped, self._archive_every)
        if self.replication is not None:
            self._spawn("ps-feed", self.replication.feed.loop)
            self._spawn("ps-follow", self.replication.follow, self._stopped)
            self._spawn("ps-coordinate", self.replication.coordinate, self._stopped, self.address)
        log.info("shard %d of %d serves on %s", engine.shard.index, engine.shard.of, self.address)
        return self

    def _check_replicated(self) -> None:
        if self.engine.durability != Durability.LOG:
            raise ConfigError(
                f"a server of a group must have durability 'log', got {self.engine.durability.value!r}: followers copy "
                "the log"
            )

    def _join_group(self, replication: Replication) -> None:
        while not self.engine.make_room():  # it logs why; without a log the server can neither lead nor follow
            time.sleep(ROOM_EVERY_S / 4)
        replication.attach(self.engine, self._backlog, self._writes, self._leave)
        self._writes.safe, self._writes.appended = replication.feed.pass_on, replication.feed.wake
        self._reads.more[Op.FETCH] = replication.give
        self._reads.more[Op.HANDOVER] = lambda _: [replication.hand_over().encode()]

    def _leave(self, why: str) -> None:
        """End the server, so that it is restarted in another role."""
        log.warning("shard %d: %s", self.engine.shard.index, why)
        self._stopped.set()

    def _bind_sockets(self) -> None:
        host, port, keys = self._bind
        self._sockets = Sockets(
            self._zmq, self._context, host, port, keys=keys, limits=self.limits, backlog=self._backlog,
            reads=self._reads, shard=self.engine.shard.index, draining=self._draining, replication=self.replication,
        )  # fmt: skip
        self.address = self._sockets.address
        http_host, http_port = self._http_bind
        if http_port is None:
            return
        try:
            self._http = HttpPort(_address(http_host, http_port), ShownShard(self), self._http_security).start()
        except BaseException:
            self._sockets.close()
            raise
        self.http_address, self.http_url = self._http.address, self._http.url

    def _spawn(self, name: str, target: Callable[..., Any], *args: Any) -> None:
        thread = threading.Thread(target=self._guard, args=(target, *args), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guard(self, target: Callable[..., Any], *args: Any) -> None:
        try:
            target(*args)
        except self._zmq.ContextTerminated:
            pass  # the server ended while this thread still had a reply to send
        except Exception as error:
            self.fatal = self.fatal or f"{threading.current_thread().name}: {error!r}"
            self._stopped.set()
            log.exception("a thread of the server failed")

    def _every(self, period: timedelta, call: Callable[[], Any]) -> None:
        while not self._stopped.wait(period.total_seconds()):
            try:
                call()
            except ShoalError as error:  # a full disk may have space the next time
                if not self._stopped.is_set():
                    log.error("%s", error)

    def _evict(self) -> None:
        if self.replication is None or self.replication.may_answer():
            self._writes.evict()

    def stop(self, *, drain: timedelta = timedelta(seconds=30), checkpoint: bool = False) -> None:
        """Finish the accepted requests and stop. New requests are refused with a status that asks for a retry.

        If the final ``checkpoint`` fails, the server still stops, and the error is raised.
        """
        self._draining.set()
        end = time.monotonic() + drain.total_seconds()
        while self._backlog.pending and time.monotonic() < end and not self._stopped.is_set():
            time.sleep(0.005)
        try:
            if checkpoint and self.fatal is None:
                self.checkpoint()
        finally:
            self._end()

    def _end(self) -> None:
        self._stopped.set()
        if self.replication is not None:
            self.replication.close()
        self._writes.end()
        for _ in range(self._read_threads):
            self._backlog.reads.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(10)
        if self._http is not None:
            self._http.stop()
        self._context.term()  # returns once every replying thread has ended and is done with the files
        self.engine.close()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server has stopped, by `stop` or because it failed (see ``fatal``)."""
        return self._stopped.wait(timeout)

    def __enter__(self) -> ParameterServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def checkpoint(self, timeout: timedelta = timedelta(hours=1)) -> str:
        """Write a checkpoint of the shard while writes continue; returns its path."""
        return self._writes.checkpoint(timeout)

    def between_writes(self, call: Callable[[], Any], timeout: timedelta = timedelta(minutes=10)) -> Any:
        """Call a function while no write is applied, and return its result."""
        return self._writes.between(call, timeout)

    # --- status ---------------------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """The description that a worker gets when it connects."""
        shard = self.engine.shard
        dims = {name: table.dim_size for name, table in list(shard.tables.items())}
        return {
            "protocol": VERSION, "shard": shard.index, "of": shard.of, "version": shard.version, "tables": dims,
            "run": shard.run,
            "durability": self.engine.durability.value, "max_ids": self.limits.max_ids,
            "max_message_bytes": self.limits.max_message_bytes, "operations": [op.name for op in Op],
            **({} if self.replication is None else {"group": self.replication.info()}),
        }  # fmt: skip

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether it accepts requests, and details."""
        read_only = self.engine.full
        state = "failed" if self.fatal else "draining" if self._draining.is_set() else "serving"
        if state == "serving" and read_only:
            state = "read-only"
        queued = self._backlog.queued_bytes
        return state in ("serving", "read-only"), {
            "state": state, "why": self.fatal or read_only or None, "queued_bytes": queued,
            **({} if self.replication is None else {"group": self.replication.info()}),
            **self.engine.shard.status(),
        }  # fmt: skip

    def gauges(self) -> dict[str, Any]:
        """Current values by metric name; names of counters end with ``_total``."""
        engine = self.engine
        checkpointed = engine.checkpoints.age_s() if engine.checkpoints is not None else None
        return {
            "up": int(self.fatal is None),
            "version": engine.shard.version,
            "queued_bytes": self._backlog.queued_bytes,
            "streams": len(engine.streams),
            "duplicate_writes_total": engine.duplicates,
            "cut_connections_total": self._sockets.cut_connections,
            "refused_handshakes_total": self._sockets.refused_handshakes,
            "log_bytes_total": engine.log.bytes_written if engine.log else 0,
            "recovered_records": engine.recovered_records,
            "in_checkpoint": int(engine.in_checkpoint),
            "read_only": int(bool(engine.full)),
            "checkpoint_failures_total": self._writes.checkpoint_failures,
            **({} if checkpointed is None else {"checkpoint_age_seconds": checkpointed}),
            **({} if engine.checkpoints is None else {"disk_free_ratio": free_ratio(engine.checkpoints.directory)}),
            **({} if self.replication is None else self.replication.gauges()),
            **({} if self.uploading is None else self.uploading.status()),
        }

    def metrics_text(self) -> str:
        """The metrics in Prometheus's text format."""
        shard = self.engine.shard
        place = {"shard": str(shard.index), "of": str(shard.of), "group": self._group}
        return self.metrics.text(self.gauges(), shard.status()["tables"], place)


def free_ratio(directory: Path) -> float:
    """The free fraction of the disk that a directory is on."""
    usage = shutil.disk_usage(directory)
    return usage.free / usage.total if usage.total else 0.0


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
