"""The folder of `shoal up`: its lock, the state that other commands read, their requests, and logs."""

from __future__ import annotations

import fcntl
import json
import logging
import logging.handlers
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shoal.durable import write_whole
from shoal.errors import ConfigError, DeadlineError, PeerError

STATE, LOCK, LOGS, REQUESTS = "state.json", "lock", "logs", "requests"
TAIL_LINES = 12
_LOOK_S = 10.0
"""The longest that another command may look at a folder's lock."""


@contextmanager
def only_one(folder: str) -> Iterator[None]:
    """Hold a folder's lock; the kernel releases it when this process exits, for whatever reason.

    Raises:
        ConfigError: another `shoal up` holds it.
    """
    os.makedirs(folder, exist_ok=True)
    fd = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + _LOOK_S
        while not _lock(fd, fcntl.LOCK_EX):
            if (pid := holder(folder)) is not None or time.monotonic() > deadline:
                raise ConfigError(
                    f"`shoal up` is already running in {folder} as process {pid or 'unknown'}; stop it with "
                    "`shoal up stop`, or give this one another [up] dir"
                )
            time.sleep(0.01)  # another command is only looking
        os.ftruncate(fd, 0)
        os.write(fd, str(os.getpid()).encode())
        yield
    finally:
        os.close(fd)


def holder(folder: str) -> int | None:
    """The process id that holds a folder's lock; None if `shoal up` does not run there."""
    try:
        fd = os.open(os.path.join(folder, LOCK), os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        if _lock(fd, fcntl.LOCK_SH):
            return None
        text = os.read(fd, 32).decode(errors="replace").strip()
        return int(text) if text.isdecimal() else 0
    finally:
        os.close(fd)


def _lock(fd: int, kind: int) -> bool:
    """Take a lock if that is possible at once."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_state(folder: str, state: dict[str, Any]) -> None:
    """Replace the state that other commands read."""
    write_whole(os.path.join(folder, STATE), json.dumps(state, indent=1))


def read_state(folder: str) -> dict[str, Any]:
    """The state of the `shoal up` that runs, or ran last, in a folder.

    Raises:
        ConfigError: `shoal up` never ran there.
    """
    try:
        return json.loads(Path(folder, STATE).read_text())
    except FileNotFoundError:
        raise ConfigError(f"`shoal up` has not run in {folder}") from None
    except ValueError as error:
        raise ConfigError(f"{Path(folder, STATE)} is not a state of `shoal up` ({error})") from None


# --- requests ---------------------------------------------------------------------------------------------------------


def ask(folder: str, request: dict[str, Any], timeout_s: float = 30.0) -> dict[str, Any]:
    """Send a request to the `shoal up` of a folder and return its answer.

    Raises:
        PeerError: it does not run, or refuses.
        DeadlineError: it does not answer in time.
    """
    if holder(folder) is None:
        raise PeerError(f"`shoal up` is not running in {folder}")
    where = Path(folder, REQUESTS)
    where.mkdir(exist_ok=True)
    name = where / f"{secrets.token_hex(8)}"
    answer = name.with_suffix(".answer")
    write_whole(name.with_suffix(".json"), json.dumps(request))
    end = time.monotonic() + timeout_s
    while not answer.exists():
        if time.monotonic() > end:
            with suppress(FileNotFoundError):
                name.with_suffix(".json").unlink()
            raise DeadlineError(f"`shoal up` in {folder} did not answer within {timeout_s:g} s")
        time.sleep(0.05)
    found = json.loads(answer.read_text())
    answer.unlink()
    if found.get("error"):
        raise PeerError(found["error"])
    return found


def requests(folder: str) -> Iterator[tuple[dict[str, Any], Path]]:
    """The pending requests, each with the path of its answer; unreadable ones are answered with an error."""
    where = Path(folder, REQUESTS)
    for path in sorted(where.glob("*.json")) if where.is_dir() else ():
        answer = path.with_suffix(".answer")
        try:
            request = json.loads(path.read_text())
        except (OSError, ValueError):
            request = {}
        with suppress(FileNotFoundError):
            path.unlink()
        yield request if isinstance(request, dict) else {}, answer


def clear_requests(folder: str) -> None:
    """Delete requests to an earlier `shoal up`."""
    where = Path(folder, REQUESTS)
    for path in where.iterdir() if where.is_dir() else ():
        with suppress(FileNotFoundError):
            path.unlink()


# --- logs -------------------------------------------------------------------------------------------------------------


class Log:
    """The output of one process, in a file that is rotated when full; its last lines are also kept in memory."""

    def __init__(self, path: str, max_bytes: int, files: int) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self.path = path
        self._handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=max_bytes, backupCount=max(1, files), encoding="utf-8", errors="replace", delay=True
        )
        self._last: deque[str] = deque(maxlen=TAIL_LINES)

    def write(self, line: str) -> None:
        """Write one line; if the disk is full the line is lost, but the process keeps running."""
        self._last.append(line)
        self._handler.emit(logging.LogRecord("", logging.INFO, "", 0, line, (), None))

    def tail(self) -> list[str]:
        """The last lines since the process was started."""
        return [line for line in self._last if line.strip()]

    def forget(self) -> None:
        """Clear the tail at a new start of the process."""
        self._last.clear()

    def close(self) -> None:
        self._handler.close()


def log_path(folder: str, name: str) -> str:
    """The path of a process's log."""
    return os.path.join(folder, LOGS, f"{name}.log")
