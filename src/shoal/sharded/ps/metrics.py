"""What a parameter server counts, for Prometheus. Counting is cheap: plain additions."""

from __future__ import annotations

import bisect
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
STEPS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 1000, 10000)


class Histogram:
    """Cumulative buckets, a count and a sum. Adding is not locked: a lost count under threads is worth the speed."""

    __slots__ = ("bounds", "buckets", "count", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.buckets[bisect.bisect_left(self.bounds, value)] += 1
        self.count += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), as Prometheus counts."""
        bounds = [*map(str, self.bounds), "+Inf"]
        return list(zip(bounds, itertools.accumulate(self.buckets), strict=True))


class Metrics:
    """A server's counters; `text` renders them with the gauges that the caller adds."""

    def __init__(self) -> None:
        self.started = time.time()
        self.requests: dict[tuple[str, str], int] = defaultdict(int)
        self.seconds: dict[str, Histogram] = defaultdict(lambda: Histogram(SECONDS))
        self.sync_seconds = Histogram(SECONDS)
        self.staleness = Histogram(STEPS)
        self.bytes_in = 0
        self.bytes_out = 0
        self.bad_messages = 0

    def done(self, op: str, status: str, seconds: float) -> None:
        self.requests[op, status] += 1
        self.seconds[op].add(seconds)

    def text(self, gauges: dict[str, Any], tables: dict[str, dict[str, Any]]) -> str:
        """What Prometheus reads: these counters, ``gauges`` by name (counters, if it ends with ``_total``) and what is
        known of each table."""
        import prometheus_client

        registry = prometheus_client.CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self, gauges, tables))
        return prometheus_client.generate_latest(registry).decode()


class _Collector:
    """The metrics of one moment."""

    def __init__(self, metrics: Metrics, gauges: dict[str, Any], tables: dict[str, dict[str, Any]]) -> None:
        self._metrics, self._gauges, self._tables = metrics, gauges, tables

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        metrics = self._metrics
        requests = CounterMetricFamily(
            "shoal_ps_requests", "Requests answered, by operation and outcome.", labels=("op", "status")
        )
        for (op, status), count in sorted(metrics.requests.copy().items()):
            requests.add_metric((op, status), count)
        yield requests
        seconds = HistogramMetricFamily(
            "shoal_ps_request_seconds", "From the arrival of a request to its reply.", labels=("op",)
        )
        for op, histogram in sorted(metrics.seconds.copy().items()):
            seconds.add_metric((op,), histogram.cumulative(), histogram.sum)
        yield seconds
        for name, text, histogram in (
            ("log_sync_seconds", "Waits for the disk, one per group of writes.", metrics.sync_seconds),
            (
                "staleness_updates",
                "Updates of the shard between the lookup behind an update and the update.",
                metrics.staleness,
            ),
        ):
            yield HistogramMetricFamily(
                f"shoal_ps_{name}", text, buckets=histogram.cumulative(), sum_value=histogram.sum
            )
        own = {
            "received_bytes_total": metrics.bytes_in,
            "sent_bytes_total": metrics.bytes_out,
            "bad_messages_total": metrics.bad_messages,
        }
        for name, value in (own | self._gauges).items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(f"shoal_ps_{name}", name.replace("_", " "), value=value)
        for field in ("rows", "bytes"):
            gauge = GaugeMetricFamily(f"shoal_ps_table_{field}", f"{field} of a table", labels=("table",))
            for table, known in self._tables.items():
                gauge.add_metric((table,), known[field])
            yield gauge
