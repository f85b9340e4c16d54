"""``--metrics-port``: the process's metrics over HTTP, for Prometheus and `shoal top`."""

from __future__ import annotations

import json
from collections.abc import Callable

from shoal.errors import ConfigError, missing_extra


def serve_metrics(port: int | None, *, as_json: bool, at: str | None = None) -> Callable[[], None]:
    """Serves them on 127.0.0.1, or ``at`` a host:port, and prints where; without either does nothing. What ends it."""
    host = "127.0.0.1"
    if at is not None:
        host, _, text = at.rpartition(":")
        if not host or not text.isdecimal():
            raise ConfigError(f"--metrics must be HOST:PORT, got {at!r}")
        host, port = host.strip("[]"), int(text)
    if port is None:
        return lambda: None
    try:
        import prometheus_client
    except ImportError:
        raise missing_extra("prometheus-client", "server") from None
    try:
        server, thread = prometheus_client.start_http_server(port, host)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"metrics at {host}:{port}: {getattr(error, 'strerror', None) or error}") from None
    address = f"{host}:{server.server_port}"
    print(json.dumps({"metrics": address}) if as_json else f"metrics on http://{address}/metrics", flush=True)

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join(5)

    return end
