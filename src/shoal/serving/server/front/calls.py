"""Calls of the native front end that Python answers: they are taken from it, and their handlers run as tasks."""

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
_CALL, _MESSAGE, _HALF_CLOSE, _END = range(4)


class Refused(Exception):
    """A call that ends with a status before it reaches its handler."""

    def __init__(self, code: int, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


class Context:
    """The ``grpc.aio`` context of a call, as handlers use it."""

    def __init__(self, front: Any, call: Any, handler: Any) -> None:
        self._front, self._call, self._handler = front, call, handler
        self._code: Any = None
        self._details = ""
        self._initial: list[tuple[str, str]] = []
        self._trailing: list[tuple[str, str]] = []
        self._metadata: tuple[tuple[str, str | bytes], ...] | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._done = False

    # --- read by handlers -------------------------------------------------------------------------------------------

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
        """Whether the access log includes this call."""
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

    # --- set by handlers --------------------------------------------------------------------------------------------

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
        """The next message of a stream; ``EOF`` after the last one."""
        return await self._messages.get()

    # --- of the server ----------------------------------------------------------------------------------------------

    def put(self, message: Any) -> None:
        """Add a message of the stream, or ``EOF``."""
        self._messages.put_nowait(message)

    async def requests(self) -> AsyncIterator[Any]:
        while (message := await self._messages.get()) is not EOF:
            yield message

    async def run(self, data: bytes | None) -> None:
        """Run the handler and send its answer; ``data`` is the message of a unary call."""
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
                raise Refused(Code.INTERNAL, "a call to this method must have one message, got none")
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
        # UTF-8 is sent percent-encoded; the native side takes text
        self._front.reply(self._call, data, last, code, details, self._initial, self._trailing if last else [])
        self._initial = []


class Calls:
    """Takes calls from the native front end and runs their handlers on the event loop."""

    def __init__(self, front: Any, max_message_bytes: int) -> None:
        self._front, self._max_message_bytes = front, max_message_bytes
        self.handlers: dict[str, Any] = {}
        """Path of a method -> its handler."""
        self._running: dict[Any, tuple[Context, asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        """The number of calls whose handlers are running."""
        return len(self._running)

    def take(self) -> None:
        """Take all calls that have arrived; an error here fails only one call."""
        for kind, call, data, compressed in self._front.take():
            try:
                self._take_one(kind, call, data, compressed)
            except Refused as refused:
                self._front.reply(call, None, True, refused.code, refused.details, [], [])
                self._cancel(call)
            except Exception as error:
                log.exception("a call to %s failed", call.path)
                self._front.reply(call, None, True, Code.INTERNAL, f"{error!r}", [], [])
                self._cancel(call)

    def cancel_all(self) -> None:
        for _, task in list(self._running.values()):
            task.cancel()

    def _take_one(self, kind: int, call: Any, data: bytes | None, compressed: bool) -> None:
        if kind == _END:
            self._cancel(call)
            return
        if data is not None and compressed:
            data = _decompress(data, call.encoding, self._max_message_bytes)
        if kind == _CALL:
            if call.ended:
                return
            context = Context(self._front, call, self.handlers[call.path])
            task = asyncio.get_running_loop().create_task(context.run(data))
            self._running[call] = context, task
            task.add_done_callback(lambda _: self._running.pop(call, None))
            return
        known = self._running.get(call)
        if known is not None:
            context = known[0]
            context.put(context.read_message(data) if kind == _MESSAGE else EOF)

    def _cancel(self, call: Any) -> None:
        known = self._running.pop(call, None)
        if known is not None:
            known[1].cancel()


def _decompress(data: bytes, encoding: str, limit: int) -> bytes:
    """Decompress a message to at most ``limit`` bytes."""
    if encoding not in ("gzip", "deflate"):
        raise Refused(Code.UNIMPLEMENTED, f"messages must be compressed with gzip or deflate, got {encoding!r}")
    unpacker = zlib.decompressobj(wbits=47)
    try:
        made = unpacker.decompress(data, limit)
    except zlib.error as error:
        raise Refused(Code.INTERNAL, f"the message is not valid {encoding}: {error}") from None
    if len(made) < limit and not unpacker.eof:
        raise Refused(Code.INTERNAL, f"the message is not valid {encoding}: it is cut off")
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise Refused(Code.RESOURCE_EXHAUSTED, f"a message must have at most {limit} bytes when decompressed")
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
