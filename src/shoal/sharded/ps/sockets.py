"""The network side of a server: one thread owns the socket, reads requests, and sends every answer."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from shoal.errors import ConfigError
from shoal.sharded.ps.backlog import Backlog
from shoal.sharded.ps.limits import Limits
from shoal.sharded.ps.protocol import Reply, Status, error_reply, parse_request
from shoal.sharded.ps.reads import Reads
from shoal.sharded.ps.security import ServerKeys, load_keys

ROUND = 64  # requests that are read before answers get their turn


class Sockets:
    """Listens on one address. Small reads are answered here, everything else goes to the backlog."""

    def __init__(
        self, zmq: Any, context: Any, host: str, port: int, *, keys: ServerKeys | None, limits: Limits,
        backlog: Backlog, reads: Reads, shard: int, draining: threading.Event,
    ) -> None:  # fmt: skip
        self._zmq, self._limits, self._backlog, self._reads = zmq, limits, backlog, reads
        self._shard, self._draining, self._metrics = shard, draining, backlog.metrics
        self._authenticator = None
        secrets = None if keys is None else load_keys(keys.secret, secret=True)
        self._router = router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 2000)
        router.setsockopt(zmq.MAXMSGSIZE, limits.max_message_bytes)
        router.setsockopt(zmq.RCVHWM, 64)
        router.setsockopt(zmq.SNDHWM, 1000)  # replies to a worker that reads none are dropped, not kept for ever
        router.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
        if keys is not None and secrets is not None:
            self._authenticator = _authenticator(context, keys)
            (router.curve_publickey, router.curve_secretkey), router.curve_server = secrets, True
        if ":" in host:
            router.setsockopt(zmq.IPV6, 1)
            host = f"[{host.strip('[]')}]"
        try:
            router.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            router.close(0)
            self.close()
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
        self.address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._replies = backlog.replies()

    def serve(self, stopped: threading.Event) -> None:
        """Until ``stopped``; then closes its sockets."""
        try:
            self._serve(stopped)
        finally:
            self.discard()

    def discard(self) -> None:
        """Closes the sockets; the thread that serves does it, or whoever made them where none does."""
        self._router.close()
        self._replies.close(0)

    def _serve(self, stopped: threading.Event) -> None:
        zmq, router = self._zmq, self._router
        poller = zmq.Poller()
        poller.register(self._replies, zmq.POLLIN)
        poller.register(router, zmq.POLLIN)
        reading = True
        while not stopped.is_set():
            wanted = self._backlog.queued_bytes < self._limits.max_queued_bytes
            if wanted != reading:
                poller.register(router, zmq.POLLIN if wanted else 0)
                reading = wanted
            ready = dict(poller.poll(100))
            if self._replies in ready:
                self._forward()
            if router in ready:
                self._receive()
        self._forward()

    def _forward(self) -> None:
        while True:
            try:
                frames = self._replies.recv_multipart(self._zmq.NOBLOCK, copy=False)
            except self._zmq.Again:
                return
            self._router.send_multipart(frames, copy=False)

    def _receive(self) -> None:
        for _ in range(ROUND):
            try:
                frames = self._router.recv_multipart(self._zmq.NOBLOCK, copy=False)
            except self._zmq.Again:
                return
            answer = None
            if len(frames) == 3 and not self._draining.is_set():
                with contextlib.suppress(Exception):  # the long way finds out what is wrong, and tells
                    answer = self._reads.plain(frames)
            if answer is None:
                reply = self._take(frames)
                answer = None if reply is None else reply.frames()
            if answer is not None:
                self._router.send_multipart([frames[0].bytes, *answer], copy=False)

    def _take(self, frames: list[Any]) -> Reply | None:
        """Reads one message: a reply where it can be had at once, None where another thread will give it."""
        size = sum(len(frame) for frame in frames[1:])
        self._metrics.bytes_in += size
        arrived = time.perf_counter()
        number = 0
        try:
            buffers = [frame.buffer for frame in frames[1:4]]
            if buffers and len(buffers[0]) >= 20:
                number = int.from_bytes(buffers[0][12:20], "little")
            request = parse_request(*buffers)
            request.arrived = arrived
            if len(frames) > 4 or sum(request.counts) > self._limits.max_ids:
                raise ConfigError(
                    f"a request has at most 3 frames and {self._limits.max_ids} ids, got {len(frames) - 1} and "
                    f"{sum(request.counts)}; ask in smaller parts"
                )
        except Exception as error:
            self._metrics.bad_messages += 1
            return error_reply(number, Status.BAD_REQUEST, f"shard {self._shard}: {error}")
        if self._draining.is_set():
            return error_reply(number, Status.UNAVAILABLE, f"shard {self._shard} is going down")
        if self._reads.at_once(request):
            return self._reads.now(request)
        self._backlog.add(frames[0].bytes, request, size)
        return None

    def close(self) -> None:
        """Ends what is left once `serve` has returned."""
        if self._authenticator is not None:
            self._authenticator.stop()


def _authenticator(context: Any, keys: ServerKeys) -> Any:
    import zmq.auth
    from zmq.auth.thread import ThreadAuthenticator

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    location = keys.clients if keys.clients is not None else zmq.auth.CURVE_ALLOW_ANY
    authenticator.configure_curve(domain="*", location=str(location))
    return authenticator
