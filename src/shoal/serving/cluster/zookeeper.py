"""`KazooRegistry`: a registry in ZooKeeper, through kazoo or a client with the same methods.

Also exports kazoo's exceptions and constants, or equivalents if it is not installed.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from shoal.errors import DeadlineError

try:
    from kazoo.exceptions import (
        BadVersionError,
        ConnectionClosedError,
        KazooException,
        NodeExistsError,
        NoNodeError,
        NotEmptyError,
    )
    from kazoo.handlers.threading import KazooTimeoutError
    from kazoo.protocol.states import EventType, KazooState, WatchedEvent
except ImportError:

    class KazooException(Exception):  # type: ignore[no-redef]
        """Base of the registry's errors."""

    class NoNodeError(KazooException):  # type: ignore[no-redef]
        """The node does not exist."""

    class NodeExistsError(KazooException):  # type: ignore[no-redef]
        """The node exists already."""

    class BadVersionError(KazooException):  # type: ignore[no-redef]
        """The node was changed meanwhile."""

    class NotEmptyError(KazooException):  # type: ignore[no-redef]
        """The node has children."""

    class ConnectionClosedError(KazooException):  # type: ignore[no-redef]
        """The client is not started."""

    class KazooTimeoutError(Exception):  # type: ignore[no-redef]
        """No server answered."""

    class KazooState:  # type: ignore[no-redef]
        SUSPENDED = "SUSPENDED"
        CONNECTED = "CONNECTED"
        LOST = "LOST"

    class EventType:  # type: ignore[no-redef]
        CREATED = "CREATED"
        DELETED = "DELETED"
        CHANGED = "CHANGED"
        CHILD = "CHILD"
        NONE = "NONE"

    class WatchedEvent(NamedTuple):  # type: ignore[no-redef]
        type: str
        state: str
        path: str


class KazooRegistry:
    """A :class:`~shoal.serving.cluster.registry.Registry` over a kazoo client, or one with the same methods."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._own: set[str] = set()  # ephemeral nodes of this session
        client.add_listener(self._on_state)

    def _on_state(self, state: str) -> None:
        if state == KazooState.LOST:
            self._own.clear()

    def start(self) -> None:
        try:
            self.client.start()
        except KazooTimeoutError:
            hosts = ",".join(f"{host}:{port}" for host, port in self.client.hosts)
            raise DeadlineError(f"no ZooKeeper server answered at {hosts}; is it running? Or pass dir:PATH") from None

    def stop(self) -> None:
        self.client.stop()
        self.client.close()

    def restart(self) -> None:
        self.client.restart()

    def listen(self, func: Callable[[str], Any]) -> Callable[[], None]:
        self.client.add_listener(func)
        return lambda: self.client.remove_listener(func)

    def get(self, path: str) -> bytes | None:
        try:
            return self.client.get(path)[0]
        except NoNodeError:
            return None

    def put(self, path: str, value: bytes, *, ephemeral: bool = False, numbered: bool = False) -> str:
        if numbered:
            path = self.client.create(path, value, ephemeral=ephemeral, makepath=True, sequence=True)
        else:
            self.client.retry(self._put, path, value, ephemeral)
        if ephemeral:
            self._own.add(path)
        return path

    def _put(self, path: str, value: bytes, ephemeral: bool) -> None:
        if not ephemeral or path in self._own:
            with contextlib.suppress(NoNodeError):
                self.client.set(path, value)
                return
        try:
            self.client.create(path, value, ephemeral=ephemeral, makepath=True)
        except NodeExistsError:
            if not ephemeral:
                self.client.set(path, value)
                return
            with contextlib.suppress(NoNodeError):  # a node of an earlier session, which would be removed with it
                self.client.delete(path)
            self.client.create(path, value, ephemeral=True, makepath=True)

    def swap(self, path: str, before: bytes | None, after: bytes) -> bool:
        try:
            if before is None:
                self.client.create(path, after, makepath=True)
                return True
            value, stat = self.client.get(path)
            if value != before:
                return False
            self.client.set(path, after, version=stat.version)
        except (NodeExistsError, NoNodeError, BadVersionError):
            return False
        return True

    def delete(self, path: str) -> None:
        with contextlib.suppress(NoNodeError):
            self.client.retry(self.client.delete, path)
        self._own.discard(path)

    def children(self, path: str) -> list[str]:
        try:
            return list(self.client.get_children(path))
        except NoNodeError:
            return []

    def watch(self, path: str, func: Callable[[bytes | None, str | None], Any]) -> None:
        def changed(data: bytes | None, stat: Any, event: Any = None) -> Any:
            return func(data, event.type if event is not None else None)

        self.client.DataWatch(path, changed)

    def watch_children(self, path: str, func: Callable[[list[str]], Any], *, ensure: bool = False) -> None:
        if ensure:
            self.client.ensure_path(path)
        self.client.ChildrenWatch(path, func)
