"""One sink for what tables and serving measure; by default the process's Prometheus registry."""

import logging
import re
import threading
from collections.abc import Callable
from typing import Any, Protocol

log = logging.getLogger(__name__)


class MetricsSink(Protocol):
    """Takes measurements. ``tags`` is ``key=value|key=value``. Called from any thread; must not block."""

    def emit_counter(self, name: str, value: float, tags: str) -> None: ...
    def emit_timer(self, name: str, value: float, tags: str) -> None: ...
    def emit_store(self, name: str, value: float, tags: str) -> None: ...


class PrometheusSink:
    """Counters, summaries and gauges in a Prometheus registry; tags become labels.

    A metric's labels are those of its first measurement: later ones fill in missing labels with the empty string.
    Without ``prometheus_client`` it does nothing.
    """

    def __init__(self, registry: Any = None) -> None:
        self._registry = registry
        self._metrics: dict[str, tuple[Any, tuple[str, ...]]] = {}
        self._writers: dict[tuple[str, str], Callable[[float], Any]] = {}
        self._lock = threading.Lock()

    def emit_counter(self, name: str, value: float, tags: str) -> None:
        self._metric("Counter", name, tags, "inc", value)

    def emit_timer(self, name: str, value: float, tags: str) -> None:
        self._metric("Summary", name, tags, "observe", value)

    def emit_store(self, name: str, value: float, tags: str) -> None:
        self._metric("Gauge", name, tags, "set", value)

    def _metric(self, kind: str, name: str, tags: str, verb: str, value: float) -> None:
        write = self._writers.get((name, tags))
        if write is None:
            write = self._writer(kind, name, tags, verb)
            if len(self._writers) < 10_000:
                self._writers[name, tags] = write
        write(value)

    def _writer(self, kind: str, name: str, tags: str, verb: str) -> Callable[[float], Any]:
        """What a measurement is written by; kept for the next one of the same name and tags."""
        try:
            import prometheus_client
        except ImportError:  # metrics are an extra
            return lambda value: None
        labels = dict(part.partition("=")[::2] for part in tags.split("|") if part)  # pyrefly: ignore
        labels = {re.sub(r"[^a-zA-Z0-9_]", "_", key): text for key, text in labels.items()}
        with self._lock:
            if name not in self._metrics:
                registry = self._registry if self._registry is not None else prometheus_client.REGISTRY
                plain = re.sub(r"[^a-zA-Z0-9_:]", "_", name)
                try:
                    metric = getattr(prometheus_client, kind)(plain, name, tuple(labels), registry=registry)
                except ValueError as error:  # somebody else's metric; measuring must not fail what is measured
                    log.warning("metric %s is not kept: %s", name, error)
                    return lambda value: None
                self._metrics[name] = (metric, tuple(labels))
            metric, names = self._metrics[name]
        child = metric.labels(*(labels.get(key, "") for key in names)) if names else metric
        return getattr(child, verb)


_default = PrometheusSink()
_sink: MetricsSink = _default


def set_metrics_sink(sink: MetricsSink | None) -> MetricsSink:
    """Installs the process's sink and returns the former one; ``None`` restores the Prometheus default."""
    global _sink
    former, _sink = _sink, _default if sink is None else sink
    return former


def emit_counter(name: str, value: float, tags: str = "") -> None:
    _sink.emit_counter(name, value, tags)


def emit_timer(name: str, value: float, tags: str = "") -> None:
    _sink.emit_timer(name, value, tags)


def emit_store(name: str, value: float, tags: str = "") -> None:
    _sink.emit_store(name, value, tags)
