"""A process's figures over time, for its status page: recently every two seconds, and every minute for a day."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

log = logging.getLogger(__name__)

Figures = Mapping[str, float | int | None]


class Ring:
    """The last readings at one interval: times, and one list of values per figure."""

    def __init__(self, every_s: float, length: int) -> None:
        self.every_s = every_s
        self._rows: deque[tuple[float, dict[str, float | None]]] = deque(maxlen=length)

    def add(self, now: float, values: dict[str, float | None]) -> None:
        self._rows.append((now, values))

    def read(self) -> dict[str, Any]:
        """``every_s``, ``times`` (Unix seconds) and ``series``: name -> values, None for missing ones."""
        rows = list(self._rows)
        names = dict.fromkeys(name for _, values in rows for name in values)
        return {
            "every_s": self.every_s,
            "times": [round(at, 1) for at, _ in rows],
            "series": {name: [_short(values.get(name)) for _, values in rows] for name in names},
        }


class History:
    """Reads figures periodically on its own thread, until `close`.

    Args:
        read: returns the current figures by name, None for unknown ones. Called every ``every_s`` seconds.
        counters: names of figures that only increase; their increase per second is kept.
    """

    def __init__(
        self,
        read: Callable[[], Figures],
        counters: Collection[str] = (),
        *,
        every_s: float = 2.0,
        length: int = 300,
        coarse: int = 30,
        coarse_length: int = 1440,
    ) -> None:
        self._read, self._counters = read, frozenset(counters)
        self._recent, self._day = Ring(every_s, length), Ring(every_s * coarse, coarse_length)
        self._coarse = coarse
        self._pending: list[dict[str, float | None]] = []
        self._before: tuple[float, dict[str, float]] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-history", daemon=True)

    def start(self) -> "History":
        self._thread.start()
        return self

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def read(self, span: str = "recent") -> dict[str, Any]:
        """The ``recent`` readings, or those of the ``day``, each the mean of a minute."""
        return (self._day if span == "day" else self._recent).read()

    def sample(self, now: float | None = None) -> None:
        """Take one reading."""
        clock = time.monotonic() if now is None else now
        figures = {name: float(value) for name, value in self._read().items() if value is not None}
        figures = {name: value for name, value in figures.items() if math.isfinite(value)}
        values: dict[str, float | None] = dict(figures)
        for name in self._counters:
            values[name] = self._rate(name, figures, clock)
        self._before = clock, {name: figures[name] for name in self._counters if name in figures}
        at = time.time() if now is None else now
        self._recent.add(at, values)
        self._pending.append(values)
        if len(self._pending) >= self._coarse:
            names = dict.fromkeys(name for each in self._pending for name in each)
            self._day.add(at, {name: _mean([each.get(name) for each in self._pending]) for name in names})
            self._pending.clear()

    def _rate(self, name: str, figures: Mapping[str, float], clock: float) -> float | None:
        if self._before is None or name not in figures or name not in self._before[1]:
            return None
        seconds, gained = clock - self._before[0], figures[name] - self._before[1][name]
        return gained / seconds if seconds > 0 and gained >= 0 else None

    def _run(self) -> None:
        while True:
            try:
                self.sample()
            except Exception:  # an error in the status page must not stop the process
                log.debug("could not read the figures for the status page", exc_info=True)
            if self._stop.wait(self._recent.every_s):
                return


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _short(value: float | None) -> float | None:
    """Round to six digits: enough for a chart, and a smaller answer."""
    return None if value is None else float(f"{value:.6g}")
