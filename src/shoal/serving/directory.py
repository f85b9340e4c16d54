"""The embedded registry: a directory of files with the interface of a ZooKeeper client.

A node is a folder with a file ``=data``; an ephemeral one also has ``=owner``, the session that made it. A session is
a file under ``=sessions`` whose age is its heartbeat; nodes of sessions that stopped beating are removed by whoever
looks. Changes are made under one file lock and seen by polling, so a watch is as late as one poll.
"""

import contextlib
import fcntl
import itertools
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from shoal.serving.zk_types import (
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

_DATA, _OWNER, _COUNTER = "=data", "=owner", "=counter"


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
        self._watches: list[_Watch] = []
        self._mutex = threading.RLock()
        self._depth = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # --- session ----------------------------------------------------------------------------------------------------

    def start(self, timeout: float = 15) -> None:
        if self.connected:
            return
        (self.root / "=sessions").mkdir(parents=True, exist_ok=True)
        self._begin_session()
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
        with self._locked():
            self._end_session(self._session)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        self._tell(KazooState.LOST)

    def close(self) -> None:
        self.stop()

    def restart(self) -> None:
        self.stop()
        self.start()

    def _begin_session(self) -> None:
        self._session = uuid.uuid4().hex
        self._session_file(self._session).touch()

    def _session_file(self, session: str) -> Path:
        return self.root / "=sessions" / session

    def _end_session(self, session: str) -> None:
        self._session_file(session).unlink(missing_ok=True)
        self._reap()

    def _reap(self) -> None:
        """Removes sessions without a heartbeat and the nodes of sessions that are gone. Under the lock."""
        horizon = time.time() - self.session_timeout
        alive = set()
        for file in (self.root / "=sessions").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_mtime < horizon:
                    file.unlink(missing_ok=True)
                else:
                    alive.add(file.name)
        owners = [Path(folder) / _OWNER for folder, _, files in os.walk(self.root) if _OWNER in files]
        for owner in owners:
            with contextlib.suppress(FileNotFoundError):
                if owner.read_text() not in alive:
                    shutil.rmtree(owner.parent)

    # --- files ------------------------------------------------------------------------------------------------------

    def _folder(self, path: str) -> Path:
        return self.root.joinpath(*(quote(part, safe=" :;,@[]-_.~") for part in path.split("/")[1:] if part))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._mutex:
            if self._depth:
                yield
                return
            with open(self.root / "=lock", "a") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth -= 1

    def _check(self) -> None:
        if not self.connected:
            raise ConnectionClosedError("the client is not started; call start()")

    def _is_node(self, path: str) -> bool:
        return path == "/" or (self._folder(path) / _DATA).exists()

    def _write(self, folder: Path, name: str, value: bytes) -> None:
        temporary = folder / f"={uuid.uuid4().hex}.tmp"
        temporary.write_bytes(value)
        os.replace(temporary, folder / name)

    def _make(self, path: str, value: bytes, owner: str) -> None:
        folder = self._folder(path)
        folder.mkdir(parents=True, exist_ok=True)
        if owner:
            self._write(folder, _OWNER, owner.encode())
        self._write(folder, _DATA, value)

    def _stat(self, path: str) -> NodeStat:
        folder = self._folder(path)
        data = folder / _DATA
        info = data.stat() if data.exists() else None
        owner = folder / _OWNER
        session = int(owner.read_text()[:15], 16) if owner.exists() else 0
        return NodeStat(
            info.st_mtime_ns if info else 0, session, len(self._children(path)), info.st_size if info else 0
        )

    def _children(self, path: str) -> list[str]:
        folder = self._folder(path)
        try:
            names = [entry.name for entry in os.scandir(folder) if not entry.name.startswith("=")]
        except FileNotFoundError:
            raise NoNodeError(path) from None
        return sorted(unquote(name) for name in names if (folder / name / _DATA).exists())

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
        with self._locked():
            parent = parent_of(path)
            if not self._is_node(parent):
                if not makepath:
                    raise NoNodeError(parent)
                self.ensure_path(parent)
            if (self._folder(parent) / _OWNER).exists():
                raise ValueError(f"{parent} is ephemeral and cannot have children")
            if sequence:
                path = f"{path}{self._next(parent):010d}"
            if self._is_node(path):
                raise NodeExistsError(path)
            self._make(path, bytes(value or b""), self._session if ephemeral else "")
            return (path, self._stat(path)) if include_data else path

    def _next(self, parent: str) -> int:
        file = self._folder(parent) / _COUNTER
        number = int(file.read_text()) if file.exists() else 0
        self._write(file.parent, _COUNTER, str(number + 1).encode())
        return number

    def ensure_path(self, path: str, acl: Any = None) -> bool:
        self._check()
        path = normal(path)
        with self._locked():
            for built in itertools.accumulate(f"/{part}" for part in path.split("/")[1:] if part):
                if not self._is_node(built):
                    self._make(built, b"", "")
        return True

    def set(self, path: str, value: bytes, version: int = -1) -> NodeStat:
        self._check()
        path = normal(path)
        with self._locked():
            if not self._is_node(path):
                raise NoNodeError(path)
            self._write(self._folder(path), _DATA, bytes(value or b""))
            return self._stat(path)

    def get(self, path: str, watch: Any = None) -> tuple[bytes, NodeStat]:
        self._check()
        path = normal(path)
        try:
            return (self._folder(path) / _DATA).read_bytes(), self._stat(path)
        except FileNotFoundError:
            raise NoNodeError(path) from None

    def exists(self, path: str, watch: Any = None) -> NodeStat | None:
        self._check()
        path = normal(path)
        return self._stat(path) if self._is_node(path) else None

    def get_children(self, path: str, watch: Any = None, include_data: bool = False) -> Any:
        self._check()
        path = normal(path)
        if not self._is_node(path):
            raise NoNodeError(path)
        children = self._children(path)
        return (children, self._stat(path)) if include_data else children

    def delete(self, path: str, version: int = -1, recursive: bool = False) -> bool:
        self._check()
        path = normal(path)
        with self._locked():
            if not self._is_node(path):
                raise NoNodeError(path)
            if self._children(path) and not recursive:
                raise NotEmptyError(path)
            shutil.rmtree(self._folder(path))
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
        if watch.children:
            try:
                return self._children(watch.path) if self._is_node(watch.path) else None
            except NoNodeError:
                return None
        try:
            data = self._folder(watch.path) / _DATA
            stamp = data.stat()
            return data.read_bytes(), (stamp.st_mtime_ns, stamp.st_ino)
        except FileNotFoundError:
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
                found = watch.seen is not None and self._is_node(watch.path)
                args = (watch.seen[0], self._stat(watch.path)) if found else (None, None)
                watch.live = call_watch(watch.func, args, event)
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
        with self._locked():
            try:
                os.utime(self._session_file(self._session))
                lost = False
            except FileNotFoundError:
                lost = self.connected
            self._reap()
            if lost:
                self._begin_session()
        if lost:
            log.warning("session in %s expired; a new one began", self.root)
            self._tell(KazooState.LOST)
            self._tell(KazooState.CONNECTED)

    def expire_session(self) -> None:
        """Ends the session as a pause longer than its timeout would; the next heartbeat begins a new one."""
        with self._locked():
            self._end_session(self._session)
