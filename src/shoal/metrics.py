"""The sink of all metrics; by default the process's Prometheus registry."""

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
"""Bucket bounds of histograms of durations; `FRESHNESS` has those for minutes."""
FRESHNESS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Histogram:
    """Cumulative buckets, a count and a sum. Adding takes no lock, for speed: threads may lose a count."""

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
        """(upper bound, number of values up to it) per bucket, as in Prometheus."""
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
        """Record the same value several times; ``name`` must end with ``_seconds``."""
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
        """The function that records a measurement, cached by name and tags."""
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
                except ValueError as error:  # another library's metric has this name; metrics must never raise
                    log.warning("metric %s is not recorded: %s", name, error)
                    return lambda *values: None
                self._metrics[name] = (metric, tuple(labels))
            metric, names = self._metrics[name]
        child = metric.labels(*(labels.get(key, "") for key in names)) if names or kind == "Timer" else metric
        return getattr(child, verb)


class _Timer:
    """A Prometheus collector with one histogram per set of labels; much faster than ``prometheus_client``'s."""

    def __init__(self, name: str, labels: tuple[str, ...]) -> None:
        self._name, self._labels = name, labels
        self._bounds = FRESHNESS if "freshness" in name else SECONDS
        self._children: dict[tuple[str, ...], Histogram] = {}

    def labels(self, *values: str) -> Histogram:
        return self._children.setdefault(values, Histogram(self._bounds))

    def describe(self) -> list[Any]:
        """The metric without samples; the registry checks with it that the name is free."""
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
    """Install the process's sink and return the previous one; ``None`` restores the Prometheus default."""
    global _sink
    previous, _sink = _sink, _default if sink is None else sink
    return previous


def emit_counter(name: str, value: float, tags: str = "") -> None:
    _sink.emit_counter(name, value, tags)


def emit_timer(name: str, value: float, tags: str = "", times: int = 1) -> None:
    """Emit ``value`` ``times`` times; a sink with ``emit_timers`` gets a single call."""
    many = getattr(_sink, "emit_timers", None) if times > 1 else None
    if many is not None:
        many(name, value, tags, times)
        return
    for _ in range(times):
        _sink.emit_timer(name, value, tags)


def emit_store(name: str, value: float, tags: str = "") -> None:
    _sink.emit_store(name, value, tags)
