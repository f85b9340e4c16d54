"""The nodes and watches of an in-memory ZooKeeper; watches fire synchronously, on the thread that made the change."""

import inspect
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.serving.cluster.zookeeper import EventType, KazooState, NoNodeError, WatchedEvent

if TYPE_CHECKING:
    from shoal.testing.fake_zk import FakeKazooClient


class NodeStat(NamedTuple):
    """The part of a node's statistics that callers read."""

    version: int = 0
    ephemeralOwner: int = 0
    numChildren: int = 0
    dataLength: int = 0


def parent_of(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def call_watch(func: Callable, args: tuple, event: Any) -> bool:
    """Call a watch function, with the event if it takes one; return whether the watch stays."""
    try:
        inspect.signature(func).bind(*args, event)
    except (TypeError, ValueError):
        return func(*args) is not False
    return func(*args, event) is not False


@dataclass(slots=True)
class _Node:
    value: bytes = b""
    owner: int = 0
    version: int = 0
    children: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class FakeWatch:
    """A watch of one client. Like kazoo's, it pauses while its client is disconnected and then catches up."""

    client: "FakeKazooClient"
    path: str
    func: Callable
    live: bool = True
    wants_event: bool = False
    seen: Any = None
    """The state that was last passed to the function."""

    @property
    def awake(self) -> bool:
        return self.live and self.client.connected


class FakeTree:
    """The nodes that clients share."""

    def __init__(self) -> None:
        self.nodes: dict[str, _Node] = {"/": _Node()}
        self.lock = threading.RLock()
        self.data_watches: list[FakeWatch] = []
        self.child_watches: list[FakeWatch] = []
        self.counters: dict[str, itertools.count] = {}
        self.elections: dict[str, threading.Lock] = {}
        self.sessions = itertools.count(1)

    def children(self, path: str) -> list[str]:
        if path not in self.nodes:
            raise NoNodeError(path)
        return list(self.nodes[path].children)

    def stat(self, path: str) -> NodeStat:
        node = self.nodes[path]
        return NodeStat(node.version, node.owner, len(node.children), len(node.value))

    def add(self, path: str, value: bytes, owner: int) -> None:
        parent = self.nodes[parent_of(path)]
        self.nodes[path] = _Node(value, owner)
        parent.children.append(path.rpartition("/")[2])
        self.fire_data(path, EventType.CREATED)
        self.fire_children(parent_of(path))

    def remove(self, path: str) -> None:
        del self.nodes[path]
        self.nodes[parent_of(path)].children.remove(path.rpartition("/")[2])
        self.fire_data(path, EventType.DELETED)
        for watch in self.child_watches:
            if watch.path == path and watch.awake:
                watch.live = False  # as in ZooKeeper: a children watch ends with its node
        self.fire_children(parent_of(path))

    def fire_data(self, path: str, kind: str) -> None:
        for watch in list(self.data_watches):
            if watch.awake and watch.path == path:
                self.tell_data(watch, WatchedEvent(kind, KazooState.CONNECTED, path))
        self.data_watches = [watch for watch in self.data_watches if watch.live]

    def fire_children(self, path: str) -> None:
        for watch in list(self.child_watches):
            if watch.awake and watch.path == path and path in self.nodes:
                self.tell_children(watch, WatchedEvent(EventType.CHILD, KazooState.CONNECTED, path))
        self.child_watches = [watch for watch in self.child_watches if watch.live]

    def data_now(self, path: str) -> Any:
        """Return the state that a data watch compares: the node and the number of writes to it."""
        node = self.nodes.get(path)
        return (id(node), node.version) if node is not None else None

    def tell_data(self, watch: FakeWatch, event: Any) -> None:
        node = self.nodes.get(watch.path)
        watch.seen = self.data_now(watch.path)
        args = (node.value, self.stat(watch.path)) if node is not None else (None, None)
        watch.live = call_watch(watch.func, args, event)

    def tell_children(self, watch: FakeWatch, event: Any) -> None:
        watch.seen = self.children(watch.path)
        args = (list(watch.seen), event) if watch.wants_event else (list(watch.seen),)
        watch.live = watch.func(*args) is not False

    def catch_up(self, client: "FakeKazooClient") -> None:
        """Fire the watches that a reconnected client missed."""
        for watch in [each for each in self.child_watches if each.client is client]:
            if watch.path not in self.nodes:
                watch.live = False
            elif watch.awake and self.children(watch.path) != watch.seen:
                self.tell_children(watch, None)
        for watch in [each for each in self.data_watches if each.client is client]:
            if watch.awake and self.data_now(watch.path) != watch.seen:
                self.tell_data(watch, None)
