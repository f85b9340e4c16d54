"""The part `replay` of `benchmarks.online`: a day of the demo's stream through the system, faster than real time.

taskset -c 0,1 python -m benchmarks.online --only replay --hours 24 --speed 100
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import json
import random
import statistics
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.flow import NOBODY, Watcher
from benchmarks.harness import Report
from benchmarks.online_live import MODEL, TICK_S, System, percentiles, system
from shoal.data.live import open_reader, open_writer
from shoal.demo.run import auc
from shoal.demo.stream import FIELDS, StreamConfig, stream
from shoal.proto.serving.tf_serving_pb2 import ModelServerConfig
from shoal.serving import Client, ModelServer
from shoal.serving.cluster.agent_utils import gen_model_config

REPLAY_PROBES_PER_S = 2
AT_REST = 2000
JUDGED = "judged"
"""The stream that the trainer reads."""
PROBE_ROW: dict[str, Any] = {name: [] if name == "tags" else "0" for name in FIELDS}


class Day:
    """A day of the demo's stream as impressions, including probes, which are always clicked."""

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


def predicted(client: Client, rows: list[dict[str, Any]]) -> list[float]:
    found: list[float] = []
    for begin in range(0, len(rows), 256):
        part = rows[begin : begin + 256]
        answer = client.predict({name: [row[name] for row in part] for name in (*FIELDS, "probe")}, deadline=30)
        found += answer["probability"].flatten().tolist()
    return found


class Asked(threading.Thread):
    """The replicas' predictions for each impression at the moment when it is shown."""

    def __init__(self, running: System, day: Day) -> None:
        super().__init__(daemon=True)
        self._client, self._rows = Client(running.registry, model=MODEL), day.rows
        self._waiting: list[int] = []
        self._lock, self._done = threading.Lock(), threading.Event()
        self.scores: dict[int, float] = {}

    def ask(self, numbers: Iterable[int]) -> None:
        with self._lock:
            self._waiting += numbers

    def run(self) -> None:
        while not self._done.is_set() or self._waiting:
            with self._lock:
                numbers, self._waiting = self._waiting, []
            self.judge(numbers)
            time.sleep(0.01)

    def judge(self, numbers: list[int]) -> None:
        found = predicted(self._client, [self._rows[number] for number in numbers])
        self.scores |= dict(zip(numbers, found, strict=True))

    def stop(self) -> None:
        self._done.set()
        self.join(60)
        self._client.close()


class Judge(Asked):
    """Between joiner and trainer: asks a replica for each sample, then passes the sample to the trainer.

    So both predict at the same time, and no replica can have learnt the sample that it is asked for.
    """

    def __init__(self, running: System, day: Day) -> None:
        super().__init__(running, day)
        self._reader = open_reader(running.broker.address("samples"))
        self._writer = open_writer(running.broker.address(f"{JUDGED}?maxlen=1000000"))
        self.order: list[int] = []
        """The impressions, in the order in which the trainer learns them."""
        self.delays: list[float] = []
        """Seconds by which samples were delayed."""

    def run(self) -> None:
        while (chunks := self._reader.poll(256, 0.1)) or not self._done.is_set():
            for chunk in chunks:
                begun = time.time()
                numbers = [int(json.loads(record)["request"][1:]) for record in chunk.records]
                self.judge(numbers)
                self._writer.append(list(chunk.records))
                self.order += numbers
                self.delays += [time.time() - begun] * len(numbers)


def replay(report: Report, flags: Any) -> None:
    """Replays a day of the demo's stream: impressions at ``speed`` times their rate, clicks a little later."""
    day = Day(flags.hours, flags.speed)
    fields = {**dict.fromkeys((*FIELDS, "probe"), ""), "tags": "list = true"}
    with system(flags, fields, window_s=2, batch=64, auc_window=len(day.rows), train=JUDGED) as running:
        running.wait(probe_row([NOBODY]))
        asked, joined = Asked(running, day), Judge(running, day)
        watcher = Watcher(running.replicas()[0], len(day.probes), model=MODEL, first=0, rows=probe_row)
        asked.start(), joined.start(), watcher.start()
        begun = time.time()
        shown_at, memory = play(running, day, asked)
        seconds = time.time() - begun
        time.sleep(8)
        asked.stop(), joined.stop(), watcher.stop()
        rows = day.rows[-AT_REST:]
        last = at_rest(running, rows)
        running.stop()
        differ = max(abs(a - b) for a, b in zip(last, exported(running, rows), strict=True))
        trained = dict(zip(joined.order, trained_scores(running), strict=True))
    report_replay(report, day, asked, joined, trained, seconds)
    what = f"largest difference of {len(rows):,} probabilities: replica at rest, and the trainer's last export"
    report.add(what, f"{differ:.1e}", "", differ, 1e-5, at_most=True)
    freshness(report, watcher, [shown_at[i] for i in day.probes], begun, seconds)
    flat_memory(report, memory, begun, seconds)


def at_rest(running: System, rows: list[dict[str, Any]]) -> list[float]:
    """The replica's predictions once they no longer change."""
    end, before = time.monotonic() + 120, []
    with Client(running.registry, model=MODEL) as client:
        while (found := predicted(client, rows)) != before and time.monotonic() < end:
            before = found
            time.sleep(3)
    return found


def exported(running: System, rows: list[dict[str, Any]]) -> list[float]:
    """The predictions of the version that the trainer exported at its end."""
    config = ModelServerConfig()
    config.model_config_list.config.append(gen_model_config(MODEL, str(running.run / "exports" / MODEL)))
    server = ModelServer(config=config, poll_wait_seconds=0).start()
    try:
        with Client(server.address, model=MODEL) as client:
            return predicted(client, rows)
    finally:
        server.stop(0)


def probe_row(probes: list[str]) -> dict[str, list[Any]]:
    return {**{name: [value] * len(probes) for name, value in PROBE_ROW.items()}, "probe": probes}


def play(running: System, day: Day, asked: Asked) -> tuple[list[float], list[tuple[float, dict[str, float]]]]:
    """Produces the day and asks replicas for each impression; returns production times, and memory every 2 s."""
    made, probes = random.Random(2), set(day.probes)
    shown_at: list[float] = []
    waiting: list[tuple[float, str]] = []
    memory: list[tuple[float, dict[str, float]]] = []
    begun, count = time.time(), len(day.rows)
    while len(shown_at) < count or waiting:
        now = time.time()
        numbers = range(len(shown_at), max(len(shown_at), min(count, int((now - begun) * day.per_s))))
        asked.ask(numbers)
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


def trained_scores(running: System) -> list[float]:
    """The trainer's prediction of each sample before learning it, in that order, from its last checkpoint."""
    newest = max((running.run / "checkpoints").glob("ckpt-*"), key=lambda path: int(path.name.split("-")[1]))
    return load_file(newest / "rank-00000.safetensors")["metrics.scores"].tolist()


def report_replay(
    report: Report, day: Day, asked: Asked, joined: Judge, trained: dict[int, float], seconds: float
) -> None:
    """Reports figures of the samples of the second half of the day, without probes."""
    later = set(range(len(day.rows) // 2, len(day.rows))) - set(day.probes)
    numbers = [i for i in joined.order if i in later and i in asked.scores]
    labels = torch.tensor([day.clicked[i] for i in numbers])
    shown, live, own = (
        auc(torch.tensor([scores[i] for i in numbers]), labels) for scores in (asked.scores, joined.scores, trained)
    )
    report.add(f"impressions replayed in {seconds:.0f} s, judged here", f"{len(day.rows):,}", f"{len(numbers):,}")
    p50, p99 = percentiles(joined.delays)
    report.add("samples held up until replicas were asked, p50 / p99", f"{p50 * 1e3:.0f} / {p99 * 1e3:.0f} ms")
    report.add(
        "AUC of the replica when a sample is made, and of the trainer before it learns it", f"{live:.4f}",
        f"{own:.4f}", abs(live - own), 0.002, at_most=True,
    )  # fmt: skip
    report.add("AUC of the replica when the impression is shown, up to 3 s before", f"{shown:.4f}", f"{own:.4f}")


def freshness(report: Report, watcher: Watcher, probes: list[float], begun: float, seconds: float) -> None:
    """Compares the freshness of the last quarter with that of the second."""
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
