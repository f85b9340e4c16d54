"""`NativeServer`: what ``grpc.aio`` offers to a server's handlers, over the native front end."""

import asyncio
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import grpc
from grpc.aio import EOF  # pyrefly: ignore

from shoal import _core
from shoal.errors import ConfigError
from shoal.serving.security import ServerSecurity
from shoal.serving.server.front.calls import Context, Refused, unpacked
from shoal.serving.server.front.listening import open_sockets, remove_unix
from shoal.serving.server.models import generation

log = logging.getLogger(__name__)

BACKLOG = 1024
_CALL, _MESSAGE, _HALF_CLOSE, _END = range(4)


def why_not_native(security: ServerSecurity) -> str:
    """Why the native front end cannot serve here, "" if it can."""
    if not _core.front_available():
        return "the extension was built without nghttp2"
    if security.certificate is not None:
        import ssl  # noqa: F401  (the OpenSSL that Python has is the one to use)

        return _core.front_tls_missing()
    return ""


def chosen_front(wanted: str, security: ServerSecurity) -> str:
    """``native`` or ``python``, as asked for by those names or by ``auto``.

    ``auto`` is what the environment variable ``SHOAL_FRONT`` says, else native where it can be had.

    Raises:
        ConfigError: another name, or ``native`` where it cannot be had.
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
        raise ConfigError(f"front native cannot be used: {missing}; use auto or python")
    log.warning("the Python front end serves: %s", missing)
    return "python"


class NativeServer(grpc.aio.Server):
    """Takes calls natively and gives them to handlers on the event loop that it is started on.

    Args:
        security: what clients must show.
        max_message_bytes: larger requests are refused.
        threads: that speak HTTP/2; 0 = one per CPU that this process may use, at most 16.
        batches: paths of methods that may be answered in batches, as lanes say.
        max_waiting: requests of a lane that may wait.
        rates: counts the requests of callers; None: as many as they like.
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
        self._security, self._max_message_bytes, self._batches = security, max_message_bytes, frozenset(batches)
        self._handlers: dict[str, Any] = {}
        self._sockets: list[socket.socket] = []
        self._addresses: list[str] = []
        self._calls: dict[Any, tuple[Context, asyncio.Task[None]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = asyncio.Event()

    # --- grpc.aio.Server --------------------------------------------------------------------------------------------

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None:
        """Nothing: the same handlers come by :meth:`add_registered_method_handlers`, where their names are known."""

    def add_registered_method_handlers(self, service_name: str, method_handlers: dict[str, Any]) -> None:
        for name, handler in method_handlers.items():
            self._add(f"/{service_name}/{name}", handler)

    def _add(self, path: str, handler: Any) -> None:
        self._handlers[path] = handler
        streams = handler.request_streaming or handler.response_streaming
        self.front.add_method(path, streams, path in self._batches)

    def bind(self, address: str) -> int:
        """Binds a port, which is listened on from :meth:`start` on; returns it."""
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
        self._loop.add_reader(self.front.event_fd, self._take)
        self.front.start()

    async def stop(self, grace: float | None) -> None:
        """No further calls are taken; those that run get ``grace`` seconds."""
        loop = asyncio.get_running_loop()
        self.front.drain()
        end = loop.time() + (grace or 0)
        while self.front.calls and loop.time() < end:
            await asyncio.sleep(0.01)
        for each in self._sockets:
            each.close()
        if self._loop is not None:
            self._loop.remove_reader(self.front.event_fd)
        for _, task in list(self._calls.values()):
            task.cancel()
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

    # --- calls ------------------------------------------------------------------------------------------------------

    def reply(
        self, call: Any, data: bytes | None, last: bool, code: int, details: str, initial: Any, trailing: Any
    ) -> None:
        self.front.reply(call, data, last, code, details, initial, trailing)

    def _take(self) -> None:
        """Everything that has come since; whatever fails here fails one call."""
        for kind, call, data, compressed in self.front.take():
            try:
                self._take_one(kind, call, data, compressed)
            except Refused as refused:
                self.reply(call, None, True, refused.code, refused.details, [], [])
                self._cancel(call)
            except Exception as error:
                log.exception("a call of %s failed", call.path)
                self.reply(call, None, True, grpc.StatusCode.INTERNAL.value[0], f"{error!r}", [], [])
                self._cancel(call)

    def _take_one(self, kind: int, call: Any, data: bytes | None, compressed: bool) -> None:
        if kind == _END:
            self._cancel(call)
            return
        if data is not None and compressed:
            data = unpacked(data, call.encoding, self._max_message_bytes)
        if kind == _CALL:
            if call.ended:
                return
            context = Context(self, call, self._handlers[call.path])
            assert self._loop is not None
            task = self._loop.create_task(context.run(data))
            self._calls[call] = context, task
            task.add_done_callback(lambda _: self._calls.pop(call, None))
            return
        known = self._calls.get(call)
        if known is not None:
            context = known[0]
            context.put(context.read_message(data) if kind == _MESSAGE else EOF)

    def _cancel(self, call: Any) -> None:
        known = self._calls.pop(call, None)
        if known is not None:
            known[1].cancel()
