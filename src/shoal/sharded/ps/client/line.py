"""One connection from a worker to one server; calls survive the server's restart, up to their deadline."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError, DeadlineError, PeerError, UnsupportedError
from shoal.sharded.ps.protocol import RECORDS, Op, Reply, Request, Status, error_reply, parse_reply
from shoal.sharded.ps.security import load_keys
from shoal.sharded.ps.server.shard import UnknownTable

if TYPE_CHECKING:
    from shoal.sharded.ps.client.client import PsClient

UNORDERED = bytes(16)
CLOSED = "this parameter-server client is closed"
TICK_MS = 100  # between two checks of the connection while waiting for a reply
ANOTHER_S = 0.3  # without a connection before another server of the shard is tried
HALF_OPEN_S = 3.0  # of silence after which another server of the shard is tried
UNANSWERED_S = 3.0  # after which another server is asked: this one may have lost the lead without noticing yet
LONG_OPS = (Op.CHECKPOINT, Op.RESTORE)  # exempt from UNANSWERED_S
FIRST_BACKOFF_S = 0.01  # before a refused request is sent again; doubles each time
BACKOFF_S = 0.2  # the longest such wait


class Call:
    """A request under way, which expires ``seconds`` after it was made."""

    __slots__ = ("again", "line", "refused", "reply", "request", "seconds", "until")

    def __init__(self, line: Line, request: Request, seconds: float) -> None:
        self.line, self.request, self.seconds = line, request, seconds
        self.until = time.monotonic() + seconds
        self.reply: Reply | None = None
        self.refused = ""  # the server's reason for refusing the request for now
        self.again = False  # whether to send it again

    def result(self) -> Reply:
        """Wait for the reply; raises the server's error, or `DeadlineError`."""
        return self.line.wait(self)


class Line:
    """One connection to one server, used by one thread at a time. Its writes belong to ``stream``, if given."""

    def __init__(self, client: PsClient, shard: int, stream: bytes = UNORDERED) -> None:
        self.client, self.shard, self.stream = client, shard, stream
        self._servers = client.addresses[shard].split("|")
        self._place = client.places[shard] % len(self._servers)
        self.calls: OrderedDict[int, Call] = OrderedDict()
        self.number = 0
        self.seq = 0
        self._established = False
        self._handshakes_failed = 0
        self._resend_at: float | None = None
        self._backoff_s = FIRST_BACKOFF_S
        self._heard_at = 0.0
        self._socket: Any = None
        self._monitor: Any = None
        self._connect()

    @property
    def address(self) -> str:
        """The server in use now; a replicated shard has several, one of which leads."""
        return self._servers[self._place]

    def _try_another(self, wanted: str = "") -> None:
        """Switch to the shard's server at ``wanted`` if the client has that address, else to the next one."""
        wanted = wanted if "://" in wanted or not wanted else f"tcp://{wanted}"
        if wanted in self._servers:
            self._place = self._servers.index(wanted)
        else:
            self._place = (self._place + 1) % len(self._servers)
        self.client.places[self.shard] = self._place
        self._cut = True

    @property
    def _name(self) -> str:
        return f"parameter server {self.shard} of {self.client.num_ps} ({self.address})"

    def _connect(self) -> None:
        self.close()
        self._established = self._cut = False
        self._connected_at = time.monotonic()
        zmq, keys = self.client.zmq, self.client.keys
        try:
            self._socket = socket = self.client.context.socket(zmq.DEALER)
            self.client.sockets.add(socket)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, TICK_MS)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
            half_open_s = self.client.half_open_after.total_seconds()
            if len(self._servers) > 1:
                half_open_s = min(half_open_s, HALF_OPEN_S)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(half_open_s * 1000))
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            if "[" in self.address:
                socket.setsockopt(zmq.IPV6, 1)
            if keys is not None:
                socket.curve_publickey, socket.curve_secretkey = load_keys(keys.secret, secret=True)
                socket.curve_serverkey = load_keys(keys.server, secret=False)[0]
            self._monitor = socket.get_monitor_socket(
                zmq.EVENT_DISCONNECTED
                | zmq.EVENT_HANDSHAKE_SUCCEEDED
                | zmq.EVENT_HANDSHAKE_FAILED_AUTH
                | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            )
            self.client.sockets.add(self._monitor)
            socket.connect(self.address)
        except zmq.ZMQError as error:
            self.close()
            if self.client.closed:
                raise PeerError(CLOSED) from None
            raise ConfigError(
                f"parameter server address must be HOST:PORT, such as 10.0.0.1:7100, got {self.address!r} "
                f"({error.strerror})"
            ) from error
        except BaseException:
            self.close()
            raise

    def send(self, request: Request, seconds: float) -> Call:
        request.request = self.number + 1
        own = request.op.writes and self.stream != UNORDERED and not request.flags & RECORDS
        if own:
            request.stream, request.seq = self.stream, self.seq + 1
        call = Call(self, request, seconds)
        frames = self._frames(call)  # may raise; a number used up without being sent would block all later writes
        self.number, self.seq = request.request, request.seq if own else self.seq
        if not self.calls:
            self._heard_at = time.monotonic()
        self.calls[self.number] = call
        self._push(frames)
        return call

    def _push(self, frames: list[Any]) -> None:
        zmq = self.client.zmq
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:  # there is no connection after a failed handshake: `_look` finds the reason and resends
            self._cut = True
        except zmq.ContextTerminated:
            raise PeerError(CLOSED) from None

    def _frames(self, call: Call) -> list[Any]:
        request = call.request
        request.deadline_ms = max(1, min(int((call.until - time.monotonic()) * 1000), (1 << 32) - 1))
        if request.seq and not request.flags & RECORDS:
            numbers = (c.request.seq for c in self.calls.values() if c.request.seq and not c.request.flags & RECORDS)
            request.acked = next(numbers, request.seq) - 1
        return request.frames()

    def wait(self, call: Call) -> Reply:
        try:
            while call.reply is None:
                frames = self._receive(call.until)
                if frames is None:
                    self._look(call)
                else:
                    self._take(parse_reply([frame.buffer for frame in frames]))
        except self.client.zmq.ContextTerminated:
            raise PeerError(CLOSED) from None
        return _checked(call.reply, self.shard, self.address)

    def _receive(self, until: float) -> list[Any] | None:
        """The next message; None after a tick without one, at ``until``, or when a request is due to be resent."""
        zmq = self.client.zmq
        if self._resend_at is not None:
            until = min(until, self._resend_at)
        left_ms = int((until - time.monotonic()) * 1000) + 1
        try:
            if left_ms < TICK_MS and not self._socket.poll(max(0, left_ms)):
                return None
            return self._socket.recv_multipart(copy=False)
        except zmq.Again:
            return None

    def _take(self, reply: Reply) -> None:
        self._heard_at = time.monotonic()
        call = self.calls.get(reply.request)
        if call is None:
            return  # the second reply to a request that was resent
        if reply.status == Status.GAP and call.request.flags & RECORDS and not self._earlier(call.request):
            del self.calls[reply.request]
            lost = f"{reply.text()}: the server has lost acknowledged updates; it must run with --durability log"
            call.reply = error_reply(reply.request, Status.BAD_REQUEST, lost, reply.version)
            return
        if reply.status in (Status.UNAVAILABLE, Status.GAP, Status.NOT_LEADER):
            call.refused, call.again = reply.text(), True
            if reply.status == Status.NOT_LEADER and len(self._servers) > 1:
                self._try_another(bytes(reply.payload[1]).decode("utf-8", "replace") if len(reply.payload) > 1 else "")
            if self._resend_at is None:
                self._resend_at = time.monotonic() + self._backoff_s
                self._backoff_s = min(2 * self._backoff_s, BACKOFF_S)
            return
        self._backoff_s = FIRST_BACKOFF_S
        del self.calls[reply.request]
        call.reply = reply

    def _earlier(self, request: Request) -> bool:
        """Whether an earlier write of the same stream is under way."""
        return any(c.request.stream == request.stream and c.request.seq < request.seq for c in self.calls.values())

    def _look(self, call: Call) -> None:
        """After a tick without a message: check the connection and the deadline, and resend what is due."""
        if self.client.closed:
            raise PeerError(CLOSED)
        self._follow(call)  # also after the deadline, whose error says what happened to the connection
        now = time.monotonic()
        if len(self._servers) > 1 and not self._established and now - self._connected_at > ANOTHER_S:
            self._try_another()
        elif len(self._servers) > 1 and now - self._heard_at > UNANSWERED_S and call.request.op not in LONG_OPS:
            self._heard_at = now
            self._try_another()
        cut = self._cut
        if now > call.until:
            raise self._too_late(call)
        if cut:
            self._connect()
        if cut or (self._resend_at is not None and now >= self._resend_at):
            self._resend_at = None
            for waiting in self.calls.values():
                if cut or waiting.again:
                    waiting.again = False
                    self._push(self._frames(waiting))

    def _follow(self, call: Call) -> None:
        """Read the connection's events; raises `PeerError` for keys that can never match.

        A server that wants keys may also just hang up, like one that is shutting down; `_too_late` reports that.
        """
        zmq = self.client.zmq
        while self._monitor.poll(0):
            event = zmq.utils.monitor.recv_monitor_message(self._monitor)
            kind = event["event"]
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._established, self._handshakes_failed = True, 0
            elif kind == zmq.EVENT_DISCONNECTED:  # before a handshake nothing was sent, so nothing was lost
                if self._established and not self._cut and len(self._servers) > 1:
                    self._try_another()
                self._cut, self._established = self._cut or self._established, False
            else:
                self._handshakes_failed += 1
            if kind in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                self._cut = True  # libzmq does not reconnect such a socket
            if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.calls.pop(call.request.request, None)
                raise PeerError(
                    f"{self._name} refused this worker's key; add its public key to the server's --clients folder"
                )
            if event["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                self.calls.pop(call.request.request, None)
                whose = "the worker's side" if self.client.keys is not None else "the server's side"
                raise PeerError(f"{self._name}: only {whose} has CURVE keys; use them on both sides or on neither")

    def _too_late(self, call: Call) -> DeadlineError:
        self.calls.pop(call.request.request, None)
        why = f"; it last said: {call.refused}" if call.refused else ""
        if self._handshakes_failed > 1:
            question = "is that its public key?" if self.client.keys is not None else "does it want CURVE keys?"
            why += f"; it breaks off every handshake: {question}"
        written = " The write may or may not have been applied." if call.request.op.writes else ""
        return DeadlineError(
            f"{self._name} did not answer {call.request.op.name.lower()} within {call.seconds:g} s{why}; see its "
            f"log, or raise the deadline.{written}"
        )

    def close(self) -> None:
        """Close the connection; must be called by the thread that uses it."""
        if self._monitor is not None:
            with contextlib.suppress(self.client.zmq.ZMQError):  # the context is being terminated
                self._socket.disable_monitor()
            self._discard(self._monitor)
            self._monitor = None
        if self._socket is not None:
            self._discard(self._socket)
            self._socket = None

    def _discard(self, socket: Any) -> None:
        socket.close(0)
        self.client.sockets.discard(socket)


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
