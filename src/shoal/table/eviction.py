"""A thread that periodically removes expired rows from a table, by the table's clock."""

from __future__ import annotations

import logging
import threading
import weakref
from datetime import timedelta
from typing import Any

log = logging.getLogger(__name__)


class BackgroundEviction:
    """Evicts once per ``period``, first after one ``period``. Ends when the table is collected or with `stop`."""

    def __init__(self, table: Any, period: timedelta) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_run,
            args=(weakref.ref(table), min(period.total_seconds(), threading.TIMEOUT_MAX), self._stop),
            name=f"evict-{table.name}",
            daemon=True,
        )
        weakref.finalize(table, self._stop.set)
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread and waits until it has ended; immediate unless an eviction is running."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _run(table_ref: weakref.ref[Any], period_s: float, stop: threading.Event) -> None:
    while not stop.wait(period_s):
        table = table_ref()
        if table is None:
            return
        try:
            removed = table.evict()
        except Exception:
            log.exception("background eviction of table %r failed; retrying in %g s", table.name, period_s)
        else:
            if removed:
                log.info("table %r: %d expired rows removed, %d left", table.name, removed, table.size())
        del table
