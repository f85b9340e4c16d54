"""`Registry`: a small tree of values, in ZooKeeper or in files, through which a cluster's processes find each other."""

import os
from collections.abc import Callable
from typing import Any, Protocol

from shoal.errors import ConfigError, missing_extra
from shoal.serving.cluster.directory import DirectoryRegistry
from shoal.serving.cluster.zookeeper import KazooRegistry

RECONNECT_SECS = 2.0
"""The longest pause between attempts to reach an unavailable registry."""


class Registry(Protocol):
    """Values under absolute paths, shared by the sessions of several processes. Any thread may call any method.

    Ephemeral values are removed when the session that wrote them ends. A watch function is called once before ``watch``
    returns, then on every change, until it returns False.
    """

    def start(self) -> None:
        """Begin a session."""

    def stop(self) -> None:
        """End the session. Watches pause until the next start."""

    def restart(self) -> None:
        """End the session and begin a new one."""

    def listen(self, func: Callable[[str], Any]) -> Callable[[], None]:
        """Call ``func`` with ``LOST``, ``SUSPENDED`` or ``CONNECTED`` from now on; call the result to stop."""

    def get(self, path: str) -> bytes | None:
        """The value at a path, or None."""

    def put(self, path: str, value: bytes, *, ephemeral: bool = False, numbered: bool = False) -> str:
        """Write a value, creating its parents, and return its path. ``numbered`` appends ten digits that count up per
        parent. An ephemeral value belongs to this session from then on, even if another session wrote it."""

    def swap(self, path: str, before: bytes | None, after: bytes) -> bool:
        """Atomically write ``after`` if the value is ``before`` (None: no value); returns whether it was written."""

    def delete(self, path: str) -> None:
        """Remove a value, which must not have children; has no effect if it does not exist."""

    def children(self, path: str) -> list[str]:
        """The names of a path's children; empty if the path does not exist."""

    def watch(self, path: str, func: Callable[[bytes | None, str | None], Any]) -> None:
        """``func(value, event)``: the event is None at first, then ``CREATED``, ``CHANGED``, ``DELETED`` or ``NONE`` (a
        change of the session)."""

    def watch_children(self, path: str, func: Callable[[list[str]], Any], *, ensure: bool = False) -> None:
        """``func(names)``. The watch ends when its path is removed or missing; ``ensure`` creates the path."""


def open_registry(servers: str | None, default: str = "127.0.0.1:2181", *, session_timeout: float = 10.0) -> Registry:
    """A registry by its address: a folder (``dir:///path``, ``dir:/path``, or the path of one that exists) or ZooKeeper
    (``zk://host:port,…``, or just ``host:port,…``); None is ``default``.

    ``session_timeout``: seconds after which the ephemeral values of a dead process are removed; ZooKeeper's minimum is
        two of its ticks.

    ``ZK_AUTH=user:password`` in the environment enables digest authentication; it is never logged.
    """
    if servers and is_directory_address(servers):
        return DirectoryRegistry(_folder(servers), session_timeout)
    servers = servers.removeprefix("zk://") if servers else servers
    try:
        from kazoo.client import KazooClient
    except ImportError:
        raise missing_extra("kazoo", "zookeeper") from None
    auth = os.environ.get("ZK_AUTH")
    # By default, kazoo's pause between attempts grows up to an hour, so a returning server would go unnoticed.
    again = {"max_tries": -1, "delay": 0.1, "backoff": 2, "max_delay": RECONNECT_SECS}
    auth_data = [("digest", auth)] if auth else None
    try:
        client = KazooClient(servers or default, session_timeout, auth_data=auth_data, connection_retry=again)
    except ValueError:
        raise ConfigError(f"a registry must be dir:PATH or zk://HOST:PORT,..., got {servers!r}") from None
    return KazooRegistry(client)


def is_registry_address(text: str) -> bool:
    """Whether a string is a registry's address rather than a server's ``host:port``."""
    return text.startswith("zk://") or is_directory_address(text)


def is_directory_address(text: str) -> bool:
    """Whether a registry's address is a directory's."""
    return text.startswith("dir:") or os.path.isdir(text)


def check_directory(text: str) -> None:
    """Raise `ConfigError` for the address of a registry's directory that does not exist; for programs that only read,
    because opening a registry creates it."""
    if is_directory_address(text) and not os.path.isdir(_folder(text)):
        raise ConfigError(
            f"registry {text} does not exist; correct the path, or start a server with --registry {text} to create it"
        )


def _folder(address: str) -> str:
    folder = address.removeprefix("dir:").removeprefix("//")
    if not folder:
        raise ConfigError(f"a registry in a directory must be dir:PATH, got {address!r}")
    return folder


def registry_of(client: Any) -> Registry:
    """Convert a ``zk_client`` argument to a registry: a client with kazoo's methods is wrapped."""
    return KazooRegistry(client) if hasattr(client, "ChildrenWatch") else client
