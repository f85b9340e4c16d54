"""Timings per named operation, kept while ``BYTEPS_TELEMETRY_ON`` is 1."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.comm.launch.launch_env import env_int


class Telemetry:
    """Count, mean and standard deviation per name, updated incrementally."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats: dict[str, tuple[int, float, float]] = {}  # count, mean, sum of squared differences

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        if env_int("BYTEPS_TELEMETRY_ON", 0) != 1:
            yield
            return
        began = time.perf_counter()
        yield
        self.add(name, (time.perf_counter() - began) * 1e3)

    def add(self, name: str, ms: float) -> None:
        with self._lock:
            count, mean, squares = self._stats.get(name, (0, 0.0, 0.0))
            count += 1
            step = ms - mean
            mean += step / count
            self._stats[name] = (count, mean, squares + step * (ms - mean))

    def rows(self) -> list[tuple[str, float, float, int]]:
        with self._lock:
            return [(n, mean, math.sqrt(squares / count), count) for n, (count, mean, squares) in self._stats.items()]

    def clear(self) -> None:
        with self._lock:
            self._stats.clear()


TELEMETRY = Telemetry()
