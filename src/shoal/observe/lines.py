"""Files of JSON lines that other programs may rotate: the access log and the audit log."""

import json
import logging
import logging.handlers
import sys
import threading
import time
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError


class Lines:
    """Appends JSON objects to a file, which is reopened when it has been moved; ``-`` is standard error.

    If the disk is full, lines are lost, but requests do not fail.
    """

    def __init__(self, path: str | Path) -> None:
        self._handler: logging.Handler
        if str(path) == "-":
            self._handler = logging.StreamHandler(sys.stderr)
        else:
            try:
                self._handler = logging.handlers.WatchedFileHandler(path, encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"cannot write the log {path}: {error.strerror or error}") from None
        self._handler.handleError = lambda record: None

    def write(self, fields: dict[str, Any]) -> None:
        text = json.dumps(fields, default=str)
        self._handler.handle(logging.LogRecord("", logging.INFO, "", 0, text, None, None))

    def close(self) -> None:
        self._handler.close()


def stamp(at: float) -> str:
    """Format Unix seconds as ``2026-11-17T10:00:00.123Z``."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at))}.{int(at % 1 * 1000):03d}Z"


class AccessLog:
    """One line per request: a share of successful requests, and failed ones up to a limit.

    Args:
        path: the file; ``-`` is standard error.
        share: the share of successful requests to log, from 0 to 1.
        max_failures: maximum lines per second for failed requests.
    """

    def __init__(self, path: str | Path, share: float = 0.01, max_failures: int = 100) -> None:
        if not 0 <= share <= 1:
            raise ConfigError(f"the share of requests in the access log must be from 0 to 1, got {share:g}")
        self._lines = Lines(path)
        self.every = round(1 / share) if share else 0
        """One in this many requests is logged; 0: none."""
        self._max_failures = max_failures
        self._lock = threading.Lock()
        self._second, self._failures = 0, 0
        self.left_out = 0
        """The number of failed requests that were not logged."""

    def may_log_failure(self) -> bool:
        """Whether another failed request may be logged in this second."""
        with self._lock:
            second = int(time.monotonic())
            if second != self._second:
                self._second, self._failures = second, 0
            self._failures += 1
            if self._failures <= self._max_failures:
                return True
            self.left_out += 1
            return False

    def write(self, begun: float, seconds: float, **fields: Any) -> None:
        """Write a line for a request that began at Unix seconds ``begun``; empty fields are omitted."""
        kept = {key: value for key, value in fields.items() if value not in ("", None)}
        self._lines.write({"time": stamp(begun), "seconds": round(seconds, 6), **kept})

    def close(self) -> None:
        self._lines.close()
