"""The worker's side: one connection per server and use, requests that outlive a server's restart, deadlines."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from shoal.errors import ConfigError, DeadlineError, PeerError, UnsupportedError
from shoal.sharded.ps.metrics import STEPS, Histogram
from shoal.sharded.ps.protocol import Op, Reply, Request, Status, parse_reply
from shoal.sharded.ps.security import ClientKeys, load_keys, zmq_module
from shoal.sharded.ps.shard import UnknownTable

TICK_MS = 100  # between two looks at the connection while a reply is awaited
BACKOFF_S = 0.2  # before a request that the server could not take now is sent again


class Call:
    """A request on its way."""

    __slots__ = ("line", "patience", "refused", "reply", "request", "until")

    def __init__(self, line: Line, request: Request, until: float) -> None:
        self.line, self.request, self.until = line, request, until
        self.patience = timedelta(seconds=round(until - time.monotonic(), 2))
        self.reply: Reply | None = None
        self.refused = ""

    def result(self) -> Reply:
        """Waits for the reply; raises what the server raised, or `DeadlineError`."""
        return self.line.wait(self)


class Line:
    """One connection to one server, used by one thread at a time, and what is under way on it."""

    def __init__(self, client: PsClient, shard: int, stream: bytes = bytes(16)) -> None:
        self.client, self.shard, self.stream = client, shard, stream
        self.calls: OrderedDict[int, Call] = OrderedDict()
        self.number = 0
        self.seq = 0
        self.resends = 0
        self._resend_at: float | None = None
        self._socket: Any = None
        self._connect()

    def _connect(self) -> None:
        zmq = self.client.zmq
        if self._socket is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)
        self._socket = socket = self.client.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, TICK_MS)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self.client.half_open_after.total_seconds() * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self.client.keys is not None:
            socket.curve_publickey, socket.curve_secretkey = load_keys(self.client.keys.secret, secret=True)
            socket.curve_serverkey = load_keys(self.client.keys.server, secret=False)[0]
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        try:
            socket.connect(self.client.addresses[self.shard])
        except zmq.ZMQError as error:
            why = f"an address is HOST:PORT, such as 10.0.0.1:7100 ({error.strerror})"
            raise ConfigError(f"parameter server {self.client.addresses[self.shard]!r}: {why}") from error

    def send(self, request: Request, until: float) -> Call:
        self.number += 1
        request.request = self.number
        if request.op.writes and self.stream != bytes(16):
            self.seq += 1
            request.stream, request.seq = self.stream, self.seq
        call = Call(self, request, until)
        self.calls[self.number] = call
        self._send(call)
        return call

    def _send(self, call: Call) -> None:
        request = call.request
        request.deadline_ms = max(1, min(int((call.until - time.monotonic()) * 1000), (1 << 32) - 1))
        if request.seq:
            unanswered = (c.request.seq for c in self.calls.values() if c.request.seq)
            request.acked = min(unanswered, default=self.seq + 1) - 1
        self._socket.send_multipart(request.frames(), copy=False)

    def wait(self, call: Call) -> Reply:
        zmq = self.client.zmq
        while call.reply is None:
            try:
                frames = self._socket.recv_multipart(copy=False)
            except zmq.Again:
                self._look(call)
                continue
            self._take(parse_reply([frame.buffer for frame in frames]))
        return _checked(call.reply, self.shard, self.client.addresses[self.shard])

    def _take(self, reply: Reply) -> None:
        call = self.calls.get(reply.request)
        if call is None:
            return  # a second answer to something that was sent twice
        if reply.status in (Status.UNAVAILABLE, Status.GAP):
            call.refused = reply.text()
            if self._resend_at is None:
                self._resend_at = time.monotonic() + BACKOFF_S
            return
        del self.calls[reply.request]
        call.reply = reply

    def _look(self, call: Call) -> None:
        """Nothing came for a tick: has the server gone, has it refused, is it too late?"""
        zmq = self.client.zmq
        now = time.monotonic()
        if now > call.until:
            self.calls.pop(call.request.request, None)
            why = f"; it last said: {call.refused}" if call.refused else ""
            written = " The write may or may not have been applied." if call.request.op.writes else ""
            raise DeadlineError(
                f"parameter server {self.shard} of {len(self.client.addresses)} "
                f"({self.client.addresses[self.shard]}) gave no answer to {call.request.op.name.lower()} within "
                f"{call.patience}{why}; see its log, or raise the deadline.{written}"
            )
        lost = False
        while self._monitor.poll(0):
            event = zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise PeerError(
                    f"parameter server {self.shard} ({self.client.addresses[self.shard]}) refuses this worker's key; "
                    "put its public key into the server's folder of clients"
                )
            lost = True
        if lost:
            self._connect()
        if lost or (self._resend_at is not None and now >= self._resend_at):
            self._resend_at = None
            for waiting in self.calls.values():
                if lost or waiting.refused:
                    waiting.refused = ""
                    self.resends += 1
                    self._send(waiting)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)


class PsClient:
    """Talks to all parameter servers, ``addresses[i]`` being shard ``i``. Threads may share it.

    Args:
        deadline: how long a call waits, a dead server's restart included; the error names the shard.
        max_staleness: how many of this worker's updates may be unanswered when it goes on; 0 waits for each.
            Raise it when workers spend their time waiting for updates.
        keys: this worker's identity and the servers' public key, where they use CURVE.
        half_open_after: a connection that has been silent for so long is opened anew.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        deadline: timedelta = timedelta(minutes=30),
        max_staleness: int = 0,
        keys: ClientKeys | None = None,
        half_open_after: timedelta = timedelta(seconds=10),
    ) -> None:
        self.zmq = zmq_module()
        import zmq.utils.monitor  # noqa: F401

        if not addresses:
            raise ConfigError("a parameter-server client needs at least one address")
        if max_staleness < 0:
            raise ConfigError(f"max_staleness is not negative, got {max_staleness}")
        self.addresses = [a if "://" in a else f"tcp://{a}" for a in addresses]
        self.deadline = deadline
        self.max_staleness = max_staleness
        self.keys = keys
        self.half_open_after = half_open_after
        self.staleness = Histogram(STEPS)
        """At each lookup: this worker's updates that were not answered yet."""
        self.context = self.zmq.Context()
        self._free: list[list[Line]] = []
        self._lines: list[Line] = []
        self._pool_lock = threading.Lock()
        self._write_lock = threading.RLock()
        self._under_way: deque[list[Call]] = deque()
        self._closed = False
        self.versions = [0] * len(self.addresses)
        """The version that each shard had when it was last read."""
        self._writers = self._open(uuid.uuid4().bytes)
        self._verified = False

    @property
    def num_ps(self) -> int:
        return len(self.addresses)

    def _open(self, stream: bytes = bytes(16)) -> list[Line]:
        lines = [Line(self, shard, stream) for shard in range(len(self.addresses))]
        self._lines += lines
        return lines

    @contextlib.contextmanager
    def _reader(self) -> Iterator[list[Line]]:
        with self._pool_lock:
            if self._closed:
                raise PeerError("this parameter-server client is closed")
            lines = self._free.pop() if self._free else self._open()
        try:
            yield lines
        finally:
            with self._pool_lock:
                if not self._closed:
                    self._free.append(lines)

    def _until(self, deadline: timedelta | None) -> float:
        return time.monotonic() + (self.deadline if deadline is None else deadline).total_seconds()

    def read(self, requests: dict[int, Request], deadline: timedelta | None = None) -> dict[int, Reply]:
        """Asks shards in parallel, one round trip each; replies by shard."""
        self.verify(deadline)
        return self._read(requests, deadline)

    def _read(self, requests: dict[int, Request], deadline: timedelta | None = None) -> dict[int, Reply]:
        until = self._until(deadline)
        self.staleness.add(len(self._under_way))
        with self._reader() as lines:
            calls = {shard: lines[shard].send(request, until) for shard, request in requests.items()}
            try:
                replies = {shard: call.result() for shard, call in calls.items()}
            finally:
                for shard, call in calls.items():
                    lines[shard].calls.pop(call.request.request, None)
        for shard, reply in replies.items():
            self.versions[shard] = reply.version
        return replies

    def write(
        self, requests: dict[int, Request], deadline: timedelta | None = None, *, wait: bool = True
    ) -> dict[int, Reply]:
        """Sends this worker's next write to shards in parallel.

        With ``wait`` it returns their replies. Without, it returns an empty dict once at most ``max_staleness`` writes
        are unanswered; an error of such a write is raised by a later call or by `flush`.
        """
        self.verify(deadline)
        until = self._until(deadline)
        with self._write_lock:
            if self._closed:
                raise PeerError("this parameter-server client is closed")
            calls = {shard: self._writers[shard].send(request, until) for shard, request in requests.items()}
            self._under_way.append(list(calls.values()))
            self._settle(0 if wait else self.max_staleness)
            return {shard: call.reply for shard, call in calls.items() if call.reply is not None} if wait else {}

    def _settle(self, allowed: int) -> None:
        """Waits until at most ``allowed`` writes are unanswered; raises the first error of each."""
        while len(self._under_way) > allowed:
            error: Exception | None = None
            for call in self._under_way.popleft():
                try:
                    call.result()
                except Exception as raised:
                    error = error or raised
            if error is not None:
                raise error

    def flush(self) -> None:
        """Waits until every write of this worker has been answered."""
        with self._write_lock:
            self._settle(0)

    @property
    def unanswered(self) -> int:
        """Writes of this worker that are under way."""
        return len(self._under_way)

    def info(self, deadline: timedelta | None = None) -> list[dict[str, Any]]:
        """What each server tells about itself."""
        replies = self._read({shard: Request(Op.INFO) for shard in range(self.num_ps)}, deadline)
        return [json.loads(bytes(replies[shard].payload[0])) for shard in range(self.num_ps)]

    def verify(self, deadline: timedelta | None = None) -> None:
        """Checks once that address ``i`` is shard ``i`` of as many as there are addresses."""
        if self._verified:
            return
        for shard, info in enumerate(self.info(deadline)):
            if (info["shard"], info["of"]) != (shard, self.num_ps):
                raise ConfigError(
                    f"{self.addresses[shard]} is shard {info['shard']} of {info['of']}, but stands as number {shard} "
                    f"of {self.num_ps} addresses; list all servers in the order of their shards"
                )
        self._verified = True

    def checkpoint(
        self, deadline: timedelta | None = None, *, keep_as: str = "", others: Sequence[str] = ()
    ) -> list[str]:
        """Has every server write a checkpoint now; their paths, on the servers.

        With ``keep_as="RUN-WHAT"`` it stays there for `restore`, whatever comes later, until one of the same run is
        kept that does not name it among its ``others``.
        """
        names = json.dumps([keep_as, list(others)]).encode() if keep_as else b""
        replies = self.read({shard: Request(Op.CHECKPOINT, values=names) for shard in range(self.num_ps)}, deadline)
        return [replies[shard].text() for shard in range(self.num_ps)]

    def restore(self, table: str, kept: str, deadline: timedelta | None = None) -> None:
        """Brings a table back on every server to what it was in the checkpoint kept under that name."""
        requests = {
            shard: Request(Op.RESTORE, counts=[0], names=(table,), values=kept.encode()) for shard in range(self.num_ps)
        }
        self.write(requests, deadline)

    def close(self) -> None:
        """Drops what is under way and closes the connections."""
        with self._write_lock, self._pool_lock:
            if self._closed:
                return
            self._closed = True
            for line in self._lines:
                line.close()
        self.context.term()

    def __enter__(self) -> PsClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _checked(reply: Reply, shard: int, address: str) -> Reply:
    if reply.status == Status.OK:
        return reply
    text = f"parameter server {shard} ({address}): {reply.text()}"
    if reply.status == Status.UNKNOWN_TABLE:
        raise UnknownTable(text)
    if reply.status == Status.BAD_REQUEST:
        raise ConfigError(text)
    if reply.status == Status.UNSUPPORTED:
        raise UnsupportedError(text)
    if reply.status == Status.EXPIRED:
        raise DeadlineError(text)
    raise PeerError(text)
