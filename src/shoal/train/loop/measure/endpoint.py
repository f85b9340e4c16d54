"""``[out] metrics``: what a run is doing, as Prometheus metrics over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shoal.errors import ConfigError, missing_extra

_GAUGES = {
    "auc": "Of all samples so far, each predicted before it was learnt",
    "window_auc": "The same of the newest samples",
    "logloss": "Mean loss of a sample",
    "calibration": "Predicted clicks over clicks",
    "rows": "Rows of all tables",
    "table_bytes": "Memory of the tables in this process",
    "epoch": "The pass over the files",
    "lag_records": "Records that the sources of all ranks have and that were not read",
    "lag_s": "Age of the last record that was read, on the rank that is furthest behind",
}


class Endpoint:
    """Serves /metrics of this process, with those of the run among them, until `close`.

    Args:
        address: ``host:port``; port 0 takes a free one.
        progress: (step, samples) now, which any thread may ask for.
        trip: why the guard has stopped the pushes; "" while it has not.
    """

    def __init__(self, address: str, progress: Callable[[], tuple[int, int]], trip: Callable[[], str]) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise missing_extra("prometheus-client", "server") from None
        self._registry: Any = prometheus_client.REGISTRY
        self._progress, self._trip = progress, trip
        self._values: Mapping[str, Any] = {}
        host, _, port = address.rpartition(":")
        try:
            self._server, self._thread = prometheus_client.start_http_server(int(port), host.strip("[]"))
        except OSError as error:
            raise ConfigError(f"[out] metrics: {address} cannot be listened on ({error.strerror or error})") from None
        self.address = f"{host}:{self._server.server_port}"
        self._registry.register(self)

    def report(self, values: Mapping[str, Any]) -> None:
        """The numbers of the newest report."""
        self._values = dict(values)

    def collect(self) -> Iterator[Any]:
        """The metrics of now, for prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        step, samples = self._progress()
        values = self._values
        yield GaugeMetricFamily("shoal_train_step", "Steps so far", value=step)
        yield CounterMetricFamily("shoal_train_samples", "Samples learnt", value=samples)
        yield CounterMetricFamily("shoal_train_bad_rows", "Rows left out", value=values.get("bad_rows", 0))
        for name, text in _GAUGES.items():
            if isinstance(values.get(name), int | float):
                yield GaugeMetricFamily(f"shoal_train_{name}", text, value=values[name])
        reason = self._trip()
        tripped = GaugeMetricFamily(
            "shoal_train_guard_tripped", "1 while the guard has stopped pushes and exports", labels=("reason",)
        )
        tripped.add_metric((reason,), float(bool(reason)))
        yield tripped

    def close(self) -> None:
        """Ends the server."""
        self._registry.unregister(self)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
