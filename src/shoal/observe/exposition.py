"""Renders figures that are computed on request in Prometheus' text format."""

from collections.abc import Iterable, Iterator
from typing import Any

from shoal.errors import missing_extra
from shoal.metrics import Histogram


class Family:
    """A metric and its samples.

    Args:
        name: the metric's name, without the ``_total`` of counters.
        kind: gauge, counter or histogram.
        text: its description.
        labels: the label names.
    """

    def __init__(self, name: str, kind: str, text: str, labels: tuple[str, ...] = ()) -> None:
        self.name, self.kind, self.text, self.labels = name, kind, text, labels
        self.samples: list[tuple[tuple[str, ...], Any]] = []

    def add(self, value: float | Histogram, *labels: str) -> "Family":
        """Add a sample, with a value for each label."""
        self.samples.append((labels, value))
        return self

    def metric(self) -> Any:
        """The family as a ``prometheus_client`` metric."""
        from prometheus_client import core

        kind = {
            "gauge": core.GaugeMetricFamily, "counter": core.CounterMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }[self.kind]  # fmt: skip
        made: Any = kind(self.name, self.text, labels=self.labels)
        for labels, value in self.samples:
            if isinstance(value, Histogram):
                made.add_metric(labels, value.cumulative(), value.sum)
            else:
                made.add_metric(labels, value)
        return made


def render(families: Iterable[Family]) -> bytes:
    """The families as text."""
    try:
        import prometheus_client
    except ImportError:
        raise missing_extra("prometheus-client", "server") from None
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(_Collector(families))
    return prometheus_client.generate_latest(registry)


class _Collector:
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Any]:
        for each in self._families:
            yield each.metric()
