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
        "models": models,
        "tables": tables,
        "traffic": [{"what": key, **values} for key, values in sorted(server.traffic.recent().items())],
    }
