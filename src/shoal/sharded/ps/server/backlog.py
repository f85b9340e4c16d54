"""Requests that wait for a thread, and the channel for replies to the thread that owns the network socket."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple

from shoal.sharded.ps.metrics import Metrics
from shoal.sharded.ps.protocol import Op, Reply, Request, Status, error_reply, nbytes_of

ADDRESS = "inproc://replies"


class Waiting(NamedTuple):
    """An accepted request: its sender (a connection, or a function of the server), the request, and its size."""

    target: bytes | Callable[[Reply], None]
    request: Request
    size: int


class Backlog:
    """Queues of reads and writes, and a count of the accepted requests that have no reply yet.

    None in a queue ends one of the threads that read it.
    """

    def __init__(self, zmq: Any, context: Any, metrics: Metrics) -> None:
        self._zmq, self._context = zmq, context
        self.metrics = metrics
        self.reads: SimpleQueue[Waiting | None] = SimpleQueue()
        self.writes: SimpleQueue[Waiting | Callable[[], Any] | None] = SimpleQueue()
        """Requests, and functions to be called between two of them."""
        self.queued_bytes = 0
        self.pending = 0
        self._lock = threading.Lock()

    def add(self, target: bytes | Callable[[Reply], None], request: Request, size: int = 0) -> None:
        """Accept and queue a request. Checkpoints are ordered with the writes."""
        waiting = self.take_in(target, request, size)
        queue = self.writes if request.op.writes or request.op == Op.CHECKPOINT else self.reads
        queue.put(waiting)

    def take_in(self, target: bytes | Callable[[Reply], None], request: Request, size: int = 0) -> Waiting:
        """Count a request as pending until `answer`."""
        with self._lock:
            self.queued_bytes += size
            self.pending += 1
        return Waiting(target, request, size)

    def replies(self) -> Any:
        """The socket that receives replies, for the thread that owns the network socket."""
        socket = self._context.socket(self._zmq.PULL)
        socket.setsockopt(self._zmq.RCVHWM, 0)
        socket.bind(ADDRESS)
        return socket

    @contextlib.contextmanager
    def outlet(self) -> Iterator[Any]:
        """A socket with which another thread sends replies to the socket of `replies`."""
        socket = self._context.socket(self._zmq.PUSH)
        socket.setsockopt(self._zmq.SNDHWM, 0)
        socket.setsockopt(self._zmq.LINGER, 1000)
        socket.connect(ADDRESS)
        try:
            yield socket
        finally:
            socket.close()

    def answer(self, outlet: Any, waiting: Waiting, reply: Reply) -> None:
        """Send the reply to a request, which is then no longer pending."""
        target, request, size = waiting
        seconds = time.perf_counter() - request.arrived
        self.metrics.done(request.op.name, reply.status.name, seconds, sum(request.counts))
        self.metrics.bytes_out += sum(nbytes_of(p) for p in reply.payload)
        if callable(target):
            target(reply)
        else:
            outlet.send_multipart([target, *reply.frames()], copy=False)
        with self._lock:
            self.queued_bytes -= size
            self.pending -= 1


def expired(request: Request) -> Reply | None:
    """The reply to a request whose sender has given up waiting; None if it has not."""
    if request.deadline_ms and (time.perf_counter() - request.arrived) * 1000 > request.deadline_ms:
        return error_reply(request.request, Status.EXPIRED, "the request waited longer than its deadline")
    return None
