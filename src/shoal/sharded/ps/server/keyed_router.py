"""A server's connections with CURVE keys, by libzmq, with a bound on the unfinished messages of each."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import time
from typing import Any

from shoal.errors import ConfigError
from shoal.sharded.ps.limits import Limits
from shoal.sharded.ps.security import ServerKeys, load_keys

log = logging.getLogger("shoal.ps")

ROUND = 64  # requests that are read before replies are sent
ENCRYPTION_BYTES = 64  # the least that encryption adds to a frame
LOOK_S = 0.05  # between two checks of the connections
BYTES_RECEIVED = 128  # offset of that field in Linux's tcp_info


class Watched:
    """One connection: the bytes received in total, and up to the check after its last complete message."""

    __slots__ = ("completed", "finished", "received")

    def __init__(self) -> None:
        self.received = self.completed = 0
        self.finished = False

    @property
    def pending(self) -> int:
        return self.received - self.completed


class KeyedRouter:
    """A ROUTER socket with CURVE, for use by one thread.

    libzmq holds the frames of a message until it is complete, and bounds only single frames. With keys the frames are
    encrypted, so only libzmq could count them. This class therefore asks the system many times a second how many bytes
    a connection has received, and cuts one that has received more than the largest message without completing one.
    A frame takes at least 35 bytes on the wire and 64 in memory, so memory is bounded too.
    """

    def __init__(self, zmq: Any, context: Any, host: str, port: int, keys: ServerKeys, limits: Limits) -> None:
        self._zmq, self._limits = zmq, limits
        self.cut = self.refused = 0
        self._authenticator: Any = None
        self._monitor: Any = None
        public, secret = load_keys(keys.secret, secret=True)
        self.pollable = router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 2000)
        router.setsockopt(zmq.MAXMSGSIZE, limits.max_message_bytes + ENCRYPTION_BYTES)
        router.setsockopt(zmq.RCVHWM, 64)
        router.setsockopt(zmq.SNDHWM, 1000)  # replies to a worker that does not read are dropped
        router.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
        self._authenticator = _authenticator(context, keys)
        router.curve_publickey, router.curve_secretkey, router.curve_server = public, secret, True
        if ":" in host:
            router.setsockopt(zmq.IPV6, 1)
            host = f"[{host.strip('[]')}]"
        self._refusals = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        self._refusals |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        self._monitor = router.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | self._refusals
        )
        try:
            router.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
        self.address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._watched: dict[int, Watched] = {}
        self._looked = time.monotonic()

    def reads(self, wanted: bool) -> bool:
        """Set whether requests are read; returns whether to poll the socket."""
        return wanted

    def receive(self) -> list[tuple[bytes, list[memoryview]]]:
        """The received messages: peer and frames."""
        taken = []
        for _ in range(ROUND):
            try:
                peer, *frames = self.pollable.recv_multipart(self._zmq.NOBLOCK, copy=False)
            except self._zmq.Again:
                break
            if frames:
                watched = self._watched.get(frames[0].get(self._zmq.SRCFD))
                if watched is not None:
                    watched.finished = True
            taken.append((peer.bytes, [frame.buffer for frame in frames]))
        return taken

    def send(self, peer: bytes, frames: list[Any]) -> None:
        self.pollable.send_multipart([peer, *frames], copy=False)

    def look_after(self) -> None:
        """Cut connections with too many bytes of incomplete messages; called many times a second."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        self._follow()
        for fd, watched in list(self._watched.items()):
            try:
                watched.received = _bytes_received(fd)
            except OSError:  # just closed
                self._watched.pop(fd, None)
                continue
            if watched.finished:
                watched.completed, watched.finished = watched.received, False
            if watched.pending > self._limits.max_request_bytes:
                self._cut(fd, f"a message has more than {self._limits.max_request_bytes} bytes")
        while sum(w.pending for w in self._watched.values()) > self._limits.max_queued_bytes:
            largest = max(self._watched, key=lambda fd: self._watched[fd].pending)
            self._cut(largest, "incomplete messages hold more than max_queued_bytes")

    def _follow(self) -> None:
        """Update the list of connections from the socket's events."""
        from zmq.utils.monitor import recv_monitor_message

        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == self._zmq.EVENT_ACCEPTED:
                self._watched[event["value"]] = Watched()
            elif event["event"] & self._refusals:
                self.refused += 1
            else:
                self._watched.pop(event["value"], None)

    def _cut(self, fd: int, why: str) -> None:
        self._watched.pop(fd, None)
        self.cut += 1
        with contextlib.suppress(OSError), _borrowed(fd) as connected:
            log.warning("the connection of %s is cut: %s", connected.getpeername(), why)
            connected.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        if self._monitor is not None:
            self.pollable.disable_monitor()
            self._monitor.close(0)
            self._monitor = None
        self.pollable.close()


@contextlib.contextmanager
def _borrowed(fd: int) -> Any:
    """A socket over a descriptor that belongs to libzmq."""
    with socket.socket(fileno=os.dup(fd)) as connected:
        yield connected


def _bytes_received(fd: int) -> int:
    with _borrowed(fd) as connected:
        info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
    return struct.unpack_from("=Q", info, BYTES_RECEIVED)[0] if len(info) >= BYTES_RECEIVED + 8 else 0


def _authenticator(context: Any, keys: ServerKeys) -> Any:
    import zmq.auth
    from zmq.auth.thread import ThreadAuthenticator

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    location = keys.clients if keys.clients is not None else zmq.auth.CURVE_ALLOW_ANY
    authenticator.configure_curve(domain="*", location=str(location))
    return authenticator
