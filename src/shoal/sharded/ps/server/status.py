"""The status page of a parameter server, with its health and metrics."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from shoal.metrics import Histogram
from shoal.observe.endpoint import JSON, Shown, process_metrics
from shoal.observe.history import Figures
from shoal.observe.page import Part, Tone, chart, page, pill, table, tile

if TYPE_CHECKING:
    from shoal.sharded.ps.server.server import ParameterServer

_TONES: dict[str, Tone] = {"serving": "good", "read-only": "warn", "draining": "warn", "failed": "bad"}


class ShownShard(Shown):
    """A `ParameterServer` as its status page shows it."""

    counters = ("reads", "writes", "failures", "received_bytes", "sent_bytes", "log_bytes")

    def __init__(self, server: ParameterServer) -> None:
        super().__init__()
        self._server = server
        self._quantiles = {name: RecentQuantile() for name in ("request", "sync")}
        self._ids = (0, 0.0)
        self._last_write = (server.engine.shard.version, 0.0)

    def health(self) -> tuple[bool, str, bytes]:
        healthy, found = self._server.health()
        return healthy, JSON, json.dumps(found).encode()

    def ready(self) -> str:
        healthy, found = self._server.health()
        return "" if healthy else found["why"] or found["state"]

    def metrics(self) -> bytes:
        return process_metrics() + self._server.metrics_text().encode()

    def status(self) -> dict[str, Any]:
        server = self._server
        operations: dict[str, dict[str, Any]] = {}
        for (op, status), count in sorted(server.metrics.requests.copy().items()):
            found = operations.setdefault(op, {"requests": 0, "failed": 0, "mean_s": None})
            found["requests"] += count
            found["failed"] += count if status != "OK" else 0
        for op, seconds in server.metrics.seconds.copy().items():
            if op in operations and seconds.count:
                operations[op]["mean_s"] = seconds.sum / seconds.count
        return {
            **server.health()[1], **server.gauges(), "operations": operations, "durability": server.engine.durability,
            "address": server.address, "bad_messages": server.metrics.bad_messages,
            "since_write_s": time.time() - self._last_write[1] if self._last_write[1] else None,
            "ids_per_request": server.metrics.ids.sum / server.metrics.ids.count if server.metrics.ids.count else None,
        }  # fmt: skip

    def figures(self) -> Figures:
        server, metrics = self._server, self._server.metrics
        requests = metrics.requests.copy()
        gauges = server.gauges()
        tables = server.engine.shard.status()["tables"].values()
        if gauges["version"] != self._last_write[0]:
            self._last_write = gauges["version"], time.time()
        return {
            "reads": sum(n for (op, _), n in requests.items() if not is_write(op)),
            "writes": sum(n for (op, _), n in requests.items() if is_write(op)),
            "failures": sum(n for (_, status), n in requests.items() if status != "OK"),
            "received_bytes": metrics.bytes_in,
            "sent_bytes": metrics.bytes_out,
            "log_bytes": gauges["log_bytes_total"],
            "queued_bytes": gauges["queued_bytes"],
            "rows": sum(each["rows"] for each in tables),
            "bytes": sum(each["bytes"] for each in tables),
            "version": gauges["version"],
            "request_p99": self._quantiles["request"].read(*metrics.seconds.copy().values()),
            "sync_p99": self._quantiles["sync"].read(metrics.sync_seconds),
            "ids_per_request": self._ids_per_request(metrics.ids),
            "checkpoint_age": gauges.get("checkpoint_age_seconds"),
            "follower_lag": gauges.get("follower_lag_records"),
            "archive_lag": gauges.get("archive_lag_records"),
        }

    def _ids_per_request(self, ids: Histogram) -> float | None:
        """The mean since the last reading."""
        (count, total), self._ids = self._ids, (ids.count, ids.sum)
        return (ids.sum - total) / (ids.count - count) if ids.count > count else None

    def page(self) -> Part:
        found = self.status()
        tables, group = found["tables"], found.get("group")
        tiles = [
            tile("writes applied", found["version"]),
            tile("last write", found["since_write_s"], "ago"),
            tile("rows", sum(each["rows"] for each in tables.values())),
            tile("memory of tables", sum(each["bytes"] for each in tables.values()), "bytes"),
            tile("known workers", found["streams"]),
            tile("waiting requests", found["queued_bytes"], "bytes"),
            tile("checkpoint", found.get("checkpoint_age_seconds"), "ago",
                 "bad" if found["checkpoint_failures_total"] else "",
                 f"{found['checkpoint_failures_total']} could not be written"),
            tile("ids per request", found["ids_per_request"]),
            tile("malformed requests", found["bad_messages"], tone="bad" if found["bad_messages"] else ""),
        ]  # fmt: skip
        charts = [
            chart("requests", {"reads": "reads", "writes": "writes", "failed": "failures"}, "per_s"),
            chart("p99", {"request": "request_p99", "disk": "sync_p99"}, "s"),
            chart("batch sizes", {"ids per request": "ids_per_request"}),
            chart("writes applied", {"writes": "version"}),
            chart("rows", {"rows": "rows"}),
            chart("memory", {"tables": "bytes", "waiting": "queued_bytes"}, "bytes"),
            chart(
                "bytes per second", {"received": "received_bytes", "sent": "sent_bytes", "log": "log_bytes"}, "bytes"
            ),
        ]
        if group is not None:
            tiles += [
                tile("role", group["role"], ""), tile("term", group["term"]),
                tile("followers in sync", found["followers_in_sync"]),
                tile("registry contact", "yes" if found["registry_contact"] else "no", "",
                     "" if found["registry_contact"] else "bad"),
            ]  # fmt: skip
            charts.append(chart("follower lag in records", {"worst": "follower_lag"}))
        if "archive_lag_records" in found:
            tiles.append(tile("archived", max(0, found["archive_age_seconds"]), "ago",
                              "bad" if found["archive_failures_total"] else ""))  # fmt: skip
            charts.append(chart("archive lag in records", {"records": "archive_lag"}))
        return page(
            f"Shoal parameter server, shard {found['shard']} of {found['of']}",
            about=f"{found['address']}, durability {found['durability']}",
            state=pill(found["state"], _TONES.get(found["state"], ""), found["why"] or ""),
            tiles=tiles,
            charts=charts,
            tables=[
                table("Tables", ["table", ("dim", "n"), ("rows", "n"), ("memory", "bytes")],
                      [[name, each["dim"], each["rows"], each["bytes"]] for name, each in sorted(tables.items())]),
                table("Requests since the start", ["operation", ("requests", "n"), ("failed", "n"), ("mean", "s")],
                      [[op.lower(), each["requests"], each["failed"], each["mean_s"]]
                       for op, each in found["operations"].items()]),
            ],
        )  # fmt: skip


class RecentQuantile:
    """The 99th percentile of the values added to histograms between two readings, as its bucket's bound."""

    def __init__(self) -> None:
        self._before: list[int] = []

    def read(self, *histograms: Histogram) -> float | None:
        if not histograms:
            return None
        now = [sum(each) for each in zip(*(histogram.buckets for histogram in histograms), strict=True)]
        gained = [new - old for new, old in zip(now, self._before or [0] * len(now), strict=True)]
        self._before = now
        total, seen = sum(gained), 0
        for bound, count in zip((*histograms[0].bounds, histograms[0].bounds[-1]), gained, strict=True):
            seen += count
            if total and seen >= 0.99 * total:
                return bound
        return None


def is_write(op: str) -> bool:
    from shoal.sharded.ps.protocol import Op

    return op in Op.__members__ and Op[op].writes
