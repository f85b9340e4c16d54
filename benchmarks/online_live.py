"""A complete system under `shoal up`, fed by two Redis streams, and the part `fresh` of `benchmarks.online`.

    taskset -c 0,1 python -m benchmarks.online --only fresh --seconds 60

Redis, the joiner, the trainer, parameter servers and replicas are separate processes; this one produces impressions and
actions, and asks the replicas for predictions.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.flow import NOBODY, Watcher
from benchmarks.harness import Report
from shoal.data.live import open_writer
from shoal.errors import ShoalError
from shoal.serving import Client
from shoal.testing.brokers import RedisServer

MODEL = "online"
START_S, SETTLE_S = 180.0, 10.0
TICK_S = 0.02
PROBES_PER_S = 10
CLICKED, DELAY_S, WINDOW_S = 0.2, 0.5, 5

CONFIG = """
[join]
window = "{window}s"
close = "action"
idle = "2s"
out = "{redis}/samples?maxlen=1000000"
[join.impressions]
from = "{redis}/impressions?maxlen=1000000"
key = "request"
lateness = "1s"
[join.actions]
from = "{redis}/actions?maxlen=1000000"
key = "request"
kind = "kind"
lateness = "1s"
[join.labels.click]
kinds = ["click"]
{features}
[table]
dim = 16
optimizer = "adagrad"
lr = 0.05
[model]
name = "deepfm"
hidden = [64, 32]
[train]
batch_size = {batch}
threads = 1
[data]
max_wait_s = 0.2
{data}
[out]
auc_window = {auc_window}
log_s = 1
{servers}
[replicas]
count = {replicas}
options = ["--threads", "1"]
"""


class System:
    """`shoal up` with a joiner between two streams and the trainer."""

    def __init__(self, folder: Path, broker: RedisServer, process: subprocess.Popen[bytes]) -> None:
        self.folder, self.process = folder, process
        self.run = folder / "online.run"
        self.broker = broker
        self.registry = f"dir:{self.run / 'registry'}"
        self.impressions = open_writer(broker.address("impressions?maxlen=1000000"))
        self.actions = open_writer(broker.address("actions?maxlen=1000000"))

    def processes(self) -> list[dict[str, Any]]:
        return json.loads((self.run / "state.json").read_text())["processes"]

    def replicas(self) -> list[str]:
        return [f"127.0.0.1:{one['ports']['grpc']}" for one in self.processes() if one["kind"] == "replica"]

    def wait(self, row: dict[str, list[Any]]) -> None:
        """Waits until a replica answers."""
        end = time.monotonic() + START_S
        while True:
            try:
                with Client(self.registry, model=MODEL) as client:
                    client.predict(row, deadline=5)
                    return
            except (ShoalError, OSError) as error:
                if time.monotonic() > end or self.process.poll() is not None:
                    raise RuntimeError(f"shoal up did not start: {error}\n{self.logs()}") from error
                time.sleep(0.2)

    def logs(self) -> str:
        """The last lines of every log."""
        return "\n".join(f"{path.name}: {path.read_text()[-600:]}" for path in sorted(self.run.glob("logs/*")))

    def memory(self) -> dict[str, float]:
        """Resident memory of each process, in MB."""
        found = {}
        for one in self.processes():
            try:
                pages = int(Path(f"/proc/{one['pid']}/statm").read_text().split()[1])
            except (OSError, TypeError):
                continue
            found[one["name"]] = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        return found

    def stop(self) -> None:
        """Stops like Ctrl-C: the trainer writes a checkpoint."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def send(self, shown: list[dict[str, Any]], acted: list[dict[str, Any]]) -> None:
        for writer, messages in ((self.impressions, shown), (self.actions, acted)):
            if messages:
                writer.append([json.dumps(one).encode() for one in messages])


@contextmanager
def system(
    flags: Any, fields: dict[str, str], *, window_s: float, batch: int, auc_window: int, train: str | None = None
) -> Iterator[System]:
    """Starts the complete system.

    Args:
        train: the stream that the trainer reads, if it is not the joiner's output.
    """
    with tempfile.TemporaryDirectory(dir=flags.dir) as given, RedisServer(Path(given) / "redis") as broker:
        folder = Path(given)
        file = folder / "online.toml"
        file.write_text(
            CONFIG.format(
                redis=f"redis://127.0.0.1:{broker.port}",
                window=window_s,
                data=f'train = ["{broker.address(train)}"]\nformat = "json"\nlabel = "click"' if train else "",
                features="\n".join(f"[features.{name}]\n{more}" for name, more in fields.items()),
                servers=f'[servers]\ncount = {flags.servers}\noptions = ["--threads", "1"]' if flags.servers else "",
                replicas=flags.replicas,
                batch=batch,
                auc_window=auc_window,
            )
        )
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)}
        with (folder / "up.log").open("wb") as log:
            command = [sys.executable, "-m", "shoal", "up", str(file)]
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
            running = System(folder, broker, process)
            try:
                yield running
            finally:
                running.stop()


# --- fresh ------------------------------------------------------------------------------------------------------------


class Produced:
    """Produces impressions at a rate, and actions for some of them; ten per second are probes, with an action at once.

    The feature ``probe`` of a probe is a word that no other impression has."""

    def __init__(self, running: System, rate: float) -> None:
        self._system, self._rate = running, rate
        self._made = random.Random(1)
        self._waiting: list[tuple[float, str]] = []
        self.count = 0
        self.probes: list[float] = []
        """When each probe and its action had been produced."""

    def _impression(self, now: float, probe: str) -> dict[str, Any]:
        self.count += 1
        user, item = self._made.randrange(100_000), self._made.randrange(100_000)
        return {"request": f"r{self.count}", "time": now, "user": f"u{user}", "item": f"i{item}", "probe": probe}

    def run(self, seconds: float) -> None:
        begun = time.time()
        while (now := time.time()) < begun + seconds:
            shown = [self._impression(now, "none") for _ in range(int((now - begun) * self._rate) - self.count)]
            for one in shown:
                if self._made.random() < CLICKED:
                    heapq.heappush(self._waiting, (now + self._made.expovariate(1 / DELAY_S), one["request"]))
            acted = []
            while self._waiting and self._waiting[0][0] <= now:
                at, request = heapq.heappop(self._waiting)
                acted.append({"request": request, "time": at, "kind": "click"})
            probes = int((now - begun) * PROBES_PER_S) - len(self.probes)
            for number in range(len(self.probes), len(self.probes) + probes):
                shown.append(self._impression(now, f"probe{number}"))
                acted.append({"request": shown[-1]["request"], "time": now, "kind": "click"})
            self._system.send(shown, acted)
            self.probes += [time.time()] * probes
            time.sleep(TICK_S)


def probe_rows(probes: list[str]) -> dict[str, list[Any]]:
    count = len(probes)
    return {"user": ["u1"] * count, "item": ["i1"] * count, "probe": probes}


def percentiles(ages: list[float]) -> tuple[float, float]:
    ages = sorted(ages)
    return ages[len(ages) // 2], ages[int(len(ages) * 0.99)]


def fresh(report: Report, flags: Any) -> None:
    """The time from producing an impression and its action to a prediction that shows them."""
    with system(
        flags, dict.fromkeys(("user", "item", "probe"), ""), window_s=WINDOW_S, batch=256, auc_window=20_000
    ) as running:
        running.wait(probe_rows([NOBODY]))
        produced = Produced(running, flags.sample_rate)
        total = int((flags.seconds + SETTLE_S) * PROBES_PER_S)
        watchers = [Watcher(one, total, model=MODEL, rows=probe_rows, first=0) for one in running.replicas()]
        for watcher in watchers:
            watcher.start()
        begun = time.time()
        produced.run(flags.seconds + SETTLE_S)
        seconds = time.time() - begun
        time.sleep(5)
        for watcher in watchers:
            watcher.stop()
        late = [at for at in produced.probes if at >= begun + SETTLE_S]
        ages = [
            watcher.seen[number] - at
            for watcher in watchers
            for number, at in enumerate(produced.probes)
            if at >= begun + SETTLE_S and number in watcher.seen
        ]
        missing = len(late) * len(watchers) - len(ages)
        if not ages:
            raise RuntimeError(f"no probe was seen; {watchers[0].failures[:3]}\n{running.logs()}")
        p50, p99 = percentiles(ages)
        what = f"{produced.count / seconds:,.0f} samples/s, {flags.servers} servers, {flags.replicas} replicas"
        report.add(f"action to answer p50, {what}", f"{p50:.2f} s", "", p50, 2.0, at_most=True)
        report.add("action to answer p99", f"{p99:.2f} s", "", p99, 4.0, at_most=True)
        report.add(f"probes of {len(late) * len(watchers):,} never seen", str(missing), "", missing, 0, at_most=True)
