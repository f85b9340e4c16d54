"""The error that carries a gRPC status, and the codes that serving uses."""

import functools
from enum import IntEnum
from typing import Any

from shoal.errors import ShoalError

MAX_DETAILS = 2000  # characters of an error; gRPC sends them as a header, which is bounded


class Code(IntEnum):
    """gRPC status codes."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class StatusError(ShoalError):
    """A call that ended with a status other than OK. With code 3 or 6 it is also a ``ValueError``.

    Attributes:
        code: the gRPC code, an int.
        message: a description of the failure.
        metadata: the values that would have been accepted, in machine-readable form; a server sends them as trailing
            metadata.
    """

    code: int
    message: str
    metadata: tuple[tuple[str, str], ...] = ()

    def __new__(cls, code: int, message: str = "") -> "StatusError":
        if cls is StatusError and int(code) in (Code.INVALID_ARGUMENT, Code.ALREADY_EXISTS):
            cls = _StatusValueError
        return super().__new__(cls, code, message)  # pyrefly: ignore

    def __init__(self, code: int, message: str = "") -> None:
        super().__init__(code, message)
        self.code = int(code)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple:  # pickled by the public name: codes 3 and 6 use another class
        return StatusError, (self.code, self.message)


class _StatusValueError(StatusError, ValueError):
    pass


_StatusValueError.__name__ = _StatusValueError.__qualname__ = "StatusError"


def invalid_argument(message: str) -> StatusError:
    return StatusError(Code.INVALID_ARGUMENT, message)


def not_found(message: str) -> StatusError:
    return StatusError(Code.NOT_FOUND, message)


def unavailable(message: str) -> StatusError:
    return StatusError(Code.UNAVAILABLE, message)


def from_rpc_error(error: Any) -> StatusError:
    """Convert a ``grpc.RpcError`` to a :class:`StatusError`."""
    code = error.code() if hasattr(error, "code") else None
    number = code.value[0] if code is not None else int(Code.UNKNOWN)
    text = error.details() if hasattr(error, "details") else str(error)
    status = StatusError(number, text or (code.name if code is not None else "RPC failed"))
    if hasattr(error, "trailing_metadata"):
        status.metadata = tuple((key, value) for key, value in error.trailing_metadata() or ())
    return status


@functools.cache
def grpc_codes() -> dict[int, Any]:
    """code -> ``grpc.StatusCode``. It imports gRPC, which the rest of this module does without."""
    import grpc

    return {code.value[0]: code for code in grpc.StatusCode}


async def abort(context: Any, error: StatusError) -> Any:
    """End a call of a ``grpc.aio`` server with an error."""
    text = error.message
    if len(text) > MAX_DETAILS:
        text = f"{text[:MAX_DETAILS]} … ({len(text)} characters)"
    if error.metadata:
        context.set_trailing_metadata(error.metadata)
    await context.abort(grpc_codes()[error.code], text)
