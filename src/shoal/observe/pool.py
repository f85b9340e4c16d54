"""Serves HTTP connections with a fixed number of threads: idle connections wait in a selector, not in a thread."""

import contextlib
import logging
import queue
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

log = logging.getLogger(__name__)

THREADS = 32
MAX_CONNECTIONS = 8192
IDLE_SECS = 30.0
"""How long a connection may be idle, and how long a request may take to arrive."""
LINGER_SECS = 10.0
"""How long a client whose request was refused may keep sending it."""
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class PooledHandler(BaseHTTPRequestHandler):
    """A handler that answers requests when its connection has one, and then releases its thread."""

    timeout = IDLE_SECS
    refused = False
    """Whether the request was answered before it was read; the connection closes after the client has finished."""
    reading_since: float | None = None
    """When the request began to arrive, in monotonic seconds; None once it has been read."""

    def __init__(self, connection: Any, client_address: Any) -> None:
        self.request, self.client_address, self.server = connection, client_address, None  # pyrefly: ignore
        self.setup()

    def serve(self) -> bool:
        """Answer the requests that have arrived; returns whether more may come."""
        while True:
            self.reading_since = time.monotonic()
            self.close_connection = True
            self.handle_one_request()
            self.reading_since = None
            if self.close_connection:
                return False
            if not self._has_more():
                return True

    def _has_more(self) -> bool:
        """Whether part of the next request is already in our buffer, where the selector does not see it."""
        self.connection.settimeout(0)
        try:
            return bool(self.rfile.peek(1))  # pyrefly: ignore
        except OSError:  # how TLS reports that there is no data
            return False
        finally:
            self.connection.settimeout(self.timeout)


@dataclass(eq=False, slots=True)
class _Connection:
    socket: Any
    address: Any
    handler: PooledHandler | None = None
    draining: bool = False
    until: float = field(default_factory=lambda: time.monotonic() + IDLE_SECS)
    """When it is closed if nothing arrives, in monotonic seconds."""


class PooledHttpServer:
    """Accepts connections and answers their requests on at most ``threads`` threads.

    Further requests wait. A connection beyond ``max_connections`` replaces the one that has been idle longest; if none
    is idle, it is answered with 503.

    Args:
        address: (host, port); port 0 picks a free one.
        handler: creates a ``PooledHandler`` from a connection and the client's address.
        context: the TLS context.
    """

    def __init__(
        self,
        address: tuple[str, int],
        handler: Callable[[Any, Any], PooledHandler],
        context: ssl.SSLContext | None = None,
        threads: int = THREADS,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._handler, self._context, self._max = handler, context, max_connections
        self._pool = ThreadPoolExecutor(threads, "shoal-rest")
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[_Connection, None] = {}  # connections in the selector, longest idle first
        self._busy: set[_Connection] = set()
        self._returned: queue.SimpleQueue[tuple[_Connection, bool]] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._closed = False  # busy threads close their connections themselves

    def serve_forever(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        while not self._stop.is_set():
            ready = self._selector.select(1.0)
            self._take_back()  # before a new connection looks for an idle one
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                elif key.data in self._waiting:
                    self._readable(key.data)
            self._close_late()

    def _take_back(self) -> None:
        while not self._returned.empty():
            connection, stays = self._returned.get()
            self._busy.discard(connection)
            if stays:
                self._await(connection)
            else:
                self._close(connection)

    def stop(self) -> None:
        """End :meth:`serve_forever`; requests that were read are answered, and connections are closed."""
        self._stop.set()
        self._notify()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._take_back()
        for connection in list(self._waiting):
            self._close(connection)
        for connection in list(self._busy):
            if connection.handler is None or connection.handler.reading_since is not None:
                _shut(connection.socket)
        self._pool.shutdown(wait=False)
        for each in (self._selector, self._listener, self._wake, self._woken):
            each.close()

    def _accept(self) -> None:
        try:
            accepted, address = self._listener.accept()
        except OSError:  # the client has gone, or there are no descriptors left
            time.sleep(0.01)
            return
        if len(self._waiting) + len(self._busy) >= self._max:
            if not self._waiting:
                log.warning("all %d connections are busy; refusing a connection from %s", self._max, address)
                with contextlib.suppress(OSError), accepted:
                    accepted.setblocking(False)
                    if self._context is None:
                        accepted.send(_FULL)
                return
            self._close(next(iter(self._waiting)))
        self._await(_Connection(accepted, address))

    def _await(self, connection: _Connection) -> None:
        """Wait for the next request on a connection, without a thread."""
        connection.until = time.monotonic() + (LINGER_SECS if connection.draining else IDLE_SECS)
        try:
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        except (OSError, ValueError):
            self._close(connection)
        else:
            self._waiting[connection] = None

    def _readable(self, connection: _Connection) -> None:
        if connection.draining:
            self._drain(connection)
            return
        self._selector.unregister(connection.socket)
        del self._waiting[connection]
        self._busy.add(connection)
        self._pool.submit(self._serve, connection)

    def _drain(self, connection: _Connection) -> None:
        """Discard what a refused client still sends; closing before it has finished would lose the answer."""
        try:
            connection.socket.settimeout(0)
            if connection.socket.recv(65536):
                return
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError:
            pass
        self._close(connection)

    def _serve(self, connection: _Connection) -> None:
        """Serve a connection on a pool thread."""
        stays = False
        try:
            if connection.handler is None:
                if self._context is not None and not isinstance(connection.socket, ssl.SSLSocket):
                    connection.socket = self._context.wrap_socket(
                        connection.socket, server_side=True, do_handshake_on_connect=False
                    )
                connection.handler = self._handler(connection.socket, connection.address)
            stays = connection.handler.serve()
            if stays:  # an idle connection has no buffers
                connection.handler.finish()
                connection.handler = None
                return
            if connection.handler.refused:
                connection.socket.shutdown(socket.SHUT_WR)
                connection.draining = stays = True
        except Exception:
            log.debug("a connection from %s failed", connection.address, exc_info=True)
        finally:
            with self._lock:
                if self._closed:
                    self._close(connection)
                else:
                    self._returned.put((connection, stays))
                    self._notify()

    def _notify(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def _close_late(self) -> None:
        now = time.monotonic()
        for connection in [each for each in self._waiting if each.until < now]:
            self._close(connection)
        for connection in self._busy:
            begun = connection.handler.reading_since if connection.handler is not None else None
            if begun is not None and now - begun > IDLE_SECS:
                _shut(connection.socket)  # readers see the end of the stream

    def _close(self, connection: _Connection) -> None:
        if connection in self._waiting:
            del self._waiting[connection]
            with contextlib.suppress(OSError, ValueError, KeyError):
                self._selector.unregister(connection.socket)
        with contextlib.suppress(OSError):
            if connection.handler is not None:
                connection.handler.finish()
        with contextlib.suppress(OSError):
            connection.socket.close()


def _shut(connection: Any) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
