"""The part `replay` of `benchmarks.online`: a day of the demo's stream through a whole system, faster than it was.

taskset -c 0,1 python -m benchmarks.online --only replay --hours 24 --speed 100
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import random
import statistics
import threading
import time
import urllib.request
from typing import Any

import torch

from benchmarks.flow import NOBODY, Watcher
from benchmarks.harness import Report
from benchmarks.online_live import MODEL, TICK_S, System, percentiles, system
from shoal.demo.run import auc
from shoal.demo.stream import FIELDS, StreamConfig, stream
from shoal.serving import Client

REPLAY_PROBES_PER_S = 2
PROBE_ROW: dict[str, Any] = {name: [] if name == "tags" else "0" for name in FIELDS}


class Day:
    """A day of the demo's stream as impressions, with probes among them that are always clicked."""

    def __init__(self, hours: float, speed: float) -> None:
        batches = [one for one in stream(StreamConfig(days=2)) if one.day == 1]
        self.rows: list[dict[str, Any]] = []
        self.clicked: list[bool] = []
        self.probes: list[int] = []
        """Which impressions are probes."""
        every = int(sum(len(one.clicks) for one in batches) / 86_400 * speed / REPLAY_PROBES_PER_S)
        for batch in batches:
            columns = {}
            for name in FIELDS:
                values, offsets = batch.ids[name][0].tolist(), batch.ids[name][1].tolist()
                columns[name] = [values[a:b] for a, b in itertools.pairwise(offsets)]
            for i, click in enumerate(batch.clicks.tolist()):
                row = {name: [str(one) for one in column[i]] for name, column in columns.items()}
                self._add({name: found if name == "tags" else found[0] for name, found in row.items()}, click > 0)
                if len(self.rows) % every == 0:
                    self.probes.append(len(self.rows))
                    self._add({**PROBE_ROW, "probe": f"probe{len(self.probes) - 1}"}, True)
        self.per_s = len(self.rows) / 86_400 * speed
        count = int(len(self.rows) * hours / 24)
        self.rows, self.clicked = self.rows[:count], self.clicked[:count]
        self.probes = [one for one in self.probes if one < count]

    def _add(self, row: dict[str, Any], clicked: bool) -> None:
        self.rows.append({"probe": "none", **row})
        self.clicked.append(clicked)


class Asked(threading.Thread):
    """What the replicas say of each impression at the moment at which it is shown."""

    def __init__(self, registry: str) -> None:
        super().__init__(daemon=True)
        self._client = Client(registry, model=MODEL)
        self._waiting: list[tuple[int, dict[str, Any]]] = []
        self._lock, self._done = threading.Lock(), threading.Event()
        self.scores: dict[int, float] = {}

    def ask(self, first: int, rows: list[dict[str, Any]]) -> None:
        with self._lock:
            self._waiting += enumerate(rows, first)

    def run(self) -> None:
        while not self._done.is_set() or self._waiting:
            with self._lock:
                page, self._waiting = self._waiting, []
            for begin in range(0, len(page), 256):
                part = page[begin : begin + 256]
                answer = self._client.predict(
                    {name: [row[name] for _, row in part] for name in (*FIELDS, "probe")}, deadline=30
                )
                values = answer["probability"].flatten().tolist()
                self.scores |= {number: value for (number, _), value in zip(part, values, strict=True)}
            time.sleep(0.01)

    def stop(self) -> None:
        self._done.set()
        self.join(60)
        self._client.close()


def replay(report: Report, flags: Any) -> None:
    """A day of the demo's stream: impressions at ``speed`` times their rate, clicks a little later."""
    day = Day(flags.hours, flags.speed)
    half = len(day.rows) // 2
    fields = {**dict.fromkeys((*FIELDS, "probe"), ""), "tags": "list = true"}
    with system(flags, fields, window_s=2, batch=64, auc_window=half) as running:
        running.wait(probe_row([NOBODY]))
        asked = Asked(running.registry)
        watcher = Watcher(running.replicas()[0], len(day.probes), model=MODEL, first=0, rows=probe_row)
        asked.start(), watcher.start()
        begun = time.time()
        shown_at, memory = play(running, day, asked)
        seconds = time.time() - begun
        time.sleep(8)
        asked.stop(), watcher.stop()
        trained = progressive(running)
    report_replay(report, day, asked, trained, half, seconds)
    freshness(report, watcher, [shown_at[i] for i in day.probes], begun, seconds)
    flat_memory(report, memory, begun, seconds)


def probe_row(probes: list[str]) -> dict[str, list[Any]]:
    return {**{name: [value] * len(probes) for name, value in PROBE_ROW.items()}, "probe": probes}


def play(running: System, day: Day, asked: Asked) -> tuple[list[float], list[tuple[float, dict[str, float]]]]:
    """Produces the day and asks replicas for each impression: when each was produced, and memory every two seconds."""
    made, probes = random.Random(2), set(day.probes)
    shown_at: list[float] = []
    waiting: list[tuple[float, str]] = []
    memory: list[tuple[float, dict[str, float]]] = []
    begun, count = time.time(), len(day.rows)
    while len(shown_at) < count or waiting:
        now = time.time()
        numbers = range(len(shown_at), max(len(shown_at), min(count, int((now - begun) * day.per_s))))
        asked.ask(numbers.start, day.rows[numbers.start : numbers.stop])
        for i in numbers:
            if day.clicked[i]:
                heapq.heappush(waiting, (now + (0 if i in probes else made.uniform(0.1, 1.0)), f"r{i}"))
        acted = []
        while waiting and waiting[0][0] <= now:
            at, request = heapq.heappop(waiting)
            acted.append({"request": request, "time": at, "kind": "click"})
        running.send([{"request": f"r{i}", "time": now, **day.rows[i]} for i in numbers], acted)
        shown_at += [time.time()] * len(numbers)
        if not memory or now - memory[-1][0] > 2:
            memory.append((now, running.memory()))
        time.sleep(TICK_S)
    return shown_at, memory


def progressive(running: System) -> float:
    """The trainer's own AUC of the last samples, each predicted before it was learnt, as its page has it."""
    port = next(one["ports"]["http"] for one in running.processes() if one["kind"] == "trainer")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith("shoal_train_window_auc")))


def report_replay(report: Report, day: Day, asked: Asked, trained: float, half: int, seconds: float) -> None:
    numbers = [i for i in sorted(asked.scores) if i >= len(day.rows) - half]
    live = auc(torch.tensor([asked.scores[i] for i in numbers]), torch.tensor([day.clicked[i] for i in numbers]))
    report.add(f"impressions replayed in {seconds:.0f} s, asked of replicas", f"{len(day.rows):,}", f"{len(numbers):,}")
    difference = abs(float(live) - trained)
    report.add(
        "AUC of the replica as impressions are shown, and of the trainer", f"{live:.4f}", f"{trained:.4f}", difference,
        0.002, at_most=True,
    )  # fmt: skip


def freshness(report: Report, watcher: Watcher, probes: list[float], begun: float, seconds: float) -> None:
    """Of the second quarter against the last one."""
    medians = []
    for quarter in (1, 3):
        first = bisect.bisect(probes, begun + seconds * quarter / 4)
        last = bisect.bisect(probes, begun + seconds * (quarter + 1) / 4)
        ages = [watcher.seen[i] - probes[i] for i in range(first, last) if i in watcher.seen]
        if not ages:
            raise RuntimeError(f"no probe was seen in quarter {quarter + 1}: {watcher.failures[:3]}")
        medians.append(percentiles(ages))
    texts = [f"{p50:.2f} / {p99:.2f} s" for p50, p99 in medians]
    ratio = medians[1][0] / medians[0][0]
    report.add("freshness p50 / p99, last quarter and second", texts[1], texts[0], ratio, 1.2, at_most=True)


def flat_memory(report: Report, memory: list[tuple[float, dict[str, float]]], begun: float, seconds: float) -> None:
    def median(name: str, quarter: int) -> float:
        low, high = begun + seconds * quarter / 4, begun + seconds * (quarter + 1) / 4
        return statistics.median(found[name] for at, found in memory if low <= at < high and name in found)

    for name in memory[-1][1]:
        before, after = median(name, 1), median(name, 3)
        report.add(f"MB of {name} in the last quarter, and in the second", f"{after:.0f}", f"{before:.0f}",
                   after / before, 1.1, at_most=True)  # fmt: skip
