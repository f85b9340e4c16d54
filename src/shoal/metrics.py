"""One sink for what tables and serving measure; by default the process's Prometheus registry."""

import bisect
import itertools
import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds of histograms of durations; `FRESHNESS` for those of minutes."""
FRESHNESS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Histogram:
    """Cumulative buckets, a count and a sum. Adding is not locked: a lost count under threads is worth the speed."""

    __slots__ = ("bounds", "buckets", "count", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.buckets[bisect.bisect_left(self.bounds, value)] += times
        self.count += times
        self.sum += times * value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), as Prometheus counts."""
        bounds = [*map(str, self.bounds), "+Inf"]
        return list(zip(bounds, itertools.accumulate(self.buckets), strict=True))


class MetricsSink(Protocol):
    """Takes measurements. ``tags`` is ``key=value|key=value``. Called from any thread; must not block."""

    def emit_counter(self, name: str, value: float, tags: str) -> None: ...
    def emit_timer(self, name: str, value: float, tags: str) -> None: ...
    def emit_store(self, name: str, value: float, tags: str) -> None: ...


class PrometheusSink:
    """Counters, timers and gauges in a Prometheus registry; tags become labels.

    Timers whose name ends with ``_seconds`` are histograms, others summaries without quantiles. A metric's labels are
    those of its first measurement: later ones fill in missing labels with the empty string. Without
    ``prometheus_client`` it does nothing.
    """

    def __init__(self, registry: Any = None) -> None:
        self._registry = registry
        self._metrics: dict[str, tuple[Any, tuple[str, ...]]] = {}
        self._writers: dict[tuple[str, str], Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def emit_counter(self, name: str, value: float, tags: str) -> None:
        self._metric("Counter", name, tags, "inc", value)

    def emit_timer(self, name: str, value: float, tags: str) -> None:
        kind, verb = ("Timer", "add") if name.endswith("_seconds") else ("Summary", "observe")
        self._metric(kind, name, tags, verb, value)

    def emit_timers(self, name: str, value: float, tags: str, times: int) -> None:
        """The same value several times, of a name that ends with ``_seconds``."""
        self._metric("Timer", name, tags, "add", value, times)

    def emit_store(self, name: str, value: float, tags: str) -> None:
        self._metric("Gauge", name, tags, "set", value)

    def _metric(self, kind: str, name: str, tags: str, verb: str, *values: float) -> None:
        write = self._writers.get((name, tags))
        if write is None:
            write = self._writer(kind, name, tags, verb)
            if len(self._writers) < 10_000:
                self._writers[name, tags] = write
        write(*values)

    def _writer(self, kind: str, name: str, tags: str, verb: str) -> Callable[..., Any]:
        """What a measurement is written by; kept for the next one of the same name and tags."""
        try:
            import prometheus_client
        except ImportError:  # metrics are an extra
            return lambda *values: None
        labels = dict(part.partition("=")[::2] for part in tags.split("|") if part)  # pyrefly: ignore
        labels = {re.sub(r"[^a-zA-Z0-9_]", "_", key): text for key, text in labels.items()}
        with self._lock:
            if name not in self._metrics:
                registry = self._registry if self._registry is not None else prometheus_client.REGISTRY
                plain = re.sub(r"[^a-zA-Z0-9_:]", "_", name)
                try:
                    if kind == "Timer":
                        metric: Any = _Timer(plain, tuple(labels))
                        registry.register(metric)
                    else:
                        metric = getattr(prometheus_client, kind)(plain, name, tuple(labels), registry=registry)
                except ValueError as error:  # somebody else's metric; measuring must not fail what is measured
                    log.warning("metric %s is not kept: %s", name, error)
                    return lambda *values: None
                self._metrics[name] = (metric, tuple(labels))
            metric, names = self._metrics[name]
        child = metric.labels(*(labels.get(key, "") for key in names)) if names or kind == "Timer" else metric
        return getattr(child, verb)


class _Timer:
    """A histogram for each set of labels, as a collector of Prometheus; several times faster than the library's own."""

    def __init__(self, name: str, labels: tuple[str, ...]) -> None:
        self._name, self._labels = name, labels
        self._bounds = FRESHNESS if "freshness" in name else SECONDS
        self._children: dict[tuple[str, ...], Histogram] = {}

    def labels(self, *values: str) -> Histogram:
        return self._children.setdefault(values, Histogram(self._bounds))

    def describe(self) -> list[Any]:
        """Asked for when it is registered: its name must be free."""
        from prometheus_client.core import HistogramMetricFamily

        return [HistogramMetricFamily(self._name, self._name)]

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(self._name, self._name, labels=self._labels)
        for values, histogram in list(self._children.items()):
            family.add_metric(values, histogram.cumulative(), histogram.sum)
        yield family


_default = PrometheusSink()
_sink: MetricsSink = _default


def set_metrics_sink(sink: MetricsSink | None) -> MetricsSink:
    """Installs the process's sink and returns the former one; ``None`` restores the Prometheus default."""
    global _sink
    former, _sink = _sink, _default if sink is None else sink
    return former


def emit_counter(name: str, value: float, tags: str = "") -> None:
    _sink.emit_counter(name, value, tags)


def emit_timer(name: str, value: float, tags: str = "", times: int = 1) -> None:
    """Measures ``value``, as often as ``times`` says; a sink with ``emit_timers`` hears of that in one call."""
    many = getattr(_sink, "emit_timers", None) if times > 1 else None
    if many is not None:
        many(name, value, tags, times)
        return
    for _ in range(times):
        _sink.emit_timer(name, value, tags)


def emit_store(name: str, value: float, tags: str = "") -> None:
    _sink.emit_store(name, value, tags)
