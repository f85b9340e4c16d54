"""A server's plaintext connections, read by the server itself so that the memory of each is bounded."""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import time
from collections import deque
from typing import Any

from shoal.errors import ConfigError
from shoal.sharded.ps.limits import Limits
from shoal.sharded.ps.server import zmtp

log = logging.getLogger("shoal.ps")

PING_S = 2.0  # of silence before a peer gets a heartbeat
SILENT_S = 10.0  # of silence after which a connection is cut
LINGER_S = 2.0  # for unsent replies when the server ends
MAX_UNSENT = 1000  # replies to a peer that does not read them
EVENTS = 64  # connections that are served in one round


class Connection:
    """One peer: its incomplete message, and its unsent replies."""

    def __init__(self, peer: bytes, connected: socket.socket, reader: zmtp.Reader) -> None:
        self.peer, self.socket, self.reader = peer, connected, reader
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self.messages_unsent = 0
        self.heard_at = self.pinged = time.monotonic()
        self.waits_to_send = False


class PlainRouter:
    """Accepts connections of ZeroMQ's DEALER sockets (ZMTP 3, no keys). One thread uses it.

    A connection is cut if it is malformed or silent, sends too large a message, or does not read its replies; its
    worker connects and sends again. Incomplete messages of all connections take at most ``max_queued_bytes``, and so do
    unsent replies: the largest connection is cut first.
    """

    def __init__(self, host: str, port: int, limits: Limits) -> None:
        self._limits = limits
        self.cut = 0
        self.refused = 0  # always 0: without keys every peer is accepted
        """The number of connections refused because of their key."""
        self._listener = _listen(host, port)
        at = self._listener.getsockname()
        self.address = f"tcp://[{at[0]}]:{at[1]}" if ":" in at[0] else f"tcp://{at[0]}:{at[1]}"
        self.pollable = select.epoll()
        self.pollable.register(self._listener, select.EPOLLIN)
        self._by_fd: dict[int, Connection] = {}
        self._by_peer: dict[bytes, Connection] = {}
        self._scratch = memoryview(bytearray(zmtp.CHUNK_BYTES))
        self._numbers = 0
        self._reading = True
        self._looked = time.monotonic()

    # --- in ---------------------------------------------------------------------------------------------------------

    def reads(self, wanted: bool) -> bool:
        """Set whether requests are read; returns whether to poll, which is True because replies need it."""
        if wanted != self._reading:
            self._reading = wanted
            self.pollable.modify(self._listener, select.EPOLLIN if wanted else 0)
            for connection in self._by_fd.values():
                self._poll_for(connection)
        return True

    def receive(self) -> list[tuple[bytes, list[memoryview]]]:
        """The received messages: peer and frames. Also sends waiting replies and checks for silent peers."""
        taken: list[tuple[bytes, list[memoryview]]] = []
        for fd, events in self.pollable.poll(0, EVENTS):
            if fd == self._listener.fileno():
                self._accept()
                continue
            connection = self._by_fd[fd]
            if events & select.EPOLLOUT:
                self._flush(connection)
            if events & ~select.EPOLLOUT and fd in self._by_fd:
                taken.extend((connection.peer, frames) for frames in self._read(connection))
        return taken

    def _accept(self) -> None:
        for _ in range(EVENTS):
            try:
                connected, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    log.warning("cannot accept a connection: %s", error)
                    time.sleep(0.05)  # until another connection is closed
                return
            connected.setblocking(False)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._numbers += 1
            peer = self._numbers.to_bytes(8, "little")
            frame = self._limits.max_message_bytes
            connection = Connection(peer, connected, zmtp.Reader(frame, self._limits.max_request_bytes))
            self._by_fd[connected.fileno()] = self._by_peer[peer] = connection
            self.pollable.register(connected, select.EPOLLIN)
            self._send(connection, [memoryview(zmtp.GREETING)])

    def _read(self, connection: Connection) -> list[list[memoryview]]:
        reader = connection.reader
        buffer = reader.buffer(self._scratch)
        try:
            n = connection.socket.recv_into(buffer)
            if not n:
                self._close(connection)
                return []
            whole = reader.received(buffer[:n])
        except BlockingIOError:
            return []
        except OSError:
            self._close(connection)
            return []
        except zmtp.ProtocolError as error:
            self._cut(connection, str(error))
            return []
        connection.heard_at = time.monotonic()
        if reader.replies:
            replies, reader.replies = reader.replies, []
            self._send(connection, [memoryview(reply) for reply in replies])
        return whole

    def look_after(self) -> None:
        """Cut connections that are silent or hold too much memory; called many times a second."""
        now = time.monotonic()
        if now - self._looked < 0.05:
            return
        self._looked = now
        pending = unsent = 0
        for connection in list(self._by_fd.values()):
            pending += connection.reader.pending_bytes
            unsent += connection.unsent_bytes
            if not self._reading:
                connection.heard_at = now  # requests are not read now, so no peer counts as silent
            elif now - connection.heard_at > SILENT_S:
                self._cut(connection, f"it has been silent for {SILENT_S:g} s")
            elif now - max(connection.heard_at, connection.pinged) > PING_S and connection.reader.established:
                connection.pinged = now
                self._send(connection, [memoryview(zmtp.command(b"PING", bytes(2)))])
        while pending > self._limits.max_queued_bytes:
            largest = max(self._by_fd.values(), key=lambda c: c.reader.pending_bytes)
            pending -= largest.reader.pending_bytes
            self._cut(largest, "incomplete messages hold more than max_queued_bytes")
        while unsent > self._limits.max_queued_bytes:
            largest = max(self._by_fd.values(), key=lambda c: c.unsent_bytes)
            unsent -= largest.unsent_bytes
            self._cut(largest, "unread replies hold more than max_queued_bytes")

    # --- out --------------------------------------------------------------------------------------------------------

    def send(self, peer: bytes, frames: list[Any]) -> None:
        """Send a message, now or once its peer reads; drops it if the peer is gone."""
        connection = self._by_peer.get(bytes(peer))
        if connection is not None:
            if connection.messages_unsent >= MAX_UNSENT:
                self._cut(connection, f"it has not read {MAX_UNSENT} replies")
            else:
                self._send(connection, zmtp.message(frames))

    def _send(self, connection: Connection, parts: list[memoryview]) -> None:
        if connection.unsent:
            connection.messages_unsent += 1
        connection.unsent.extend(parts)
        connection.unsent_bytes += sum(map(len, parts))
        if not connection.waits_to_send:
            self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        unsent = connection.unsent
        try:
            while unsent:
                n = connection.socket.sendmsg([unsent[i] for i in range(min(len(unsent), 64))])
                connection.unsent_bytes -= n
                while n:
                    if n < len(unsent[0]):
                        unsent[0] = unsent[0][n:]
                        break
                    n -= len(unsent.popleft())
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)
            return
        if not unsent:
            connection.messages_unsent = 0
        if connection.waits_to_send != bool(unsent):
            connection.waits_to_send = bool(unsent)
            self._poll_for(connection)

    # --- ends -------------------------------------------------------------------------------------------------------

    def _poll_for(self, connection: Connection) -> None:
        wanted = select.EPOLLIN if self._reading else 0
        self.pollable.modify(connection.socket, wanted | (select.EPOLLOUT if connection.waits_to_send else 0))

    def _cut(self, connection: Connection, why: str) -> None:
        with contextlib.suppress(OSError):
            log.warning("the connection of %s is cut: %s", connection.socket.getpeername(), why)
        self.cut += 1
        self._close(connection)

    def _close(self, connection: Connection) -> None:
        if self._by_peer.pop(connection.peer, None) is not None:
            del self._by_fd[connection.socket.fileno()]
            connection.socket.close()
            connection.unsent.clear()

    def close(self) -> None:
        """Send waiting replies for a short time, then close everything."""
        self._listener.close()
        self._reading = False
        end = time.monotonic() + LINGER_S
        for connection in self._by_fd.values():
            self._poll_for(connection)
        while any(c.unsent for c in self._by_fd.values()) and time.monotonic() < end:
            for fd, _ in self.pollable.poll(0.05, EVENTS):
                self._flush(self._by_fd[fd])
        for connection in list(self._by_fd.values()):
            self._close(connection)
        self.pollable.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        name = None if host == "*" else host.strip("[]")
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(256)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    listener.setblocking(False)
    return listener
