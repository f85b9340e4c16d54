"""The network side of a server: one thread owns the connections, reads requests and sends every reply."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, Protocol

from shoal.errors import ConfigError
from shoal.sharded.ps.limits import Limits
from shoal.sharded.ps.protocol import Op, Reply, Request, Status, error_reply, parse_request
from shoal.sharded.ps.security import ServerKeys
from shoal.sharded.ps.server.backlog import Backlog, Waiting
from shoal.sharded.ps.server.keyed_router import KeyedRouter
from shoal.sharded.ps.server.plain_router import PlainRouter
from shoal.sharded.ps.server.reads import Reads

LOOK_MS = 50  # between two checks of the connections


class Router(Protocol):
    """Connections of many peers, used by one thread."""

    address: str
    pollable: Any
    """A socket or descriptor for a poller."""
    cut: int
    """The number of connections cut because of data they sent or did not read."""
    refused: int
    """The number of connections refused because of their key."""

    def reads(self, wanted: bool) -> bool: ...
    def receive(self) -> list[tuple[bytes, list[memoryview]]]: ...
    def send(self, peer: bytes, frames: list[Any]) -> None: ...
    def look_after(self) -> None: ...
    def close(self) -> None: ...


class Replicated(Protocol):
    """The methods of `Replication` that the network side uses."""

    def serves_reads(self) -> bool: ...
    def refusal(self, request: Request) -> Reply | None: ...
    def ask(self, waiting: Waiting) -> None: ...


class Sockets:
    """Listens on one address. Small reads are answered here, everything else goes to the backlog."""

    def __init__(
        self, zmq: Any, context: Any, host: str, port: int, *, keys: ServerKeys | None, limits: Limits,
        backlog: Backlog, reads: Reads, shard: int, draining: threading.Event, replication: Replicated | None = None,
    ) -> None:  # fmt: skip
        self._zmq, self._limits, self._backlog, self._reads = zmq, limits, backlog, reads
        self._shard, self._draining, self._metrics = shard, draining, backlog.metrics
        self._replication = replication
        self._router: Router = (
            PlainRouter(host, port, limits) if keys is None else KeyedRouter(zmq, context, host, port, keys, limits)
        )
        self.address = self._router.address
        self._replies = backlog.replies()

    @property
    def cut_connections(self) -> int:
        return self._router.cut

    @property
    def refused_handshakes(self) -> int:
        """The number of connections refused because of their key."""
        return self._router.refused

    def serve(self, stopped: threading.Event) -> None:
        """Serve until ``stopped`` is set, then close the sockets."""
        try:
            self._serve(stopped)
        finally:
            self.close()

    def close(self) -> None:
        """Close the sockets. The serving thread must call it, or their creator if no thread serves."""
        self._router.close()
        self._replies.close(0)

    def _serve(self, stopped: threading.Event) -> None:
        zmq, router = self._zmq, self._router
        poller = zmq.Poller()
        poller.register(self._replies, zmq.POLLIN)
        reading = None
        while not stopped.is_set():
            wanted = self._backlog.queued_bytes < self._limits.max_queued_bytes
            if wanted != reading:
                poller.register(router.pollable, zmq.POLLIN if router.reads(wanted) else 0)
                reading = wanted
            ready = len(poller.poll(LOOK_MS))
            if ready:
                self._forward()
                for peer, frames in router.receive():
                    self._receive(peer, frames)
            router.look_after()
        self._forward()

    def _forward(self) -> None:
        while True:
            try:
                peer, *frames = self._replies.recv_multipart(self._zmq.NOBLOCK, copy=False)
            except self._zmq.Again:
                return
            self._router.send(peer.bytes, frames)

    def _receive(self, peer: bytes, frames: list[memoryview]) -> None:
        answer = None
        replication = self._replication
        if len(frames) == 2 and not self._draining.is_set() and (replication is None or replication.serves_reads()):
            with contextlib.suppress(Exception):  # the full path finds and reports the error
                answer = self._reads.plain(frames)
        if answer is None:
            reply = self._take(peer, frames)
            answer = None if reply is None else reply.frames()
        if answer is not None:
            self._router.send(peer, answer)

    def _take(self, peer: bytes, frames: list[memoryview]) -> Reply | None:
        """Handle one message; returns its reply, or None if another thread will reply."""
        size = sum(map(len, frames))
        self._metrics.bytes_in += size
        arrived = time.perf_counter()
        number = 0
        try:
            if frames and len(frames[0]) >= 20:
                number = int.from_bytes(frames[0][12:20], "little")
            request = parse_request(*frames[:3])
            request.arrived = arrived
            if len(frames) > 3 or sum(request.counts) > self._limits.max_ids:
                raise ConfigError(
                    f"a request must have at most 3 frames and {self._limits.max_ids} ids, got {len(frames)} and "
                    f"{sum(request.counts)}; split it into smaller requests"
                )
        except Exception as error:
            self._metrics.bad_messages += 1
            return error_reply(number, Status.BAD_REQUEST, f"shard {self._shard}: {error}")
        if self._draining.is_set():
            return error_reply(number, Status.UNAVAILABLE, f"shard {self._shard} is shutting down")
        if self._replication is not None:
            refused = self._replication.refusal(request)
            if refused is not None:
                return refused
        if request.op == Op.FOLLOW:
            return self._follow(peer, request, size)
        if self._reads.at_once(request):
            return self._reads.now(request)
        self._backlog.add(peer, request, size)
        return None

    def _follow(self, peer: bytes, request: Request, size: int) -> Reply | None:
        if self._replication is None:
            text = f"shard {self._shard} is not part of a group; start its server with --registry"
            return error_reply(request.request, Status.UNSUPPORTED, text)
        self._replication.ask(self._backlog.take_in(peer, request, size))
        return None
