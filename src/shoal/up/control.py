"""Requests to a running `shoal up` from other commands: restart a process, pause it, follow its log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shoal.errors import DeadlineError, PeerError
from shoal.up.files import ask, holder, read_state


def row_of(folder: str, name: str) -> dict[str, Any]:
    """The supervisor's record of a process."""
    rows = {row["name"]: row for row in read_state(folder)["processes"]}
    if name not in rows:
        raise PeerError(f"there is no process {name!r}; there are {', '.join(rows)}")
    return rows[name]


def wait_for(folder: str, name: str, good: Callable[[dict[str, Any]], bool], what: str, timeout_s: float) -> Any:
    """Wait until ``good`` accepts the state of a process, and return that state.

    Raises:
        PeerError: the process failed, or `shoal up` has ended.
        DeadlineError: it took longer than ``timeout_s``.
    """
    end = time.monotonic() + timeout_s
    while True:
        row = row_of(folder, name)
        if good(row):
            return row
        if row["phase"] == "failed":
            raise PeerError(f"{name} failed: {row['reason']}; see `shoal up logs`")
        if holder(folder) is None:
            raise PeerError(f"`shoal up` in {folder} has ended")
        if time.monotonic() > end:
            raise DeadlineError(f"{name} was not {what} within {timeout_s:g} s; it is {row['phase']}: {row['reason']}")
        time.sleep(0.05)


def restart_process(folder: str, name: str, *, timeout_s: float = 180.0) -> dict[str, Any]:
    """Restart a process and wait until it is ready or done."""
    old_pid = row_of(folder, name)["pid"]
    ask(folder, {"do": "restart", "name": name, "reason": "`shoal up restart`"})
    return wait_for(
        folder, name, lambda row: row["phase"] in ("ready", "done") and row["pid"] != old_pid, "ready", timeout_s
    )


@contextmanager
def held(folder: str, name: str, reason: str, *, timeout_s: float = 180.0) -> Iterator[None]:
    """Stop a process for the duration of the block, then wait until it is ready again.

    The process is also restarted if the block fails.
    """
    ask(folder, {"do": "hold", "name": name, "reason": reason})
    try:
        wait_for(folder, name, lambda row: row["pid"] is None and row["phase"] == "held", "stopped", timeout_s)
        yield
    finally:
        ask(folder, {"do": "release", "name": name, "reason": reason})
    wait_for(folder, name, lambda row: row["phase"] in ("ready", "done"), "ready", timeout_s)


def follow(paths: Mapping[str, str], every_s: float = 0.2) -> Iterator[tuple[str, str]]:
    """(process, line) for each new line in the logs, also when a log is rotated."""
    places = {name: _place(path) for name, path in paths.items()}
    while True:
        for name, path in paths.items():
            inode, at = places[name]
            try:
                with open(path, "rb") as file:
                    if (now := os.fstat(file.fileno()).st_ino) != inode:
                        inode, at = now, 0
                    file.seek(at)
                    found = file.read()
            except FileNotFoundError:
                found = b""
            complete = found.rpartition(b"\n")[0]
            places[name] = (inode, at + len(complete) + bool(complete))
            yield from ((name, line) for line in complete.decode(errors="replace").splitlines())
        time.sleep(every_s)


def _place(path: str) -> tuple[int, int]:
    """(inode of a file, its size)."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_size
