"""`DirectoryRegistry`: a registry in a directory of files. Watches poll, so they see changes one poll late."""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.serving.cluster.directory_store import DirectoryStore, normal
from shoal.serving.cluster.zookeeper import ConnectionClosedError, EventType, KazooState, NotEmptyError

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Watch:
    path: str
    func: Callable[..., Any]
    children: bool
    seen: Any = None
    live: bool = True


class DirectoryRegistry:
    """A :class:`~shoal.serving.cluster.registry.Registry` in a shared directory.

    Args:
        root: the registry's directory, created on start.
        session_timeout: seconds without a heartbeat after which a session's ephemeral values are removed.
        poll_interval: seconds between checks of watched paths.
    """

    def __init__(self, root: str | Path, session_timeout: float = 10.0, poll_interval: float = 0.1) -> None:
        self.root = Path(root)
        self.session_timeout = session_timeout
        self.poll_interval = poll_interval
        self._store = DirectoryStore(self.root, session_timeout)
        self._session = ""  # empty while stopped
        self._listeners: list[Callable[[str], Any]] = []
        self._watches: list[_Watch] = []
        self._mutex = threading.Lock()  # guards _watches
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # --- session ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._session:
            return
        self._store.open()
        self._session = self._store.begin_session()
        self._stop = threading.Event()
        self._notify(KazooState.CONNECTED)
        self._thread = threading.Thread(target=self._poll, args=(self._stop,), name="shoal-directory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if not self._session:
            return
        self._stop.set()
        with contextlib.suppress(FileNotFoundError), self._store.locked():  # the directory itself may be gone
            session, self._session = self._session, ""
            self._store.end_session(session)
        self._session = ""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        self._notify(KazooState.LOST)

    def restart(self) -> None:
        self.stop()
        self.start()

    def listen(self, func: Callable[[str], Any]) -> Callable[[], None]:
        self._listeners.append(func)
        return lambda: self._listeners.remove(func) if func in self._listeners else None

    def _notify(self, state: str) -> None:
        for func in list(self._listeners):
            func(state)

    def _check(self, path: str) -> str:
        if not self._session:
            raise ConnectionClosedError(f"the registry in {self.root} is not started; call start()")
        return normal(path)

    # --- values -----------------------------------------------------------------------------------------------------

    def get(self, path: str) -> bytes | None:
        found = self._store.get(self._check(path))
        return found[0] if found is not None else None

    def put(self, path: str, value: bytes, *, ephemeral: bool = False, numbered: bool = False) -> str:
        path = self._check(path)
        with self._store.locked():
            parent = path.rpartition("/")[0] or "/"
            self._ensure(parent)
            if self._store.is_ephemeral(parent):
                raise ValueError(f"{parent} is ephemeral and cannot have children")
            if ephemeral and self._store.children(path):
                raise NotEmptyError(path)
            if numbered:
                path = f"{path}{self._store.next_number(parent):010d}"
            self._store.put(path, bytes(value or b""), self._session if ephemeral else "")
        return path

    def swap(self, path: str, before: bytes | None, after: bytes) -> bool:
        path = self._check(path)
        with self._store.locked():
            if self.get(path) != before:
                return False
            self._ensure(path.rpartition("/")[0] or "/")
            self._store.put(path, after)
        return True

    def _ensure(self, path: str) -> None:
        for each in itertools.accumulate(f"/{part}" for part in path.split("/")[1:] if part):
            if not self._store.is_node(each):
                self._store.put(each, b"")

    def delete(self, path: str) -> None:
        path = self._check(path)
        with self._store.locked():
            if self._store.children(path):
                raise NotEmptyError(path)
            self._store.remove(path)

    def children(self, path: str) -> list[str]:
        return self._store.children(self._check(path)) or []

    # --- watches ----------------------------------------------------------------------------------------------------

    def watch(self, path: str, func: Callable[[bytes | None, str | None], Any]) -> None:
        self._watch(_Watch(self._check(path), func, children=False))

    def watch_children(self, path: str, func: Callable[[list[str]], Any], *, ensure: bool = False) -> None:
        path = self._check(path)
        if ensure:
            with self._store.locked():
                self._ensure(path)
        self._watch(_Watch(path, func, children=True))

    def _look(self, watch: _Watch) -> Any:
        return self._store.children(watch.path) if watch.children else self._store.get(watch.path)

    def _watch(self, watch: _Watch) -> None:
        watch.seen = self._look(watch)
        if watch.children and watch.seen is None:
            return
        self._call(watch, None)
        if watch.live:
            with self._mutex:
                self._watches.append(watch)

    def _call(self, watch: _Watch, event: str | None) -> None:
        if watch.children:
            watch.live = watch.func(watch.seen) is not False
        else:
            watch.live = watch.func(watch.seen[0] if watch.seen is not None else None, event) is not False

    def _poll(self, stop: threading.Event) -> None:
        beat, failing = 0.0, False
        while not stop.wait(self.poll_interval):
            try:
                if due := time.monotonic() - beat > self.session_timeout / 4:
                    beat = time.monotonic()
                    self._beat()
                with self._mutex:
                    watches = list(self._watches)
                for watch in watches:
                    if not stop.is_set():
                        self._check_watch(watch)
                with self._mutex:
                    self._watches = [watch for watch in self._watches if watch.live]
                if failing and due:
                    failing = False
                    log.warning("polling the registry in %s works again", self.root)
            except Exception:
                if not failing:  # once, not at every poll
                    failing = True
                    log.exception("could not poll the registry in %s", self.root)

    def _check_watch(self, watch: _Watch) -> None:
        now = self._look(watch)
        if now == watch.seen:
            return
        before, watch.seen = watch.seen, now
        if watch.children and now is None:
            watch.live = False
            return
        kind = EventType.CREATED if before is None else EventType.DELETED if now is None else EventType.CHANGED
        try:
            self._call(watch, kind)
        except Exception:
            log.exception("a watch on %s failed", watch.path)

    def _beat(self) -> None:
        with self._store.locked():
            lost = bool(self._session) and not self._store.beat(self._session)
            self._store.reap()
            if lost:
                self._session = self._store.begin_session()
        if lost:
            log.warning("the session in %s expired; a new one was started", self.root)
            self._notify(KazooState.LOST)
            self._notify(KazooState.CONNECTED)

    def expire_session(self) -> None:
        """End the session as if it had timed out, and begin a new one."""
        with self._store.locked():
            self._store.end_session(self._session)
        self._beat()


DirectoryClient = DirectoryRegistry
