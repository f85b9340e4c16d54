"""Calls through the native client, with gRPC's interface: concurrent calls at a tenth of gRPC's cost.

Used for connections without TLS if the extension was built with nghttp2; otherwise gRPC's own channels are used.
"""

import os
import threading
from collections.abc import Collection, Sequence
from typing import Any

import grpc

from shoal import _core
from shoal.serving.security import MAX_MESSAGE_BYTES, ClientSecurity
from shoal.serving.status import grpc_codes

Metadata = Sequence[tuple[str, str]]


def can_call(security: ClientSecurity | None) -> bool:
    """Whether calls with these credentials can be made natively."""
    return _core.front_available() and (security is None or not security.encrypts)


class NativeError(grpc.RpcError):
    """A failed call, with the methods of gRPC's errors."""

    def __init__(self, call: Any) -> None:
        super().__init__(call.details)
        self._code, self._details, self._metadata = grpc_codes().get(call.status), call.details, call.metadata

    def code(self) -> grpc.StatusCode:
        return self._code or grpc.StatusCode.UNKNOWN

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[Any, ...]:
        return tuple(self._metadata)


class NativeCall:
    """A call in progress."""

    def __init__(self, caller: Any, call: Any) -> None:
        self._caller, self._call = caller, call

    def result(self) -> bytes:
        """Wait for the answer, at most until the call's deadline; raises `NativeError`."""
        self._call.wait()
        if self._call.status:
            raise NativeError(self._call)
        return self._call.message

    def cancel(self) -> None:
        self._caller.cancel(self._call)


class NativeMethod:
    """A method of a server, from bytes to bytes."""

    def __init__(self, caller: Any, address: str, method: str, metadata: Metadata) -> None:
        self._caller, self._address, self._method, self._metadata = caller, address, method, list(metadata)

    def future(self, payload: bytes, timeout: float, metadata: Metadata | None = None) -> NativeCall:
        given = [*self._metadata, *(metadata or ())]
        return NativeCall(self._caller, self._caller.start(self._address, self._method, payload, given, timeout))

    def __call__(self, payload: bytes, timeout: float, metadata: Metadata | None = None) -> bytes:
        return self.future(payload, timeout, metadata).result()


class NativeChannels:
    """The interface of `Channels` over one native client per process."""

    def __init__(self, security: ClientSecurity | None) -> None:
        self._security = security
        token = security.token if security is not None else ""
        self.metadata = [("authorization", f"Bearer {token}")] if token else []
        """Metadata that every call sends."""
        self._lock = threading.Lock()
        self._caller: Any = None
        self._process = 0

    def call(self, address: str, method: str) -> NativeMethod:
        if self._security is not None:
            self._security.check_token(address)
        return NativeMethod(self.core, address, method, self.metadata)

    def keep(self, addresses: Collection[str]) -> None:
        """Close the connections to all other addresses; their calls in progress end as cancelled."""
        self.core.keep(list(addresses))

    def close(self) -> None:
        self.keep(())

    @property
    def core(self) -> Any:
        """The native client of this process."""
        with self._lock:
            if self._process != os.getpid():  # a forked child needs its own client
                self._caller, self._process = _core.Caller(MAX_MESSAGE_BYTES), os.getpid()
            return self._caller
