"""`Registry`: the small tree of values in which processes of a cluster find each other, in ZooKeeper or in files."""

import os
from collections.abc import Callable
from typing import Any, Protocol

from shoal.errors import missing_extra
from shoal.serving.cluster.directory import DirectoryRegistry
from shoal.serving.cluster.zookeeper import KazooRegistry

RECONNECT_SECS = 2.0
"""The longest pause between attempts to reach a registry that is away."""


class Registry(Protocol):
    """Values under absolute paths, shared by the sessions of several processes. Any thread may call any method.

    Ephemeral values are removed when the session that wrote them ends. A function that watches is called once before
    ``watch`` returns, then on every change, and no more after it has returned False.
    """

    def start(self) -> None:
        """Begins a session."""

    def stop(self) -> None:
        """Ends the session. Watches rest until the next start."""

    def restart(self) -> None:
        """Ends the session and begins another."""

    def listen(self, func: Callable[[str], Any]) -> Callable[[], None]:
        """Calls ``func`` with ``LOST``, ``SUSPENDED`` or ``CONNECTED`` from now on; the result ends that."""

    def get(self, path: str) -> bytes | None:
        """The value, or None where there is none."""

    def put(self, path: str, value: bytes, *, ephemeral: bool = False, numbered: bool = False) -> str:
        """Writes a value, making its parents, and returns its path. An ephemeral value belongs to this session
        afterwards, whoever wrote it before. ``numbered`` appends ten digits that count up per parent."""

    def swap(self, path: str, before: bytes | None, after: bytes) -> bool:
        """Writes ``after`` where the value is ``before``, None meaning that there is none, and tells whether it did.
        Of several that try at once, in whatever process, one succeeds."""

    def delete(self, path: str) -> None:
        """Removes a value without children; one that is missing is ignored."""

    def children(self, path: str) -> list[str]:
        """The names under a path; none under a missing one."""

    def watch(self, path: str, func: Callable[[bytes | None, str | None], Any]) -> None:
        """``func(value, event)``: the event is None at first, then ``CREATED``, ``CHANGED``, ``DELETED`` or ``NONE`` (a
        change of the session)."""

    def watch_children(self, path: str, func: Callable[[list[str]], Any], *, ensure: bool = False) -> None:
        """``func(names)``. A watch ends with its path, at once where that is missing; ``ensure`` makes the path."""


def open_registry(servers: str | None, default: str = "127.0.0.1:2181", *, session_timeout: float = 10.0) -> Registry:
    """A registry by its address: a folder (``dir:///path``, ``dir:/path``, or the path of one that exists) or ZooKeeper
    (``zk://host:port,…``, or just ``host:port,…``).

    ``session_timeout``: seconds after which the ephemeral values of a process that died are removed; a ZooKeeper takes
    at least two of its ticks.

    ``ZK_AUTH=user:password`` in the environment becomes digest authentication; it is never logged.
    """
    if servers and (servers.startswith("dir:") or os.path.isdir(servers)):
        return DirectoryRegistry(servers.removeprefix("dir:").removeprefix("//"), session_timeout)
    servers = servers.removeprefix("zk://") if servers else servers
    try:
        from kazoo.client import KazooClient
    except ImportError:
        raise missing_extra("kazoo", "zookeeper") from None
    auth = os.environ.get("ZK_AUTH")
    # kazoo's own pause between attempts doubles up to an hour: a server that was away would not be noticed for long.
    again = {"max_tries": -1, "delay": 0.1, "backoff": 2, "max_delay": RECONNECT_SECS}
    auth_data = [("digest", auth)] if auth else None
    client = KazooClient(hosts=servers or default, timeout=session_timeout, auth_data=auth_data, connection_retry=again)
    return KazooRegistry(client)


def is_registry_address(text: str) -> bool:
    """Whether a text that may also be a server's ``host:port`` is the address of a registry."""
    return text.startswith(("dir:", "zk://")) or os.path.isdir(text)


def registry_of(client: Any) -> Registry:
    """A ``zk_client`` argument as a registry: a client with kazoo's methods is wrapped, a registry stays as it is."""
    return KazooRegistry(client) if hasattr(client, "ChildrenWatch") else client
