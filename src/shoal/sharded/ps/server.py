"""The parameter server: a thread for the sockets, threads for large reads, one for writes and one for the disk."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

from shoal.errors import ConfigError, DeadlineError, PeerError, ShoalError
from shoal.sharded.ps.engine import Engine
from shoal.sharded.ps.http import StatusServer
from shoal.sharded.ps.metrics import Metrics
from shoal.sharded.ps.protocol import (
    VERSION,
    Op,
    Reply,
    Request,
    Status,
    error_reply,
    nbytes_of,
    parse_request,
    plain_lookup,
    reply_header,
)
from shoal.sharded.ps.security import ServerKeys, check_bind, load_keys, zmq_module
from shoal.sharded.ps.shard import status_of

log = logging.getLogger("shoal.ps")

EVICTION = b"server eviction\0"  # the stream of the server's own evictions


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of what one server takes on."""

    max_ids: int = 1 << 24
    """Ids in one request."""
    max_message_bytes: int = 2 << 30
    """Bytes in one frame; a connection that sends more is cut."""
    max_queued_bytes: int = 4 << 30
    """Requests that wait; beyond it no more are read, and senders feel it. Raise it if memory allows."""
    inline_ids: int = 2048
    """Lookups up to this size are answered by the socket thread itself: a hand-over would cost more."""
    batch_writes: int = 256
    """Writes that share one wait for the disk at most."""


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
        limits: Limits | None = None,
        read_threads: int = 2,
        checkpoint_every: timedelta | None = None,
        evict_every: timedelta | None = None,
        tables: Sequence[Request] = (),
    ) -> None:
        check_bind(host, keys, insecure)
        self.engine = engine
        self.limits = limits or Limits()
        self.metrics = Metrics()
        self.fatal: str | None = None
        self._zmq = zmq_module()
        self._host, self._port = host, port
        self._http_address = (http_host, http_port)
        self._keys = keys
        self._read_threads = read_threads
        self._checkpoint_every = checkpoint_every
        self._evict_every = evict_every
        self._tables = tables
        self._reads: SimpleQueue[Any] = SimpleQueue()
        self._writes: SimpleQueue[Any] = SimpleQueue()
        self._syncs: SimpleQueue[Any] = SimpleQueue()
        self._queued_bytes = 0
        self._pending = 0
        self._count_lock = threading.Lock()
        self._draining = threading.Event()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._http: StatusServer | None = None
        self.address = ""
        self.http_address = ""

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> ParameterServer:
        """Recovers, binds and serves; returns when requests can come."""
        zmq = self._zmq
        self.engine.recover()
        for reply in self.engine.apply(list(self._tables)):
            if reply.status != Status.OK:
                raise ConfigError(reply.text())
        self._context = zmq.Context()
        self._authenticator = self._start_authenticator()
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 2000)
        router.setsockopt(zmq.MAXMSGSIZE, self.limits.max_message_bytes)
        router.setsockopt(zmq.RCVHWM, 64)
        router.setsockopt(zmq.SNDHWM, 1000)  # replies to a worker that reads none are dropped, not kept for ever
        router.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
        if self._keys is not None:
            public, secret = load_keys(self._keys.secret, secret=True)
            router.curve_publickey, router.curve_secretkey, router.curve_server = public, secret, True
        try:
            router.bind(f"tcp://{self._host}:{self._port or '*'}")
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {self._host}:{self._port}: {error}") from error
        self.address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._replies = self._context.socket(zmq.PULL)
        self._replies.setsockopt(zmq.RCVHWM, 0)
        self._replies.bind("inproc://replies")
        host, port = self._http_address
        if port is not None:
            self._http = StatusServer(host, port, self._health, self._metrics_text)
            self.http_address = self._http.address
        self._spawn("ps-io", self._serve, router)
        self._spawn("ps-write", self._write_loop)
        self._spawn("ps-sync", self._sync_loop)
        for i in range(self._read_threads):
            self._spawn(f"ps-read-{i}", self._read_loop)
        if self._checkpoint_every is not None:
            self._spawn("ps-checkpoint", self._every, self._checkpoint_every, lambda: self.checkpoint())
        if self._evict_every is not None:
            self._spawn("ps-evict", self._every, self._evict_every, self._evict)
        log.info("shard %d of %d serves on %s", self.engine.shard.index, self.engine.shard.of, self.address)
        return self

    def _start_authenticator(self) -> Any:
        if self._keys is None:
            return None
        import zmq.auth
        from zmq.auth.thread import ThreadAuthenticator

        authenticator = ThreadAuthenticator(self._context)
        authenticator.start()
        location = self._keys.clients if self._keys.clients is not None else zmq.auth.CURVE_ALLOW_ANY
        authenticator.configure_curve(domain="*", location=str(location))
        return authenticator

    def _spawn(self, name: str, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=self._guard, args=(target, *args), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guard(self, target: Callable[..., None], *args: Any) -> None:
        try:
            target(*args)
        except Exception as error:
            self._fail(f"{threading.current_thread().name}: {error!r}")
            log.exception("a thread of the server failed")

    def _fail(self, reason: str) -> None:
        self.fatal = self.fatal or reason
        self._stopped.set()

    def stop(self, *, drain: timedelta = timedelta(seconds=30), checkpoint: bool = False) -> None:
        """Finishes what was accepted, refuses the rest, and goes. New requests are told to come back."""
        self._draining.set()
        end = time.monotonic() + drain.total_seconds()
        while self._pending and time.monotonic() < end and not self._stopped.is_set():
            time.sleep(0.005)
        if checkpoint and self.fatal is None:
            self.checkpoint()
        self._stopped.set()
        for queue in (self._writes, self._syncs, *[self._reads] * self._read_threads):
            queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(10)
        if self._http is not None:
            self._http.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self.engine.close()
        self._context.term()

    def wait(self, timeout: float | None = None) -> bool:
        """Until the server has stopped, by `stop` or because it failed (``fatal`` tells)."""
        return self._stopped.wait(timeout)

    def __enter__(self) -> ParameterServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # --- sockets --------------------------------------------------------------------------------------------------

    def _serve(self, router: Any) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(self._replies, zmq.POLLIN)
        poller.register(router, zmq.POLLIN)
        reading = True
        while not self._stopped.is_set():
            wanted = self._queued_bytes < self.limits.max_queued_bytes
            if wanted != reading:
                poller.register(router, zmq.POLLIN if wanted else 0)
                reading = wanted
            ready = dict(poller.poll(100))
            if self._replies in ready:
                self._forward(router)
            if router in ready:
                for _ in range(64):
                    try:
                        frames = router.recv_multipart(zmq.NOBLOCK, copy=False)
                    except zmq.Again:
                        break
                    answer = self._lookup_now(frames)
                    if answer is None:
                        reply = self._take(frames)
                        answer = None if reply is None else reply.frames()
                    if answer is not None:
                        router.send_multipart([frames[0].bytes, *answer], copy=False)
        self._forward(router)
        router.close()
        self._replies.close(0)

    def _forward(self, router: Any) -> None:
        zmq = self._zmq
        while True:
            try:
                frames = self._replies.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            router.send_multipart(frames, copy=False)

    def _lookup_now(self, frames: list[Any]) -> list[Any] | None:
        """The answer to a small lookup in one table; None for everything else, which `_take` looks at in full."""
        if len(frames) != 3 or self._draining.is_set():
            return None
        begin = time.perf_counter()
        plain = plain_lookup(frames[1].buffer)
        if plain is None or plain[1] > min(self.limits.inline_ids, self.limits.max_ids):
            return None
        rows = self.engine.shard.lookup_one(plain[2], frames[2].buffer, plain[1])
        if rows is None:
            return None
        self.metrics.bytes_in += 8 * plain[1]
        self.metrics.bytes_out += rows.nbytes
        self.metrics.done("LOOKUP", "OK", time.perf_counter() - begin)
        return [reply_header(plain[0], self.engine.shard.version), rows.numpy()]

    def _take(self, frames: list[Any]) -> Reply | None:
        """Reads one message: a reply where it can be had at once, None where another thread will give it."""
        size = sum(len(frame) for frame in frames[1:])
        self.metrics.bytes_in += size
        arrived = time.perf_counter()
        number = 0
        try:
            buffers = [frame.buffer for frame in frames[1:4]]
            if buffers and len(buffers[0]) >= 20:
                number = int.from_bytes(buffers[0][12:20], "little")
            request = parse_request(*buffers)
            request.arrived = arrived
            if len(frames) > 4 or sum(request.counts) > self.limits.max_ids:
                raise ConfigError(
                    f"a request has at most 3 frames and {self.limits.max_ids} ids, got {len(frames) - 1} and "
                    f"{sum(request.counts)}; ask in smaller parts"
                )
        except Exception as error:
            self.metrics.bad_messages += 1
            return error_reply(number, Status.BAD_REQUEST, f"shard {self.engine.shard.index}: {error}")
        if self._draining.is_set():
            return error_reply(number, Status.UNAVAILABLE, f"shard {self.engine.shard.index} is going down")
        if not request.op.writes and request.op != Op.CHECKPOINT and sum(request.counts) <= self.limits.inline_ids:
            return self._read(request)
        with self._count_lock:
            self._queued_bytes += size
            self._pending += 1
        queue = self._writes if request.op.writes or request.op == Op.CHECKPOINT else self._reads
        queue.put((frames[0].bytes, request, size))
        return None

    def _send(self, socket: Any, target: Any, request: Request, reply: Reply, size: int) -> None:
        self.metrics.done(request.op.name, reply.status.name, time.perf_counter() - request.arrived)
        self.metrics.bytes_out += sum(nbytes_of(p) for p in reply.payload)
        if callable(target):
            target(reply)
        else:
            socket.send_multipart([target, *reply.frames()], copy=False)
        with self._count_lock:
            self._queued_bytes -= size
            self._pending -= 1

    @contextlib.contextmanager
    def _pusher(self) -> Iterator[Any]:
        """A thread's way to the thread that owns the network socket."""
        socket = self._context.socket(self._zmq.PUSH)
        socket.setsockopt(self._zmq.SNDHWM, 0)
        socket.setsockopt(self._zmq.LINGER, 1000)
        socket.connect("inproc://replies")
        try:
            yield socket
        finally:
            socket.close()

    # --- reads ----------------------------------------------------------------------------------------------------

    def _read(self, request: Request) -> Reply:
        shard = self.engine.shard
        version = shard.version
        try:
            if request.op == Op.INFO:
                payload: list[Any] = [json.dumps(self.info()).encode()]
            else:
                payload = shard.read(request)
            reply = Reply(Status.OK, request.request, version, payload)
        except Exception as error:
            if not isinstance(error, ShoalError | NotImplementedError | ValueError):
                log.exception("%s failed", request.op.name)
            reply = error_reply(request.request, status_of(error), str(error), version)
        if request.arrived and sum(request.counts) <= self.limits.inline_ids:
            self.metrics.done(request.op.name, reply.status.name, time.perf_counter() - request.arrived)
        return reply

    def _read_loop(self) -> None:
        with self._pusher() as socket:
            while (item := self._reads.get()) is not None:
                target, request, size = item
                self._send(socket, target, request, _expired(request) or self._read(request), size)
                del item, request  # frees the request's frames before the next wait

    # --- writes ---------------------------------------------------------------------------------------------------

    def _write_loop(self) -> None:
        with self._pusher() as socket:
            while (item := self._writes.get()) is not None:
                batch = [item]
                while len(batch) < self.limits.batch_writes:
                    try:
                        following = self._writes.get_nowait()
                    except Empty:
                        break
                    batch.append(following)
                    if following is None:
                        break
                last = batch[-1] is None
                if last:
                    batch.pop()
                    self._writes.put(None)
                done = [(*item, self._write(item[1])) for item in batch]
                if self.engine.log is not None:
                    self._syncs.put(done)
                else:
                    for target, request, size, reply in done:
                        self._send(socket, target, request, reply, size)
                del item, batch, done

    def _write(self, request: Request) -> Reply:
        expired = _expired(request)
        if expired is not None:
            return expired
        if request.op == Op.CHECKPOINT:
            try:
                return Reply(Status.OK, request.request, self.engine.shard.version, [self.engine.checkpoint().encode()])
            except Exception as error:
                log.exception("the checkpoint failed")
                status = status_of(error) if isinstance(error, ShoalError) else Status.UNAVAILABLE
                return error_reply(request.request, status, f"shard {self.engine.shard.index}: {error}")
        if request.op == Op.APPLY and request.read_version:
            self.metrics.staleness.add(max(0, self.engine.shard.version - request.read_version))
        return self.engine.apply([request])[0]

    def _sync_loop(self) -> None:
        log_file = self.engine.log
        if log_file is None:
            return
        with self._pusher() as socket:
            while (done := self._syncs.get()) is not None:
                while True:
                    try:
                        more = self._syncs.get_nowait()
                    except Empty:
                        break
                    if more is None:
                        self._syncs.put(None)
                        break
                    done += more
                begin = time.perf_counter()
                log_file.sync()  # an error here ends the server: what is on the disk is not known any more
                self.metrics.sync_seconds.add(time.perf_counter() - begin)
                for target, request, size, reply in done:
                    self._send(socket, target, request, reply, size)
                del done

    # --- the rest -------------------------------------------------------------------------------------------------

    def _every(self, period: timedelta, call: Callable[[], Any]) -> None:
        while not self._stopped.wait(period.total_seconds()):
            call()

    def _evict(self) -> None:
        for name, table in list(self.engine.shard.tables.items()):
            number = time.time_ns()
            self._submit(
                Request(
                    Op.EVICT, stream=EVICTION, seq=number, acked=number - 1, req_time=table.max_update_time,
                    counts=[0], names=(name,),
                ),
                lambda _: None,
            )  # fmt: skip

    def _submit(self, request: Request, done: Callable[[Reply], None]) -> None:
        """A write of the server's own, in the order of all others."""
        request.arrived = time.perf_counter()
        with self._count_lock:
            self._pending += 1
        self._writes.put((done, request, 0))

    def checkpoint(self, timeout: timedelta = timedelta(hours=1)) -> str:
        """Has the writing thread take a checkpoint between two writes; its path."""
        replies: SimpleQueue[Reply] = SimpleQueue()
        self._submit(Request(Op.CHECKPOINT), replies.put)
        try:
            reply = replies.get(timeout=timeout.total_seconds())
        except Empty:
            raise DeadlineError(f"shard {self.engine.shard.index}: no checkpoint within {timeout}") from None
        if reply.status != Status.OK:
            raise PeerError(reply.text())
        return reply.text()

    def info(self) -> dict[str, Any]:
        """What a worker learns when it connects."""
        shard = self.engine.shard
        dims = {name: table.dim_size for name, table in list(shard.tables.items())}
        return {
            "protocol": VERSION, "shard": shard.index, "of": shard.of, "version": shard.version, "tables": dims,
            "durability": self.engine.durability.value, "max_ids": self.limits.max_ids,
            "max_message_bytes": self.limits.max_message_bytes,
        }  # fmt: skip

    def _health(self) -> tuple[bool, dict[str, Any]]:
        state = "failed" if self.fatal else "draining" if self._draining.is_set() else "serving"
        text = {"state": state, "why": self.fatal, "queued_bytes": self._queued_bytes, **self.engine.shard.status()}
        return state == "serving", text

    def _metrics_text(self) -> str:
        engine = self.engine
        gauges = {
            "up": int(self.fatal is None),
            "version": engine.shard.version,
            "queued_bytes": self._queued_bytes,
            "streams": len(engine.streams),
            "duplicate_writes_total": engine.duplicates,
            "log_bytes_total": engine.log.bytes_written if engine.log else 0,
            "recovered_records": engine.recovered_records,
        }
        return self.metrics.text(gauges, engine.shard.status()["tables"])


def _expired(request: Request) -> Reply | None:
    if request.deadline_ms and (time.perf_counter() - request.arrived) * 1000 > request.deadline_ms:
        return error_reply(request.request, Status.EXPIRED, "the request waited longer than its sender would")
    return None
