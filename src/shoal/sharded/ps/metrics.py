"""The counters of a parameter server, in the format of Prometheus."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from shoal.metrics import SECONDS, Histogram
from shoal.observe.exposition import Family, render

IDS = (1, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1 << 20)
STEPS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 1000, 10000)


class Metrics:
    """A server's counters; `text` renders them with the gauges that the caller adds."""

    def __init__(self) -> None:
        self.started = time.time()
        self.requests: dict[tuple[str, str], int] = defaultdict(int)
        self.seconds: dict[str, Histogram] = defaultdict(lambda: Histogram(SECONDS))
        self.sync_seconds = Histogram(SECONDS)
        self.staleness = Histogram(STEPS)
        self.ids = Histogram(IDS)
        self.bytes_in = 0
        self.bytes_out = 0
        self.bad_messages = 0

    def done(self, op: str, status: str, seconds: float, ids: int = 0) -> None:
        self.requests[op, status] += 1
        self.seconds[op].add(seconds)
        if ids:
            self.ids.add(ids)

    def text(
        self, gauges: dict[str, Any], tables: dict[str, dict[str, Any]], place: dict[str, str] | None = None
    ) -> str:
        """The metrics page: these counters, ``gauges`` by name (counters if it ends with ``_total``), the rows and
        bytes of each of ``tables``, and the ``place`` of the server as labels."""
        families = self._families(gauges, tables)
        if place is not None:
            where = Family("shoal_ps_shard", "gauge", "Always 1; its labels say which shard this is", tuple(place))
            families = itertools.chain([where.add(1, *place.values())], families)
        return render(families).decode()

    def _families(self, gauges: dict[str, Any], tables: dict[str, dict[str, Any]]) -> Iterator[Family]:
        requests = Family(
            "shoal_ps_requests", "counter", "Requests answered, by operation and outcome", ("op", "status")
        )
        for labels, count in sorted(self.requests.copy().items()):
            requests.add(count, *labels)
        yield requests
        seconds = Family("shoal_ps_request_seconds", "histogram", "From the arrival of a request to its reply", ("op",))
        for op, histogram in sorted(self.seconds.copy().items()):
            seconds.add(histogram, op)
        yield seconds
        text = "Waits for the disk, one per group of writes"
        yield Family("shoal_ps_log_sync_seconds", "histogram", text).add(self.sync_seconds)
        text = "Updates of the shard between a lookup and the update that follows from it"
        yield Family("shoal_ps_staleness_updates", "histogram", text).add(self.staleness)
        yield Family("shoal_ps_request_ids", "histogram", "Ids per request").add(self.ids)
        own = {
            "received_bytes_total": self.bytes_in,
            "sent_bytes_total": self.bytes_out,
            "bad_messages_total": self.bad_messages,
        }
        for name, value in (own | gauges).items():
            kind = "counter" if name.endswith("_total") else "gauge"
            yield Family(f"shoal_ps_{name.removesuffix('_total')}", kind, name.replace("_", " ")).add(value)
        for field in ("rows", "bytes"):
            family = Family(f"shoal_ps_table_{field}", "gauge", f"{field} of a table", ("table",))
            for table, known in tables.items():
                family.add(known[field], table)
            yield family
