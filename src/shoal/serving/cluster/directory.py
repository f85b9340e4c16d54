"""The embedded registry: a directory of files with the interface of a ZooKeeper client.

Changes are seen by polling, so a watch is as late as one poll.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.serving.cluster.directory_store import DirectoryStore
from shoal.serving.cluster.zk_types import (
    ConnectionClosedError,
    EventType,
    KazooState,
    NodeExistsError,
    NodeStat,
    NoNodeError,
    NotEmptyError,
    StateListeners,
    WatchedEvent,
    Watching,
    call_watch,
    normal,
    parent_of,
)

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Watch:
    path: str
    func: Callable
    children: bool
    send_event: bool
    seen: Any
    live: bool = True


class DirectoryClient(StateListeners):
    """A registry client over a shared directory.

    Args:
        root: the registry's directory, made on start.
        session_timeout: seconds without a heartbeat after which a session's ephemeral nodes are removed.
        poll_interval: seconds between looks at watched nodes.
    """

    def __init__(self, root: str | Path, session_timeout: float = 10.0, poll_interval: float = 0.1) -> None:
        self.root = Path(root)
        self.session_timeout = session_timeout
        self.poll_interval = poll_interval
        self.connected = False
        self._session = ""
        super().__init__()
        self._store = DirectoryStore(self.root, session_timeout)
        self._watches: list[_Watch] = []
        self._mutex = threading.Lock()  # of the list of watches
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # --- session ----------------------------------------------------------------------------------------------------

    def start(self, timeout: float = 15) -> None:
        if self.connected:
            return
        self._store.open()
        self._session = self._store.begin_session()
        self._stop = threading.Event()
        self.connected = True
        self._tell(KazooState.CONNECTED)
        self._thread = threading.Thread(target=self._poll, args=(self._stop,), name="shoal-directory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if not self.connected:
            return
        self._stop.set()
        self.connected = False
        with contextlib.suppress(FileNotFoundError), self._store.locked():  # the directory itself may be gone
            self._store.end_session(self._session)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        self._tell(KazooState.LOST)

    def close(self) -> None:
        self.stop()

    def restart(self) -> None:
        self.stop()
        self.start()

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
        path = normal(path) + ("/" if ends_in_slash else "")
        with self._store.locked():
            parent = parent_of(path)
            if not self._store.is_node(parent):
                if not makepath:
                    raise NoNodeError(parent)
                self.ensure_path(parent)
            if self._store.is_ephemeral(parent):
                raise ValueError(f"{parent} is ephemeral and cannot have children")
            if sequence:
                path = f"{path}{self._store.next_number(parent):010d}"
            if self._store.is_node(path):
                raise NodeExistsError(path)
            self._store.make(path, bytes(value or b""), self._session if ephemeral else "")
            return (path, self._store.stat(path)) if include_data else path

    def ensure_path(self, path: str, acl: Any = None) -> bool:
        self._check()
        path = normal(path)
        with self._store.locked():
            for built in itertools.accumulate(f"/{part}" for part in path.split("/")[1:] if part):
                if not self._store.is_node(built):
                    self._store.make(built, b"")
        return True

    def set(self, path: str, value: bytes, version: int = -1) -> NodeStat:
        self._check()
        path = normal(path)
        with self._store.locked():
            if not self._store.is_node(path):
                raise NoNodeError(path)
            self._store.set(path, bytes(value or b""))
            return self._store.stat(path)

    def get(self, path: str, watch: Any = None) -> tuple[bytes, NodeStat]:
        self._check()
        path = normal(path)
        return self._store.get(path)[0], self._store.stat(path)

    def exists(self, path: str, watch: Any = None) -> NodeStat | None:
        self._check()
        path = normal(path)
        try:
            return self._store.stat(path)
        except NoNodeError:
            return None

    def get_children(self, path: str, watch: Any = None, include_data: bool = False) -> Any:
        self._check()
        path = normal(path)
        if not self._store.is_node(path):
            raise NoNodeError(path)
        children = self._store.children(path)
        return (children, self._store.stat(path)) if include_data else children

    def delete(self, path: str, version: int = -1, recursive: bool = False) -> bool:
        self._check()
        path = normal(path)
        with self._store.locked():
            if not self._store.is_node(path):
                raise NoNodeError(path)
            if self._store.children(path) and not recursive:
                raise NotEmptyError(path)
            self._store.remove(path)
        return True

    # --- watches ----------------------------------------------------------------------------------------------------

    def DataWatch(self, path: str, func: Callable | None = None) -> Watching:
        """Calls ``func(data, stat[, event])`` now, with None for a missing node, then on create, change and delete."""
        return Watching(lambda where, what: self._watch(where, what, False, False), path, func)

    def ChildrenWatch(
        self, path: str, func: Callable | None = None, allow_session_lost: bool = True, send_event: bool = False
    ) -> Watching:
        """Calls ``func(children)`` now, then on every change; ends at once on a missing node."""
        return Watching(lambda where, what: self._watch(where, what, True, send_event), path, func)

    def _look(self, watch: _Watch) -> Any:
        try:
            if watch.children:
                return self._store.children(watch.path) if self._store.is_node(watch.path) else None
            return self._store.get(watch.path)
        except NoNodeError:
            return None

    def _watch(self, path: str, func: Callable, children: bool, send_event: bool) -> None:
        watch = _Watch(normal(path), func, children, send_event, None)
        watch.seen = self._look(watch)
        if children and watch.seen is None:
            return
        self._call(watch, None)
        if watch.live:
            with self._mutex:
                self._watches.append(watch)

    def _call(self, watch: _Watch, event: Any) -> None:
        try:
            if watch.children:
                args = (watch.seen, event) if watch.send_event else (watch.seen,)
                watch.live = watch.func(*args) is not False
            else:
                found: tuple[Any, Any] = (None, None)
                if watch.seen is not None:
                    with contextlib.suppress(NoNodeError):  # gone since it was seen; the next look tells that
                        found = (watch.seen[0], self._store.stat(watch.path))
                watch.live = call_watch(watch.func, found, event)
        except Exception:
            log.exception("a watch on %s failed", watch.path)
            if event is None:
                raise

    def _poll(self, stop: threading.Event) -> None:
        beat = 0.0
        while not stop.wait(self.poll_interval):
            try:
                if time.monotonic() - beat > self.session_timeout / 4:
                    beat = time.monotonic()
                    self._beat()
                with self._mutex:
                    watches = list(self._watches)
                for watch in watches:
                    if not stop.is_set():
                        self._check_watch(watch)
                with self._mutex:
                    self._watches = [watch for watch in self._watches if watch.live]
            except Exception:
                log.exception("the registry in %s could not be polled", self.root)

    def _check_watch(self, watch: _Watch) -> None:
        now = self._look(watch)
        if now == watch.seen:
            return
        before, watch.seen = watch.seen, now
        if watch.children:
            if now is None:
                watch.live = False  # as in ZooKeeper: a children watch ends with its node
                return
            kind = EventType.CHILD
        else:
            kind = EventType.CREATED if before is None else EventType.DELETED if now is None else EventType.CHANGED
        self._call(watch, WatchedEvent(kind, KazooState.CONNECTED, watch.path))

    def _beat(self) -> None:
        with self._store.locked():
            lost = not self._store.beat(self._session) and self.connected
            self._store.reap()
            if lost:
                self._session = self._store.begin_session()
        if lost:
            log.warning("session in %s expired; a new one began", self.root)
            self._tell(KazooState.LOST)
            self._tell(KazooState.CONNECTED)

    def expire_session(self) -> None:
        """Ends the session as a pause longer than its timeout would; the next heartbeat begins a new one."""
        with self._store.locked():
            self._store.end_session(self._session)
