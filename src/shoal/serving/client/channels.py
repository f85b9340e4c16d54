"""gRPC channels by address, shared by the clients in this package."""

import threading
from collections.abc import Collection
from typing import Any

from shoal.serving.security import ClientSecurity, open_channel


class Channels:
    """One channel per address, opened at the first call. Any thread may call any method.

    Args:
        security: the credentials that channels present; None = the process's setting when a channel is opened.
    """

    def __init__(self, security: ClientSecurity | None = None) -> None:
        self._security = security
        self._lock = threading.Lock()
        self._open: dict[str, tuple[Any, dict[str, Any]]] = {}

    def call(self, address: str, method: str) -> Any:
        """The method of the server at ``address``, from bytes to bytes: gRPC's ``UnaryUnaryMultiCallable``."""
        with self._lock:
            if address not in self._open:
                self._open[address] = (open_channel(address, security=self._security), {})
            channel, methods = self._open[address]
            if method not in methods:
                methods[method] = channel.unary_unary(method)
            return methods[method]

    def keep(self, addresses: Collection[str]) -> None:
        """Close the channels to all other addresses; their calls in progress end as cancelled."""
        with self._lock:
            gone = [self._open.pop(address) for address in list(self._open) if address not in addresses]
        for channel, _ in gone:
            channel.close()

    def close(self) -> None:
        self.keep(())
