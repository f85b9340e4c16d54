"""A model server's status page: its models, their freshness, and its load."""

import time
from collections.abc import Iterator
from typing import Any

from shoal.metrics import Histogram
from shoal.observe.endpoint import TEXT, Shown, process_metrics
from shoal.observe.exposition import Family, render
from shoal.observe.history import Figures
from shoal.observe.page import Part, Tone, chart, page, pill, table, tile
from shoal.proto.serving.tf_serving_pb2 import ModelVersionStatus


def snapshot(server: Any) -> dict[str, Any]:
    """A model server's status as plain values."""
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
        models.append(
            {
                "name": model.name,
                "versions": versions,
                "signatures": sorted(servable.signatures) if servable is not None else [],
                "serves": current.number if current is not None else None,
                "step": servable.step if servable is not None else None,
                "age_s": now - servable.fresh_at if servable is not None and servable.fresh_at else None,
                "net": getattr(servable.program, "runs", None) if servable is not None else None,
            }
        )
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
        "uptime_s": now - server.started_at,
        "front": server.front,
        "requests": server.traffic.total,
        "failed": server.traffic.failed,
        "refused": server.admission.refused,
        "rate_refused": server.rates.refused if server.rates is not None else 0,
        "not_ready": server.not_ready(),
        "batches": {"count": server.traffic.batch_rows.count, "mean_rows": _mean(server.traffic.batch_rows),
                    "mean_requests": _mean(server.traffic.batch_requests)},
        "models": models,
        "tables": tables,
        "traffic": [
            {"what": key, **values, "p50_s": values["p50_ms"] / 1e3, "p99_s": values["p99_ms"] / 1e3}
            for key, values in sorted(server.traffic.recent().items())
        ],
    }  # fmt: skip


class ShownServer(Shown):
    """The status page of a ``ModelServer``."""

    counters = ("requests", "failed", "refused")

    def __init__(self, server: Any) -> None:
        super().__init__()
        self._server = server
        self._sizes: dict[str, tuple[int, float]] = {}
        self.errors = server.traffic.errors

    def status(self) -> dict[str, Any]:
        return snapshot(self._server)

    def health(self) -> tuple[bool, str, bytes]:
        if self._server.stopping:
            return False, TEXT, b"this server is stopping\n"
        return True, TEXT, b"ok\n"

    def ready(self) -> str:
        return self._server.not_ready()

    def figures(self) -> Figures:
        found, traffic = snapshot(self._server), self._server.traffic
        return {
            "requests": found["requests"],
            "failed": found["failed"],
            "refused": found["refused"],
            "p50": _worst(found["traffic"], "p50_s"),
            "p99": _worst(found["traffic"], "p99_s"),
            "rows": sum(each["rows"] for each in found["tables"]),
            "step": _worst(found["models"], "step"),
            "age": _worst(found["models"], "age_s"),
            "lag": _worst(found["tables"], "lag_s"),
            "requests_per_batch": self._per_batch("requests", traffic.batch_requests),
            "rows_per_batch": self._per_batch("rows", traffic.batch_rows),
        }

    def _per_batch(self, what: str, sizes: Histogram) -> float | None:
        """The mean batch size since the last reading."""
        before, self._sizes[what] = self._sizes.get(what, (0, 0.0)), (sizes.count, sizes.sum)
        count = sizes.count - before[0]
        return (sizes.sum - before[1]) / count if count else None

    def page(self) -> Part:
        found = self.status()
        models, tables, traffic = found["models"], found["tables"], found["traffic"]
        why = found["not_ready"]
        return page(
            "Shoal model server",
            about=f"{found['front']} front end",
            state=pill("not ready", "bad", why) if why else pill("ready", "good"),
            tiles=[
                tile("requests per second", sum(each["qps"] for each in traffic)),
                tile("p99, last ten seconds", _worst(traffic, "p99_s"), "s"),
                tile("model step", _worst(models, "step")),
                tile("age of the model", _worst(models, "age_s"), "s",
                     hint="since the newest rows were read from the trainer"),
                tile("sync lag, worst table", _worst(tables, "lag_s"), "s",
                     hint="from the oldest gradient of the last push to here"),
                tile("rows", sum(each["rows"] for each in tables)),
                tile("memory of tables", sum(each["bytes"] for each in tables), "bytes"),
                tile("rows per batch", found["batches"]["mean_rows"]),
                tile("requests", found["requests"]),
                tile("failed", found["failed"], tone="bad" if found["failed"] else ""),
                tile("refused: overload", found["refused"], tone="bad" if found["refused"] else ""),
                tile("refused: rate limit", found["rate_refused"], tone="warn" if found["rate_refused"] else ""),
            ],
            charts=[
                chart("requests", {"answered": "requests", "failed": "failed", "refused": "refused"}, "per_s"),
                chart("latency", {"p50": "p50", "p99": "p99"}, "s"),
                chart("batch sizes", {"requests": "requests_per_batch", "rows": "rows_per_batch"}),
                chart("freshness", {"age of the model": "age", "sync lag": "lag"}, "s"),
                chart("model step", {"step": "step"}),
                chart("rows", {"rows": "rows"}),
            ],
            tables=[
                table("Models", ["model", ("version", "n"), "state", ("step", "n"), ("age", "s"), "net",
                                 "signatures"], [
                    [model["name"], str(each["version"]), _state(each), *_if_served(model, each)]
                    for model in models for each in model["versions"]
                ]),
                table("Tables", ["model", "table", ("dim", "n"), ("rows", "n"), ("memory", "bytes"), ("pushes", "n"),
                                 ("rows pushed", "n"), ("sync lag", "s"), ("last push", "ago")], [
                    [each["model"], each["name"], ", ".join(map(str, each["dims"])), each["rows"], each["bytes"],
                     each["pushes"], each["pushed_rows"], each["lag_s"], each["since_push_s"]]
                    for each in tables
                ]),
                table("Requests in the last ten seconds",
                      ["model and signature", ("rate", "per_s"), ("p50", "s"), ("p99", "s"), ("errors", "n")],
                      [[each["what"], each["qps"], each["p50_s"], each["p99_s"], each["errors"]] for each in traffic]),
            ],
        )  # fmt: skip

    def metrics(self) -> bytes:
        self._server.traffic.collect()
        return process_metrics() + render(_families(self._server))


_TONES: dict[str, Tone] = {"AVAILABLE": "good", "END": "bad"}


def _state(version: dict[str, Any]) -> Part:
    unloaded = version["state"] == "END" and not version["error"]
    tone = "" if unloaded else _TONES.get(version["state"], "")
    return pill("unloaded" if unloaded else version["state"].lower(), tone, version["error"])


def _if_served(model: dict[str, Any], version: dict[str, Any]) -> list[Any]:
    """Step, age, net runtime and signatures of the served version; for any other version, its error."""
    if version["version"] != model["serves"]:
        return [None, None, None, version["error"]]
    return [model["step"], model["age_s"], model["net"], ", ".join(model["signatures"])]


def _worst(rows: list[dict[str, Any]], key: str) -> Any:
    """The largest known value; None if there is none."""
    return max((each[key] for each in rows if each[key] is not None), default=None)


def _mean(sizes: Histogram) -> float | None:
    return sizes.sum / sizes.count if sizes.count else None


# Metric -> (kind, what it is, key of a table in the snapshot).
_OF_TABLES = {
    "shoal_serving_table_rows": ("gauge", "Rows of a table", "rows"),
    "shoal_serving_table_bytes": ("gauge", "Memory of a table", "bytes"),
    "shoal_serving_pushed_rows": ("counter", "Rows pushed since the version was loaded", "pushed_rows"),
    "shoal_serving_lag_seconds": ("gauge", "From the oldest gradient in the last push until it was served", "lag_s"),
    "shoal_serving_since_push_seconds": ("gauge", "Since the last push", "since_push_s"),
}
_OF_MODELS = {
    "shoal_serving_model_version": ("gauge", "The version being served", "serves"),
    "shoal_serving_model_step": ("gauge", "The trainer's step that a model has reached", "step"),
    "shoal_serving_model_age_seconds": ("gauge", "Since the newest rows were read from the trainer", "age_s"),
}


def _families(server: Any) -> Iterator[Family]:
    """The page's figures for Prometheus, in addition to the request counters."""
    found = snapshot(server)
    for name, kind, text, value in (
        ("shoal_serving_requests", "counter", "Requests answered", found["requests"]),
        ("shoal_serving_failed", "counter", "Requests answered with an error", found["failed"]),
        (
            "shoal_serving_overload_refused",
            "counter",
            "Requests refused because too many were waiting",
            found["refused"],
        ),
        (
            "shoal_serving_rate_refused",
            "counter",
            "Requests refused because a caller exceeded its rate limit",
            found["rate_refused"],
        ),
        ("shoal_serving_uptime_seconds", "gauge", "Since the server was started", found["uptime_s"]),
        ("shoal_serving_ready", "gauge", "1 while the server accepts requests", int(not found["not_ready"])),
    ):
        yield Family(name, kind, text).add(value)
    yield Family("shoal_serving_batch_rows", "histogram", "Rows of a batch").add(server.traffic.batch_rows)
    yield Family("shoal_serving_batch_requests", "histogram", "Requests of a batch").add(server.traffic.batch_requests)
    for name, (kind, text, key) in _OF_MODELS.items():
        family = Family(name, kind, text, ("model",))
        for model in found["models"]:
            if model[key] is not None:
                family.add(model[key], model["name"])
        yield family
    failed = Family("shoal_serving_failed_versions", "gauge", "Versions that could not be loaded", ("model",))
    for model in found["models"]:
        failed.add(sum(1 for each in model["versions"] if each["error"] and each["state"] == "END"), model["name"])
    yield failed
    for name, (kind, text, key) in _OF_TABLES.items():
        family = Family(name, kind, text, ("model", "table"))
        for each in found["tables"]:
            if each[key] is not None:
                family.add(each[key], each["model"], each["name"])
        yield family
