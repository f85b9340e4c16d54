"""Files of JSON lines that others may rotate: the access log and the audit log."""

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
    """Appends JSON objects to a file, which is opened anew when it was moved away; ``-`` is standard error.

    A disk that is full costs lines, not requests.
    """

    def __init__(self, path: str | Path) -> None:
        self._handler: logging.Handler
        if str(path) == "-":
            self._handler = logging.StreamHandler(sys.stderr)
        else:
            try:
                self._handler = logging.handlers.WatchedFileHandler(path, encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"the log {path} cannot be written: {error.strerror or error}") from None
        self._handler.handleError = lambda record: None

    def write(self, fields: dict[str, Any]) -> None:
        text = json.dumps(fields, default=str)
        self._handler.handle(logging.LogRecord("", logging.INFO, "", 0, text, None, None))

    def close(self) -> None:
        self._handler.close()


def stamp(at: float) -> str:
    """``2026-11-17T10:00:00.123Z`` of Unix seconds."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at))}.{int(at % 1 * 1000):03d}Z"


class AccessLog:
    """One line per request: a share of those that went well, and those that failed, up to a bound.

    Args:
        path: of the file; ``-`` is standard error.
        share: of the requests that went well, from 0 to 1.
        max_failures: lines per second for requests that failed.
    """

    def __init__(self, path: str | Path, share: float = 0.01, max_failures: int = 100) -> None:
        if not 0 <= share <= 1:
            raise ConfigError(f"the share of requests in the access log must be from 0 to 1, got {share:g}")
        self._lines = Lines(path)
        self.every = round(1 / share) if share else 0
        """One in so many requests is logged; 0: none."""
        self._max_failures = max_failures
        self._lock = threading.Lock()
        self._second, self._failures = 0, 0
        self.left_out = 0
        """Lines about failures that were left out."""

    def may_tell_failure(self) -> bool:
        """Whether one more failed request may be logged in this second."""
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
        """A line about a request that began at Unix seconds ``begun``; empty fields are left out."""
        kept = {key: value for key, value in fields.items() if value not in ("", None)}
        self._lines.write({"time": stamp(begun), "seconds": round(seconds, 6), **kept})

    def close(self) -> None:
        self._lines.close()
