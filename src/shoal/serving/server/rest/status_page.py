"""The status page of a model server: what it serves, how fresh it is, how busy it is."""

import time
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.proto.serving.tf_serving_pb2 import ModelVersionStatus

PAGE = (Path(__file__).parent / "status.html").read_bytes()


def snapshot(server: Any) -> dict[str, Any]:
    """What the page shows, as plain values."""
    models, tables = [], []
    now = time.time()
    for model in sorted(server.models(), key=lambda each: each.name):
        versions = [
            {
                "version": each.version,
                "state": ModelVersionStatus.State.Name(each.state),
                "error": each.status.error_message,
            }
            for each in model.statuses()
        ]
        current = model.current()
        servable = current.servable if current is not None else None
        signatures = sorted(servable.signatures) if servable is not None else []
        models.append({"name": model.name, "versions": versions, "signatures": signatures})
        for view in list(servable.tables.values()) if servable is not None else ():
            tables.append(
                {
                    "model": model.name,
                    "name": view.name,
                    "dims": view.dims,
                    "rows": view.rows(),
                    "bytes": view.memory_bytes(),
                    "pushes": view.pushes,
                    "pushed_rows": view.pushed_rows,
                    "lag_s": view.lag if view.lag else None,
                    "since_push_s": now - view.last_push if view.last_push else None,
                }
            )
    return {
        "version": __version__,
        "uptime_s": now - server.started_at,
        "requests": server.traffic.total,
        "failed": server.traffic.failed,
        "refused": server.admission.refused,
        "models": models,
        "tables": tables,
        "traffic": [{"what": key, **values} for key, values in sorted(server.traffic.recent().items())],
    }


# Metric -> (type, key of a table in the snapshot); counters end in _total.
_OF_TABLES = {
    "shoal_serving_table_rows": ("gauge", "rows"),
    "shoal_serving_table_bytes": ("gauge", "bytes"),
    "shoal_serving_pushed_rows_total": ("counter", "pushed_rows"),
    "shoal_serving_lag_seconds": ("gauge", "lag_s"),
    "shoal_serving_since_push_seconds": ("gauge", "since_push_s"),
}


def metrics_text(server: Any) -> str:
    """The figures of the page for Prometheus, in addition to what is counted as requests come."""
    found = snapshot(server)
    lines = []
    for name, kind, value in (
        ("shoal_serving_requests_total", "counter", found["requests"]),
        ("shoal_serving_failed_total", "counter", found["failed"]),
        ("shoal_serving_overload_refused_total", "counter", found["refused"]),
        ("shoal_serving_uptime_seconds", "gauge", found["uptime_s"]),
    ):
        lines += [f"# TYPE {name} {kind}", f"{name} {value}"]
    for name, (kind, key) in _OF_TABLES.items():
        lines.append(f"# TYPE {name} {kind}")
        for table in found["tables"]:
            if table[key] is not None:
                labels = f'model="{_escape(table["model"])}",table="{_escape(table["name"])}"'
                lines.append(f"{name}{{{labels}}} {table[key]}")
    return "\n".join(lines) + "\n"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
