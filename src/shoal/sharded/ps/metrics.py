"""What a parameter server counts, in the text form that Prometheus reads. Counting is cheap: plain additions."""

from __future__ import annotations

import bisect
import threading
import time
from collections import defaultdict
from typing import Any

SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
STEPS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 1000, 10000)


class Histogram:
    """Cumulative buckets, a count and a sum. Adding is not locked: a lost count under threads is worth the speed."""

    __slots__ = ("bounds", "buckets", "count", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.buckets[bisect.bisect_left(self.bounds, value)] += 1
        self.count += 1
        self.sum += value

    def lines(self, name: str, labels: str) -> list[str]:
        result, total = [], 0
        for bound, n in zip((*self.bounds, "+Inf"), self.buckets, strict=True):
            total += n
            result.append(f'{name}_bucket{{{labels}{"," if labels else ""}le="{bound}"}} {total}')
        tags = f"{{{labels}}}" if labels else ""
        return [*result, f"{name}_count{tags} {total}", f"{name}_sum{tags} {self.sum}"]


class Metrics:
    """A server's counters; `text` renders them with the gauges that the caller adds."""

    def __init__(self) -> None:
        self.started = time.time()
        self.requests: dict[tuple[str, str], int] = defaultdict(int)
        self.seconds: dict[str, Histogram] = defaultdict(lambda: Histogram(SECONDS))
        self.sync_seconds = Histogram(SECONDS)
        self.staleness = Histogram(STEPS)
        self.bytes_in = 0
        self.bytes_out = 0
        self.bad_messages = 0
        self._lock = threading.Lock()

    def done(self, op: str, status: str, seconds: float) -> None:
        self.requests[op, status] += 1
        self.seconds[op].add(seconds)

    def text(self, gauges: dict[str, Any], tables: dict[str, dict[str, Any]]) -> str:
        """The exposition format, version 0.0.4."""
        lines = []

        def family(name: str, kind: str, text: str, samples: list[str]) -> None:
            lines.extend([f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples])

        family(
            "shoal_ps_requests_total", "counter", "Requests answered, by operation and outcome.",
            [f'shoal_ps_requests_total{{op="{op}",status="{status}"}} {n}'
             for (op, status), n in sorted(self.requests.copy().items())],
        )  # fmt: skip
        seconds = [h.lines("shoal_ps_request_seconds", f'op="{op}"') for op, h in sorted(self.seconds.copy().items())]
        family(
            "shoal_ps_request_seconds",
            "histogram",
            "From the arrival of a request to its reply.",
            [line for lines_of in seconds for line in lines_of],
        )
        family(
            "shoal_ps_log_sync_seconds", "histogram", "Waits for the disk, one per group of writes.",
            self.sync_seconds.lines("shoal_ps_log_sync_seconds", ""),
        )  # fmt: skip
        family(
            "shoal_ps_staleness_updates", "histogram",
            "Updates of the shard between the lookup behind an update and the update.",
            self.staleness.lines("shoal_ps_staleness_updates", ""),
        )  # fmt: skip
        for name, value in {
            "received_bytes_total": self.bytes_in,
            "sent_bytes_total": self.bytes_out,
            "bad_messages_total": self.bad_messages,
        }.items():
            family(f"shoal_ps_{name}", "counter", name.replace("_", " "), [f"shoal_ps_{name} {value}"])
        for name, value in gauges.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            family(f"shoal_ps_{name}", kind, name.replace("_", " "), [f"shoal_ps_{name} {value}"])
        for field in ("rows", "bytes"):
            samples = [f'shoal_ps_table_{field}{{table="{_escape(t)}"}} {v[field]}' for t, v in tables.items()]
            family(f"shoal_ps_table_{field}", "gauge", f"{field} of a table", samples)
        return "\n".join(lines) + "\n"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
