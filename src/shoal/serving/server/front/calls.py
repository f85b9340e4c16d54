"""Calls that Python answers behind the native front end: the context of gRPC's handlers, and how handlers are run."""

import asyncio
import base64
import inspect
import logging
import zlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
from grpc.aio import EOF  # pyrefly: ignore

from shoal.serving.status import Code

log = logging.getLogger(__name__)

Metadata = Iterable[tuple[str, str | bytes]]


class Refused(Exception):
    """A call that ends with a status before its handler has seen it."""

    def __init__(self, code: int, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


class Context:
    """What a handler of ``grpc.aio`` may ask of its call, and tell it."""

    def __init__(self, server: Any, call: Any, handler: Any) -> None:
        self._server, self._call, self._handler = server, call, handler
        self._code: Any = None
        self._details = ""
        self._initial: list[tuple[str, str]] = []
        self._trailing: list[tuple[str, str]] = []
        self._metadata: tuple[tuple[str, str | bytes], ...] | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._done = False

    # --- what is asked ----------------------------------------------------------------------------------------------

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        if self._metadata is None:
            self._metadata = tuple((key, _decoded(key, value)) for key, value in self._call.metadata)
        return self._metadata

    def time_remaining(self) -> float | None:
        return max(0.0, self._call.seconds_left) if self._call.has_deadline else None

    def auth_context(self) -> dict[str, list[bytes]]:
        name = self._call.common_name
        return {"x509_common_name": [name.encode("latin-1")]} if name else {}

    def peer(self) -> str:
        return self._call.peer

    @property
    def sampled(self) -> bool:
        """Whether it is one for the access log."""
        return self._call.sampled

    def cancelled(self) -> bool:
        return self._call.ended and not self._done

    def done(self) -> bool:
        return self._done or self._call.ended

    def code(self) -> Any:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> list[tuple[str, str]]:
        return self._trailing

    # --- what is told -----------------------------------------------------------------------------------------------

    def set_code(self, code: Any) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self._trailing = [(key, _encoded(key, value)) for key, value in metadata]

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        self._initial = [(key, _encoded(key, value)) for key, value in metadata]

    async def abort(self, code: Any, details: str = "", trailing_metadata: Metadata = ()) -> None:
        self._code, self._details = code, details
        if trailing_metadata:
            self.set_trailing_metadata(trailing_metadata)
        raise grpc.aio.AbortError

    async def write(self, message: Any) -> None:
        self._reply(self._serialised(message), last=False)

    async def read(self) -> Any:
        """The next message of a stream, ``EOF`` behind its last."""
        return await self._messages.get()

    # --- of the server ----------------------------------------------------------------------------------------------

    def put(self, message: Any) -> None:
        """A message of the stream, or ``EOF``."""
        self._messages.put_nowait(message)

    async def requests(self) -> AsyncIterator[Any]:
        while (message := await self._messages.get()) is not EOF:
            yield message

    async def run(self, data: bytes | None) -> None:
        """Runs the handler and sends what it gives; ``data`` is the message of a unary call."""
        handler = self._handler
        try:
            if handler.response_streaming:
                await self._run_stream()
                self._end(None)
            else:
                work = handler.stream_unary if handler.request_streaming else handler.unary_unary
                given = self.requests() if handler.request_streaming else self.read_message(data)
                response = work(given, self)
                if inspect.isawaitable(response):
                    response = await response
                self._end(self._serialised(response))
        except asyncio.CancelledError:
            raise
        except grpc.aio.AbortError:
            self._end(None, Code.UNKNOWN)
        except Refused as refused:
            self._code, self._details = refused.code, refused.details
            self._end(None)
        except Exception as error:
            if self._code is None:
                log.exception("%s failed", self._call.path)
                self._details = f"Unexpected {type(error)}: {error}"
            self._end(None, Code.UNKNOWN)
        finally:
            self._done = True
            for callback in self._callbacks:
                callback(self)

    async def _run_stream(self) -> None:
        handler = self._handler
        if handler.request_streaming:
            given, work = self.requests(), handler.stream_stream
        else:
            given, work = await self.read(), handler.unary_stream
            if given is EOF:
                raise Refused(Code.INTERNAL, "a call of this method must have one message, got none")
        result = work(given, self)
        if inspect.isasyncgen(result):
            async for message in result:
                self._reply(self._serialised(message), last=False)
        else:
            await result

    def read_message(self, data: bytes | None) -> Any:
        read = self._handler.request_deserializer
        try:
            return read(data) if read is not None else data
        except Exception as error:
            raise Refused(Code.INTERNAL, f"the request could not be read: {error}") from None

    def _serialised(self, message: Any) -> bytes:
        write = self._handler.response_serializer
        return write(message) if write is not None else message

    def _end(self, data: bytes | None, default: int = Code.OK) -> None:
        code = default if self._code is None else self._code
        number = code.value[0] if isinstance(code, grpc.StatusCode) else int(code)
        self._reply(data if not number else None, True, number)

    def _reply(self, data: bytes | None, last: bool, code: int = 0) -> None:
        details = self._details if last else ""
        # UTF-8 travels percent-encoded; the native side takes text
        self._server.reply(self._call, data, last, code, details, self._initial, self._trailing if last else [])
        self._initial = []


def unpacked(data: bytes, encoding: str, limit: int) -> bytes:
    """A compressed message, at most ``limit`` bytes of it."""
    if encoding not in ("gzip", "deflate"):
        raise Refused(Code.UNIMPLEMENTED, f"messages must be compressed by gzip or deflate, got {encoding!r}")
    unpacker = zlib.decompressobj(wbits=47)
    try:
        made = unpacker.decompress(data, limit)
    except zlib.error as error:
        raise Refused(Code.INTERNAL, f"the message is not {encoding}: {error}") from None
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise Refused(Code.RESOURCE_EXHAUSTED, f"a message must have at most {limit} bytes when it is unpacked")
    return made


def _decoded(key: str, value: str) -> str | bytes:
    if not key.endswith("-bin"):
        return value
    try:
        return base64.b64decode(value + "=" * (-len(value) % 4))
    except ValueError:
        return b""


def _encoded(key: str, value: str | bytes) -> str:
    if key.endswith("-bin"):
        return base64.b64encode(value if isinstance(value, bytes) else value.encode()).decode().rstrip("=")
    return value.decode("latin-1") if isinstance(value, bytes) else value
