"""The lock of a server's directory: one process can serve from it, or any number can read it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import ConfigError

WAIT_S = 10.0  # how long to wait for the previous server of a directory to end


def lock(directory: Path, *, shared: bool = False, wait_s: float | None = None) -> int:
    """Lock a directory; returns a file descriptor that holds the lock until it is closed or the process ends.

    Raises:
        ConfigError: for longer than ``wait_s``, another process serves from the directory or (unless ``shared``)
        reads it.
    """
    try:
        fd = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"the directory of a parameter server cannot be locked: {error}") from error
    end = time.monotonic() + (WAIT_S if wait_s is None else wait_s)
    while True:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return fd
        except OSError:
            if time.monotonic() < end:
                time.sleep(0.05)
                continue
            os.close(fd)
            if shared:
                raise ConfigError(
                    f"a parameter server serves from {directory}; end it with SIGTERM first, so that its last "
                    "checkpoint holds everything"
                ) from None
            raise ConfigError(f"another process serves from {directory}; end it first") from None


@contextlib.contextmanager
def not_served(directory: Path) -> Iterator[None]:
    """Keep servers from starting in a directory inside the ``with`` block; `ConfigError` if one is running.

    A read-only folder, such as a copy on a read-only file system, cannot have a server and is not locked.
    """
    if not os.access(directory, os.W_OK) and not (directory / "lock").exists():
        yield
        return
    fd = lock(directory, shared=True, wait_s=0)
    try:
        yield
    finally:
        os.close(fd)
