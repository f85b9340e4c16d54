"""``--metrics-port``: the process's metrics over HTTP, for Prometheus and `shoal top`."""

from __future__ import annotations

import json
from collections.abc import Callable

from shoal.errors import ConfigError, missing_extra


def serve_metrics(port: int | None, *, as_json: bool) -> Callable[[], None]:
    """Serves them on 127.0.0.1 and prints where, or does nothing without a port; what ends it."""
    if port is None:
        return lambda: None
    try:
        import prometheus_client
    except ImportError:
        raise missing_extra("prometheus-client", "server") from None
    try:
        server, thread = prometheus_client.start_http_server(port, "127.0.0.1")
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--metrics-port {port}: {getattr(error, 'strerror', None) or error}") from None
    address = f"127.0.0.1:{server.server_port}"
    print(json.dumps({"metrics": address}) if as_json else f"metrics on http://{address}/metrics", flush=True)

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join(5)

    return end
