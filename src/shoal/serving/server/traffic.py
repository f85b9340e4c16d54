"""`Traffic`: counts and latencies of the requests that a server answers."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from shoal.metrics import SIZES, Histogram, emit_counter, emit_timer
from shoal.observe.recent import RecentErrors

Counted = Sequence[tuple[float, int]]
"""Values and their counts."""


class Traffic:
    """Counts of recent requests of each kind, with latencies and errors."""

    window = 10.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[tuple[float, str, float, int, int]] = deque(maxlen=200_000)
        self._total = 0
        self.failed = 0
        self.batch_requests, self.batch_rows = Histogram(SIZES), Histogram(SIZES)
        """Sizes of the batches that ran, including requests that ran alone."""
        self.errors = RecentErrors()
        self._watched: list[Callable[[], None]] = []

    def watch(self, collect: Callable[[], None]) -> None:
        """Register a function that adds its own counts; `collect` calls it when they are needed."""
        self._watched.append(collect)

    def collect(self) -> None:
        """Add the counts of the registered functions."""
        for each in self._watched:
            each()

    @property
    def total(self) -> int:
        """The number of requests so far."""
        self.collect()
        return self._total

    def add_batch(self, requests: int, rows: int) -> None:
        """Count requests that ran as one batch."""
        self.batch_requests.add(requests)
        self.batch_rows.add(rows)

    def add_batches(self, requests: Counted, rows: Counted) -> None:
        """Count batches by their number of requests and by their number of rows."""
        for histogram, sizes in ((self.batch_requests, requests), (self.batch_rows, rows)):
            for size, times in sizes:
                histogram.add(size, times)

    def add(self, model: str, signature: str, code: int, seconds: float, why: str = "") -> None:
        now = time.monotonic()
        if code:
            self.errors.note(why, where=f"{model} {signature}".strip() or "request", level="warning")
        with self._lock:
            self._total += 1
            self.failed += bool(code)
            self._recent.append((now, f"{model} {signature}", seconds, code, 1))
        tags = f"model_name={model}|signature_name={signature}"
        emit_timer("shoal_serving_latency_seconds", seconds, tags)
        if code:
            emit_counter("shoal_serving_errors", 1, f"{tags}|code={int(code)}")

    def add_many(self, model: str, signature: str, seconds: Sequence[float]) -> None:
        """Count requests that were answered together."""
        now, key = time.monotonic(), f"{model} {signature}"
        with self._lock:
            self._total += len(seconds)
            self._recent.extend((now, key, each, 0, 1) for each in seconds)
        tags = f"model_name={model}|signature_name={signature}"
        for each in seconds:
            emit_timer("shoal_serving_latency_seconds", each, tags)

    def add_counted(self, model: str, signature: str, times: Counted) -> None:
        """Count answered requests, given as (seconds, count)."""
        now, key = time.monotonic(), f"{model} {signature}"
        with self._lock:
            self._total += sum(count for _, count in times)
            self._recent.extend((now, key, seconds, 0, count) for seconds, count in times)
        for seconds, count in times:
            emit_timer(
                "shoal_serving_latency_seconds", seconds, f"model_name={model}|signature_name={signature}", count
            )

    def recent(self) -> dict[str, dict[str, float]]:
        """``"model signature"`` -> qps, p50_ms, p99_ms, errors over the last seconds."""
        self.collect()
        horizon = time.monotonic() - self.window
        with self._lock:
            recent = [each for each in self._recent if each[0] >= horizon]
        groups: dict[str, list[tuple[float, int, int]]] = {}
        for _, key, seconds, code, count in recent:
            groups.setdefault(key, []).append((seconds, code, count))
        result = {}
        for key, each in groups.items():
            times, codes, counts = (np.array(column) for column in zip(*sorted(each), strict=True))
            before = counts.cumsum()
            median, slow = (times[np.searchsorted(before, share * before[-1])] for share in (0.5, 0.99))
            result[key] = {
                "qps": float(before[-1]) / self.window,
                "p50_ms": float(median) * 1e3,
                "p99_ms": float(slow) * 1e3,
                "errors": int(counts[codes != 0].sum()),
            }
        return result
