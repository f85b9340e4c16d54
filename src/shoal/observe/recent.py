"""The last errors and warnings of a process, for its status page; repeated ones are counted."""

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any

KEPT = 50
MAX_TEXT = 500


@dataclass(slots=True)
class Trouble:
    """An error or warning."""

    time: float
    """When it happened last."""
    level: str
    """error or warning."""
    where: str
    text: str
    count: int = 1


class RecentErrors(logging.Handler):
    """Keeps the last distinct errors and warnings that are logged or passed to :meth:`note`."""

    def __init__(self, kept: int = KEPT) -> None:
        super().__init__(logging.WARNING)
        self._kept = kept
        self._found: OrderedDict[tuple[str, str], Trouble] = OrderedDict()
        self._guard = threading.Lock()
        self.total = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                text += f": {record.exc_info[1]!r}"
        except Exception:
            text = str(record.msg)
        self.note(text, where=record.name, level="error" if record.levelno >= logging.ERROR else "warning")
        if logging.lastResort is not None and not _has_other_handlers():  # logging would otherwise print it to stderr
            logging.lastResort.handle(record)

    def note(self, text: str, *, where: str = "", level: str = "error") -> None:
        """Record one error or warning."""
        text = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} …"
        with self._guard:
            self.total += 1
            known = self._found.pop((where, text), None)
            count = 1 if known is None else known.count + 1
            self._found[where, text] = Trouble(time.time(), level, where, text, count)
            while len(self._found) > self._kept:  # drop warnings first: they must not displace errors
                oldest = next((key for key, each in self._found.items() if each.level == "warning"), None)
                self._found.pop(oldest if oldest is not None else next(iter(self._found)))

    def read(self) -> list[dict[str, Any]]:
        """The recorded errors and warnings, newest first."""
        with self._guard:
            return [asdict(each) for each in reversed(self._found.values())]


_LOGGER = logging.getLogger("shoal")


def _has_other_handlers() -> bool:
    handlers = [*_LOGGER.handlers, *logging.getLogger().handlers]
    return any(not isinstance(each, RecentErrors) for each in handlers)


def watch_log(errors: RecentErrors) -> None:
    """Record the errors and warnings that the library logs in this process, until :func:`forget_log`."""
    _LOGGER.addHandler(errors)


def forget_log(errors: RecentErrors) -> None:
    _LOGGER.removeHandler(errors)
