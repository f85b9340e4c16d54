"""The words of a ZooKeeper client: kazoo's own where it is installed, equal ones where it is not."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

try:
    from kazoo.exceptions import (
        ConnectionClosedError,
        KazooException,
        NodeExistsError,
        NoNodeError,
        NotEmptyError,
        SessionExpiredError,
    )
    from kazoo.protocol.states import EventType, KazooState, WatchedEvent
except ImportError:

    class KazooException(Exception):  # type: ignore[no-redef]
        """Base of the registry's errors."""

    class NoNodeError(KazooException):  # type: ignore[no-redef]
        """The node does not exist."""

    class NodeExistsError(KazooException):  # type: ignore[no-redef]
        """The node exists already."""

    class NotEmptyError(KazooException):  # type: ignore[no-redef]
        """The node has children."""

    class ConnectionClosedError(KazooException):  # type: ignore[no-redef]
        """The client is not started."""

    class SessionExpiredError(KazooException):  # type: ignore[no-redef]
        """The session is over."""

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


RECONNECT_SECS = 2.0
"""The longest pause between attempts to reach a registry that is away."""


class NodeStat(NamedTuple):
    """What our own registries tell of a node."""

    version: int = 0
    ephemeralOwner: int = 0
    numChildren: int = 0
    dataLength: int = 0


def takes_event(func: Callable, plain: int) -> bool:
    """Whether a watch function wants the event after its ``plain`` arguments."""
    try:
        inspect.signature(func).bind(*range(plain + 1))
    except (TypeError, ValueError):
        return False
    return True


def parent_of(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def normal(path: str) -> str:
    """An absolute path without a slash at its end."""
    if not path.startswith("/"):
        path = "/" + path
    parts = [part for part in path.split("/") if part]
    if any(part in (".", "..") for part in parts):
        raise ValueError(f"registry path {path!r} must not contain '.' or '..'")
    return "/" + "/".join(parts)


class Watching:
    """A watch in the style of kazoo: built with a function, or used as a decorator.

    ``register(path, func)`` does the work; the function's answer False ends the watch.
    """

    def __init__(self, register: Callable[[str, Callable], None], path: str, func: Callable | None = None) -> None:
        self._register, self._path = register, path
        if func is not None:
            register(path, func)

    def __call__(self, func: Callable) -> Callable:
        self._register(self._path, func)
        return func


def make_zk_client(servers: str | None, hosts_default: str = "127.0.0.1:2181") -> Any:
    """A client for a registry: ``dir:/path`` is a directory of files, anything else a ZooKeeper ``host:port,…`` list.

    ``ZK_AUTH=user:password`` in the environment becomes digest authentication; it is never logged.
    """
    import os

    if servers and servers.startswith("dir:"):
        from shoal.serving.cluster.directory import DirectoryClient

        return DirectoryClient(servers[len("dir:") :])
    from shoal.errors import missing_extra

    try:
        from kazoo.client import KazooClient
    except ImportError:
        raise missing_extra("kazoo", "zookeeper") from None
    auth = os.environ.get("ZK_AUTH")
    # kazoo's own pause between attempts doubles up to an hour: a server that was away would not be noticed for long.
    again = {"max_tries": -1, "delay": 0.1, "backoff": 2, "max_delay": RECONNECT_SECS}
    return KazooClient(
        hosts=servers or hosts_default, auth_data=[("digest", auth)] if auth else None, connection_retry=again
    )


def call_watch(func: Callable, args: tuple, event: Any) -> bool:
    """Calls a watch function with the event if it takes one; returns whether the watch goes on."""
    if takes_event(func, len(args)):
        return func(*args, event) is not False
    return func(*args) is not False


class StateListeners:
    """What our own clients share with kazoo's: listeners of the connection's state, and calls that need no retry."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[str], Any]] = []

    def add_listener(self, listener: Callable[[str], Any]) -> None:
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[str], Any]) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    def retry(self, func: Callable, *args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def _tell(self, state: str) -> None:
        for listener in list(self._listeners):
            if listener(state) is True:
                self.remove_listener(listener)
