"""The files of the embedded registry: nodes, sessions, and the lock for changes.

A node is a folder with a file ``=data``; an ephemeral one also has ``=owner``, the session that created it. A session
is a file under ``=sessions`` with its timeout in seconds; its modification time is its last heartbeat. Any process
removes the nodes of sessions without a recent heartbeat.
"""

import contextlib
import fcntl
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

_DATA, _OWNER, _COUNTER = "=data", "=owner", "=counter"


class DirectoryStore:
    """A registry's directory. Paths are normalised; reads need no lock, changes require :meth:`locked`.

    Args:
        root: the directory.
        session_timeout: seconds without a heartbeat after which a session ends.
    """

    def __init__(self, root: Path, session_timeout: float) -> None:
        self.root = root
        self._session_timeout = session_timeout
        self._mutex = threading.RLock()
        self._depth = 0

    def open(self) -> None:
        (self.root / "=sessions").mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclusive lock among threads and processes; re-entrant."""
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

    # --- sessions ---------------------------------------------------------------------------------------------------

    def begin_session(self) -> str:
        session = uuid.uuid4().hex
        _write(self._session_file(session).parent, session, repr(self._session_timeout).encode())
        return session

    def beat(self, session: str) -> bool:
        """Keep a session alive; returns False if it has ended."""
        try:
            os.utime(self._session_file(session))
        except FileNotFoundError:
            return False
        return True

    def end_session(self, session: str) -> None:
        self._session_file(session).unlink(missing_ok=True)
        self.reap()

    def reap(self) -> None:
        """Remove sessions without a recent heartbeat, and the nodes of ended sessions."""
        now, alive = time.time(), set()
        for file in (self.root / "=sessions").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_mtime < now - self._timeout_of(file):
                    file.unlink(missing_ok=True)
                else:
                    alive.add(file.name)
        owners = [Path(folder) / _OWNER for folder, _, files in os.walk(self.root) if _OWNER in files]
        for owner in owners:
            with contextlib.suppress(FileNotFoundError):
                if owner.read_text() not in alive:
                    shutil.rmtree(owner.parent)

    def _timeout_of(self, file: Path) -> float:
        try:
            return float(file.read_text())
        except ValueError:  # version 0.1 wrote none
            return self._session_timeout

    def _session_file(self, session: str) -> Path:
        return self.root / "=sessions" / session

    # --- nodes ------------------------------------------------------------------------------------------------------

    def _folder(self, path: str) -> Path:
        return self.root.joinpath(*(quote(part, safe=" :;,@[]-_.~") for part in path.split("/")[1:] if part))

    def is_node(self, path: str) -> bool:
        return path == "/" or (self._folder(path) / _DATA).exists()

    def is_ephemeral(self, path: str) -> bool:
        return (self._folder(path) / _OWNER).exists()

    def put(self, path: str, value: bytes, owner: str = "") -> None:
        """Write a value; one with an ``owner`` is removed when that session ends."""
        folder = self._folder(path)
        folder.mkdir(parents=True, exist_ok=True)
        if owner:
            _write(folder, _OWNER, owner.encode())
        _write(folder, _DATA, value)

    def get(self, path: str) -> tuple[bytes, tuple[int, int]] | None:
        """(a node's value, a stamp that changes whenever it is written), or None."""
        try:
            with open(self._folder(path) / _DATA, "rb") as file:  # a write replaces the file
                stamp = os.fstat(file.fileno())
                return file.read(), (stamp.st_mtime_ns, stamp.st_ino)
        except FileNotFoundError:
            return None

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._folder(path))

    def next_number(self, path: str) -> int:
        """The number of a node's next numbered child."""
        file = self._folder(path) / _COUNTER
        number = int(file.read_text()) if file.exists() else 0
        _write(file.parent, _COUNTER, str(number + 1).encode())
        return number

    def children(self, path: str) -> list[str] | None:
        """Sorted names of a node's children; None if there is no such node."""
        folder = self._folder(path)
        if not self.is_node(path):
            return None
        try:
            names = [entry.name for entry in os.scandir(folder) if not entry.name.startswith("=")]
        except FileNotFoundError:
            return None
        return sorted(unquote(name) for name in names if (folder / name / _DATA).exists())


def normal(path: str) -> str:
    """Normalise to an absolute path without a trailing slash."""
    parts = [part for part in path.split("/") if part]
    if any(part in (".", "..") for part in parts):
        raise ValueError(f"registry path {path!r} must not contain '.' or '..'")
    return "/" + "/".join(parts)


def _write(folder: Path, name: str, value: bytes) -> None:
    temporary = folder / f"={uuid.uuid4().hex}.tmp"
    temporary.write_bytes(value)
    os.replace(temporary, folder / name)
