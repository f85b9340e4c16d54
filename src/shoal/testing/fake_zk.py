"""An in-memory ZooKeeper client for unit tests; watches fire synchronously, on the thread that made the change."""

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from shoal.serving.cluster.directory_store import normal
from shoal.serving.cluster.zookeeper import (
    BadVersionError,
    ConnectionClosedError,
    EventType,
    KazooState,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
)
from shoal.testing.fake_zk_tree import FakeTree, FakeWatch, NodeStat, parent_of


class FakeKazooClient:
    """The part of kazoo's client that serving uses, in memory.

    Clients that are given the same ``tree`` see each other's nodes; closing one removes its ephemeral nodes.
    """

    def __init__(self, zk_server: str | None = None, tree: FakeTree | None = None, **ignored: Any) -> None:
        self.hosts = zk_server
        self.tree = tree if tree is not None else FakeTree()
        self.connected = False
        self._session = 0
        self._listeners: list[Callable[[str], Any]] = []

    # --- session ----------------------------------------------------------------------------------------------------

    def start(self, timeout: float = 15) -> None:
        if not self.connected:
            self._session = next(self.tree.sessions)
            self.connected = True
            self._tell(KazooState.CONNECTED)
            with self.tree.lock:
                self.tree.catch_up(self)

    def stop(self) -> None:
        if self.connected:
            self.connected = False
            self._end_session()
            self._tell(KazooState.LOST)

    def close(self) -> None:
        self.stop()

    def restart(self) -> None:
        self.stop()
        self.start()

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

    def set_state(self, state: str) -> None:
        """Report LOST, SUSPENDED or CONNECTED to the listeners without touching the nodes."""
        self._tell(state)

    def expire_session(self) -> None:
        """Expire the session as a real one does: ephemeral nodes vanish, listeners see LOST, then CONNECTED."""
        self._end_session()
        self._tell(KazooState.LOST)
        self._session = next(self.tree.sessions)
        self._tell(KazooState.CONNECTED)

    def _end_session(self) -> None:
        with self.tree.lock:
            for path in [path for path, node in self.tree.nodes.items() if node.owner and node.owner == self._session]:
                if path in self.tree.nodes:  # a watch may have deleted it meanwhile
                    self.tree.remove(path)

    def _check(self) -> None:
        if not self.connected:
            raise ConnectionClosedError("the client is not started; call start()")

    # --- nodes ------------------------------------------------------------------------------------------------------

    def create(
        self,
        path: str,
        value: bytes = b"",
        acl: Any = None,
        ephemeral: bool = False,
        makepath: bool = False,
        include_data: bool = False,
        sequence: bool = False,
    ) -> Any:
        self._check()
        ends_in_slash = path.endswith("/") and sequence
        path = normal(path)
        if ends_in_slash:
            path += "/"
        with self.tree.lock:
            parent = parent_of(path)
            if parent not in self.tree.nodes:
                if not makepath:
                    raise NoNodeError(parent)
                self.ensure_path(parent)
            if sequence:
                counter = self.tree.counters.setdefault(path, itertools.count())
                path = f"{path}{next(counter):010d}"
            if path in self.tree.nodes:
                raise NodeExistsError(path)
            if self.tree.nodes[parent].owner:
                raise ValueError(f"{parent} is ephemeral and cannot have children")
            self.tree.add(path, bytes(value or b""), self._session if ephemeral else 0)
            return (path, self.tree.stat(path)) if include_data else path

    def ensure_path(self, path: str, acl: Any = None) -> bool:
        self._check()
        path = normal(path)
        with self.tree.lock:
            built = ""
            for part in path.split("/")[1:] if path != "/" else ():
                built += f"/{part}"
                if built not in self.tree.nodes:
                    self.tree.add(built, b"", 0)
        return True

    def set(self, path: str, value: bytes, version: int = -1) -> NodeStat:
        self._check()
        path = normal(path)
        with self.tree.lock:
            node = self.tree.nodes.get(path)
            if node is None:
                raise NoNodeError(path)
            if version not in (-1, node.version):
                raise BadVersionError(path)
            node.value, node.version = bytes(value or b""), node.version + 1
            self.tree.fire_data(path, EventType.CHANGED)
            return self.tree.stat(path) if path in self.tree.nodes else NodeStat()

    def get(self, path: str, watch: Any = None) -> tuple[bytes, NodeStat]:
        self._check()
        path = normal(path)
        with self.tree.lock:
            if path not in self.tree.nodes:
                raise NoNodeError(path)
            return self.tree.nodes[path].value, self.tree.stat(path)

    def exists(self, path: str, watch: Any = None) -> bool:
        self._check()
        return normal(path) in self.tree.nodes

    def get_children(self, path: str, watch: Any = None, include_data: bool = False) -> Any:
        self._check()
        path = normal(path)
        with self.tree.lock:
            children = self.tree.children(path)
            return (children, self.tree.stat(path)) if include_data else children

    def delete(self, path: str, version: int = -1, recursive: bool = False) -> bool:
        self._check()
        path = normal(path)
        with self.tree.lock:
            if path not in self.tree.nodes:
                raise NoNodeError(path)
            if self.tree.nodes[path].children and not recursive:
                raise NotEmptyError(path)
            for child in list(self.tree.nodes[path].children):
                self.delete(f"{path}/{child}", recursive=True)
            self.tree.remove(path)
        return True

    # --- watches ----------------------------------------------------------------------------------------------------

    def DataWatch(self, path: str, func: Callable | None = None) -> Callable:
        """Call ``func(data, stat[, event])`` at once if the node exists, then on create, change and delete."""
        if func is not None:
            self._watch_data(path, func)
        return partial(self.DataWatch, path)

    def ChildrenWatch(
        self, path: str, func: Callable | None = None, allow_session_lost: bool = True, send_event: bool = False
    ) -> Callable:
        """Call ``func(children)`` at once, then on every change; a watch of a missing node ends at once."""
        if func is not None:
            self._watch_children(path, func, send_event)
        return lambda func: self.ChildrenWatch(path, func, send_event=send_event)

    def _watch_data(self, path: str, func: Callable) -> None:
        path = normal(path)
        with self.tree.lock:
            watch = FakeWatch(self, path, func)
            if path in self.tree.nodes:
                self.tree.tell_data(watch, None)
            if watch.live:
                self.tree.data_watches.append(watch)

    def _watch_children(self, path: str, func: Callable, send_event: bool) -> None:
        path = normal(path)
        with self.tree.lock:
            if path not in self.tree.nodes:
                return
            watch = FakeWatch(self, path, func, wants_event=send_event)
            self.tree.tell_children(watch, None)
            if watch.live:
                self.tree.child_watches.append(watch)

    def Election(self, path: str, identifier: str | None = None) -> "FakeElection":
        return FakeElection(self, path, identifier)


class FakeElection:
    """One leader per path and tree."""

    def __init__(self, client: FakeKazooClient, path: str, identifier: str | None = None) -> None:
        self.path, self.identifier = path, identifier
        self._lock = client.tree.elections.setdefault(normal(path), threading.Lock())
        self._cancelled = False

    def run(self, func: Callable, *args: Any, **kwargs: Any) -> None:
        """Wait until it leads, then call ``func`` once."""
        while not self._cancelled:
            if self._lock.acquire(timeout=0.05):
                try:
                    func(*args, **kwargs)
                finally:
                    self._lock.release()
                return

    def cancel(self) -> None:
        self._cancelled = True
