"""`NativeServer`: the interface of a ``grpc.aio`` server over the native front end."""

import asyncio
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import grpc

from shoal import _core
from shoal.errors import ConfigError
from shoal.serving.security import ServerSecurity
from shoal.serving.server.front.calls import Calls
from shoal.serving.server.front.listening import open_sockets, remove_unix
from shoal.serving.server.models import generation

log = logging.getLogger(__name__)

BACKLOG = 1024


def why_not_native(security: ServerSecurity) -> str:
    """Why the native front end is unavailable here; "" if it is available."""
    if not _core.front_available():
        return "the extension was built without nghttp2"
    if security.certificate is not None:
        import ssl  # noqa: F401  (loads Python's OpenSSL, which must be the one used)

        return _core.front_tls_missing()
    return ""


def chosen_front(wanted: str, security: ServerSecurity) -> str:
    """Resolve ``native``, ``python`` or ``auto`` to ``native`` or ``python``.

    ``auto`` uses the environment variable ``SHOAL_FRONT``, else native if it is available.

    Raises:
        ConfigError: an unknown name, or ``native`` where it is unavailable.
    """
    wanted = os.environ.get("SHOAL_FRONT", wanted) if wanted == "auto" else wanted
    if wanted not in ("auto", "native", "python"):
        raise ConfigError(f"front must be auto, native or python, got {wanted!r}")
    if wanted == "python":
        return wanted
    missing = why_not_native(security)
    if not missing:
        return "native"
    if wanted == "native":
        raise ConfigError(f"front must be auto or python here, got native: {missing}")
    log.warning("using the Python front end: %s", missing)
    return "python"


class NativeServer(grpc.aio.Server):
    """Receives calls natively and passes them to handlers on the event loop that it is started on.

    Args:
        security: the credentials that clients must present.
        max_message_bytes: larger requests are refused.
        threads: the number of HTTP/2 threads; 0 = one per CPU that this process may use, at most 16.
        batches: paths of methods that lanes may answer in batches.
        max_waiting: maximum waiting requests per lane.
        rates: counts the requests of callers; None: no limit.
    """

    def __init__(
        self,
        security: ServerSecurity,
        max_message_bytes: int,
        threads: int = 0,
        batches: Sequence[str] = (),
        max_waiting: int = 1024,
        rates: Any = None,
    ) -> None:
        tokens = [f"Bearer {token}" for token in security.tokens.values()]
        files = [
            str(path) if path is not None else "" for path in (security.certificate, security.key, security.client_ca)
        ]
        threads = threads or max(1, min(16, len(os.sched_getaffinity(0))))
        self.front = _core.Front(
            threads, max_message_bytes, max_waiting, *files, security.authenticates, tokens, list(security.tokens),
            rates, generation,
        )  # fmt: skip
        self._calls = Calls(self.front, max_message_bytes)
        self._batches = frozenset(batches)
        self._sockets: list[socket.socket] = []
        self._addresses: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = asyncio.Event()

    # --- grpc.aio.Server --------------------------------------------------------------------------------------------

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None:
        """Does nothing: :meth:`add_registered_method_handlers` receives the same handlers with their names."""

    def add_registered_method_handlers(self, service_name: str, method_handlers: dict[str, Any]) -> None:
        for name, handler in method_handlers.items():
            self._add(f"/{service_name}/{name}", handler)

    def _add(self, path: str, handler: Any) -> None:
        self._calls.handlers[path] = handler
        streams = handler.request_streaming or handler.response_streaming
        self.front.add_method(path, streams, path in self._batches)

    def bind(self, address: str) -> int:
        """Bind a port and return it; :meth:`start` begins to listen."""
        opened, port = open_sockets(address)
        self._sockets += opened
        self._addresses.append(address)
        return port

    def add_insecure_port(self, address: str) -> int:
        return self.bind(address)

    def add_secure_port(self, address: str, server_credentials: Any) -> int:
        return self.bind(address)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        for each in self._sockets:
            each.listen(BACKLOG)
            self.front.listen(each.detach())
        self._sockets = []
        self._loop.add_reader(self.front.event_fd, self._calls.take)
        self.front.start()

    async def stop(self, grace: float | None) -> None:
        """Refuse new calls and give running ones ``grace`` seconds."""
        loop = asyncio.get_running_loop()
        self.front.drain()
        end = loop.time() + (grace or 0)
        while self.front.calls and loop.time() < end:
            await asyncio.sleep(0.01)
        for each in self._sockets:
            each.close()
        if self._loop is not None:
            self._loop.remove_reader(self.front.event_fd)
        self._calls.cancel_all()
        await loop.run_in_executor(None, self.front.close)
        for address in self._addresses:
            remove_unix(address)
        self._closed.set()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        try:
            await asyncio.wait_for(self._closed.wait(), timeout)
        except TimeoutError:
            return True
        return False
