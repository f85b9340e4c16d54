"""The complete path, in real processes: `shoal train`, parameter servers, two `shoal serve` and a client.

    python -m benchmarks.flow
    python -m benchmarks.flow --only freshness --seconds 60 --picture docs/images/freshness.png

- **freshness**: the time from the end of the step that learnt a sample to the first prediction of a replica that shows
  it. Each step learns a probe, a word that no other step has. A client asks both replicas for the probes of the next
  steps and for a word that is never learnt, and records when the answers differ. The run is limited to 100,000 touched
  rows per second, like a stream that arrives at that rate.
- **cpu**: CPU time of the trainer per sample, with publishing every second and without.
- **dense**: predictions while 5 M weights are pushed every second, against the same load without pushes.
- **kills**: trainer, parameter server and replica are killed ten times each while a client asks for predictions.

`benchmarks/serving.py --only raw` compares raw features with ids at the server; `tests/train/loop/test_export.py` and
`test_raw_pushes.py` compare a replica's answers with the trainer's own forward.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Report, parser
from shoal.serving import Client, publish
from shoal.train import SessionRunHook

BATCH, WORDS, VOCABULARY = 2048, 3, 2_000_000
TOUCHED_PER_STEP = BATCH * WORDS + 1
RATE = 100_000
AHEAD = 48
FIRST_STEPS = 10
START_S, ANSWER_S = 120.0, 30.0
NAMES = tuple(f"word{number}" for number in range(WORDS))
NOBODY = "nobody learns this"


class Paced(SessionRunHook):
    """A hook that limits a run to the rate at which samples would arrive, and records when each step was learnt."""

    def __init__(self) -> None:
        self._period = float(os.environ.get("FLOW_PERIOD_S", "0"))
        self._file = open(os.environ["FLOW_MARKS"], "a")  # noqa: SIM115 (it stays open for the whole run)
        self._begun: float | None = None
        self._steps = 0

    def before_run(self, context: Any) -> None:
        now = time.monotonic()
        self._begun = self._begun or now
        time.sleep(max(0.0, self._begun + self._steps * self._period - now))
        self._steps += 1

    def after_run(self, context: Any, values: Any) -> None:
        self._file.write(f"{context.global_step} {time.time()}\n")
        self._file.flush()


# --- processes --------------------------------------------------------------------------------------------------------


class Process:
    """A `shoal` command that prints a line of JSON when it is ready."""

    def __init__(self, *arguments: Any, env: dict[str, str] | None = None, log: Path) -> None:
        self.arguments, self._env, self.log = [str(each) for each in arguments], env or {}, log
        self.start()

    def start(self) -> None:
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        env = {**os.environ, "PYTHONPATH": path, **self._env}
        self._file = self.log.open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *self.arguments], env=env, stdout=subprocess.PIPE, stderr=self._file,
            text=True,
        )  # fmt: skip

    def ready(self) -> dict[str, Any]:
        """Waits for that line and returns its content."""
        late = threading.Timer(START_S, self.process.kill)
        late.start()
        try:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
        finally:
            late.cancel()
        if not line:
            raise RuntimeError(f"shoal {' '.join(self.arguments)} did not start:\n{self.log.read_text()[-2000:]}")
        self.drain()
        return json.loads(line)

    def drain(self) -> None:
        """Reads its output from now on, so that it never waits for a reader."""
        stream = self.process.stdout
        assert stream is not None
        threading.Thread(target=lambda: collections.deque(stream, 0), daemon=True).start()

    def cpu_seconds(self) -> float:
        """CPU time of the process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
        self._file.close()


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def write_log(path: Path, steps: int, seed: int = 0, first: int = 0) -> None:
    """Writes samples: three words from a large vocabulary, an age, and the probe of their step."""
    made = np.random.default_rng(seed)
    with path.open("w") as file:
        file.write(",".join(("click", "age", "probe", *NAMES)) + "\n")
        for step in range(first, first + steps):
            words = made.integers(0, VOCABULARY, (BATCH, WORDS))
            ages = made.integers(15, 90, BATCH)
            clicks = (words[:, 0] % 3 == 0).astype(int)
            file.writelines(
                f"{click},{age},probe{step},w{row[0]},w{row[1]},w{row[2]}\n"
                for click, age, row in zip(clicks.tolist(), ages.tolist(), words.tolist(), strict=True)
            )


def write_config(folder: Path, *, ps: list[str] | None = None, serve: bool = True, out: str = "checkpoints") -> Path:
    features = "\n".join(f"[features.{name}]" for name in ("probe", *NAMES))
    sections = f"""
[data]
train = ["log.csv"]
format = "csv"
label = "click"
shuffle_rows = 0
dense = ["age"]

{features}

[table]
dim = 16
optimizer = "adagrad"
lr = 0.05

[model]
name = "deepfm"
hidden = [64, 32]

[train]
batch_size = {BATCH}
{f"ps = {json.dumps(ps)}" if ps else ""}

[out]
dir = "{out}"
every_s = 5
log_steps = 20
"""
    if serve:
        sections += """
[serve]
dir = "exports/flow"
push_every_s = 1.0
registry = "dir:registry"
"""
    file = folder / "flow.toml"
    file.write_text(sections)
    return file


def rows_of(probes: list[str], seed: int = 0) -> dict[str, list[Any]]:
    count = len(probes)
    return {"age": [33] * count, "probe": probes, **{name: [f"w{seed}"] * count for name in NAMES}}


def logits(answer: dict[str, torch.Tensor]) -> torch.Tensor:
    return next(iter(answer.values())).double().flatten()


@contextmanager
def system(folder: Path, *, servers: int, steps: int, rate: float, settings: tuple[str, ...] = ()) -> Iterator[Any]:
    """(trainer, servers, replicas, their addresses); a first run has exported, and a second, paced one has begun."""
    write_log(folder / "log.csv", steps)
    with ExitStack() as stack:
        start = lambda *arguments, **more: stack.enter_context(_stopped(Process(*arguments, **more)))  # noqa: E731
        ports = [free_port() for _ in range(servers)]
        shards = [
            start("ps", "--shard", shard, "--of", servers, "--port", port, "--json", "--durability", "log",
                  "--dir", folder / "ps", "--publish", f"dir:{folder / 'registry'}", "--publish-model", "flow",
                  log=folder / f"ps{shard}.log")
            for shard, port in enumerate(ports)
        ]  # fmt: skip
        addresses = [shard.ready()["address"] for shard in shards]
        config = write_config(folder, ps=addresses)
        first = start("train", config, "--json", "--set", f"train.max_steps={FIRST_STEPS}", log=folder / "first.log")
        if first.process.communicate(timeout=START_S) and first.process.returncode:
            raise RuntimeError(f"the first run failed:\n{(folder / 'first.log').read_text()[-2000:]}")
        replicas = [
            start("serve", folder / "exports" / "flow", "--name", "flow", "--port", free_port(), "--json", "--registry",
                  f"dir:{folder / 'registry'}", "--threads", 1, log=folder / f"replica{which}.log")
            for which in range(2)
        ]  # fmt: skip
        served = [replica.ready()["grpc"] for replica in replicas]
        env = {"FLOW_MARKS": str(folder / "marks"), "FLOW_PERIOD_S": str(TOUCHED_PER_STEP / rate if rate else 0)}
        hooks = 'train.hooks=["benchmarks.flow:Paced"]'
        trainer = start("train", config, "--json", "--set", hooks, *settings, env=env, log=folder / "train.log")
        trainer.ready()
        yield trainer, shards, replicas, served


@contextmanager
def _stopped(process: Process) -> Iterator[Process]:
    try:
        yield process
    finally:
        process.stop()


# --- freshness --------------------------------------------------------------------------------------------------------


class Watcher(threading.Thread):
    """Asks one replica for the probes of the next steps and records when each was first visible in an answer."""

    def __init__(
        self, address: str, steps: int, *, model: str = "flow", first: int = FIRST_STEPS,
        rows: Callable[[list[str]], dict[str, list[Any]]] = rows_of,
    ) -> None:  # fmt: skip
        super().__init__(daemon=True)
        self.seen: dict[int, float] = {}
        self.failures: list[str] = []
        self._client, self._steps = Client(address, model=model), steps
        self._first, self._rows = first, rows
        self._done = threading.Event()

    def run(self) -> None:
        first = self._first
        while not self._done.is_set() and first < self._steps:
            probes = [*range(first, min(first + AHEAD, self._steps))]
            try:
                answer = self._client.predict(self._rows([NOBODY, *(f"probe{step}" for step in probes)]))
            except Exception as error:
                self.failures.append(repr(error))
                time.sleep(0.1)
                continue
            now, values = time.time(), logits(answer)
            there = ((values[1:] - values[0]).abs() > 1e-6).tolist()
            for step, seen in zip(probes, there, strict=True):
                if seen:
                    self.seen.setdefault(step, now)
            newest = max((step for step, seen in zip(probes, there, strict=True) if seen), default=first - 1)
            first = max(first, newest - AHEAD // 2)
            if newest == probes[-1] and first + AHEAD < self._steps:
                first = newest  # far behind, like a replica that has just started
            time.sleep(0.01)

    def stop(self) -> None:
        self._done.set()
        self.join(60)
        self._client.close()


def ages(folder: Path, watchers: list[Watcher], after: float) -> list[float]:
    """Seconds from learnt to seen, for the steps that were learnt after both replicas had caught up."""
    learnt = {int(step) - 1: float(at) for step, at in (line.split() for line in (folder / "marks").open())}
    return [
        watcher.seen[step] - at
        for watcher in watchers
        for step, at in sorted(learnt.items())
        if step in watcher.seen and at > after
    ]


def bench_freshness(report: Report, arguments: argparse.Namespace) -> None:
    rate = arguments.rate
    period = TOUCHED_PER_STEP / rate
    steps = int((arguments.seconds + 15) / period)
    kept: dict[str, list[float]] = {}
    for servers in (0, 2):
        with tempfile.TemporaryDirectory() as given:
            folder = Path(given)
            with system(folder, servers=servers, steps=steps, rate=rate) as (trainer, _, _, addresses):
                watchers = [Watcher(address, steps) for address in addresses]
                for watcher in watchers:
                    watcher.start()
                begun = time.time() + 5
                trainer.process.wait(arguments.seconds * 4 + START_S)
                time.sleep(2)
                for watcher in watchers:
                    watcher.stop()
            values = sorted(ages(folder, watchers, begun))
            name = f"with {servers} parameter servers" if servers else "shoal train alone"
            if not values:
                raise RuntimeError(f"{name}: no probe was seen; failures: {watchers[0].failures[:3]}")
            p50, p99 = values[len(values) // 2], values[int(len(values) * 0.99)]
            learnt = [float(line.split()[1]) for line in (folder / "marks").open()]
            real = (len(learnt) - 1) * TOUCHED_PER_STEP / (learnt[-1] - learnt[0])
            report.add(f"freshness p50, {name}, {real / 1000:.0f} k rows/s", f"{p50:.2f} s", "", p50, 1.0, at_most=True)
            report.add(f"freshness p99, {name}", f"{p99:.2f} s", "", p99, 1.5, at_most=True)
            kept[name] = values
    if arguments.picture:
        draw(kept, arguments.picture)


def draw(kept: dict[str, list[float]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6))
    for (name, values), color in zip(kept.items(), ("#0b6bcb", "#d9730d"), strict=False):
        axes.plot(values, np.linspace(0, 100, len(values)), label=name, color=color, linewidth=2)
    axes.set_xlim(0)
    axes.set_xlabel("seconds from a learnt sample to its effect in an answer")
    axes.set_ylabel("% of samples")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


# --- CPU time ---------------------------------------------------------------------------------------------------------


def bench_cpu(report: Report, arguments: argparse.Namespace) -> None:
    """CPU time of a run of fixed length from its first step on, at a fixed rate, with and without publishing.

    The net runs on one thread, because threads that wait for each other spin, which takes a varying amount of CPU time.
    """
    steps = int(arguments.seconds * arguments.rate / TOUCHED_PER_STEP)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(arguments.rounds):
        for publishing in (True, False):
            with tempfile.TemporaryDirectory() as given:
                folder = Path(given)
                settings = ("train.threads=1", *(() if publishing else ("serve.push_every_s=0",)))
                with system(folder, servers=0, steps=steps, rate=arguments.rate, settings=settings) as (trainer, *_):
                    marks, end = folder / "marks", time.monotonic() + START_S
                    while not (marks.exists() and marks.stat().st_size) and time.monotonic() < end:
                        time.sleep(0.02)
                    begun, done = trainer.cpu_seconds(), len(marks.read_text().splitlines())
                    _, _, used = os.wait4(trainer.process.pid, 0)
                    trainer.process.returncode = 0
                    samples = (len(marks.read_text().splitlines()) - done) * BATCH
                times[publishing].append((used.ru_utime + used.ru_stime - begun) / samples * 1e6)
    ours, rival = statistics.median(times[True]), statistics.median(times[False])
    report.add("trainer's CPU time per sample, publishing", f"{ours:.2f} us", f"{rival:.2f} us", ours / rival, 1.1,
               at_most=True)  # fmt: skip


# --- dense weights ----------------------------------------------------------------------------------------------------


def bench_dense(report: Report, arguments: argparse.Namespace) -> None:
    """p99 of predictions of 64 rows while 5 M weights are pushed every second, against p99 without pushes."""
    import shoal
    from shoal.serving import Feature, ModelExporter

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(16, 2200), torch.nn.ReLU(), torch.nn.Linear(2200, 2200), torch.nn.ReLU(),
                torch.nn.Linear(2200, 1),
            )  # fmt: skip

        def forward(self, word: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"click": self.layers(word).squeeze(1)}

    net, table = Net(), shoal.HashTable(dim=16, optimizer=shoal.Adagrad(lr=0.05), name="words")
    ids = torch.arange(100_000)
    table.assign(ids, torch.randn(len(ids), 16))
    with tempfile.TemporaryDirectory() as given, ExitStack() as stack:
        folder = Path(given)
        exporter = ModelExporter(folder, model_name="flow", net=net, features={"word": Feature(slot="words")})
        exporter.export([{"words": table}], global_step=1)
        replica = stack.enter_context(
            _stopped(Process("serve", folder, "--port", "0", "--json", "--threads", 1, log=folder / "replica.log"))
        )
        address = replica.ready()["grpc"]
        client = stack.enter_context(Client(address, model="flow"))
        batch = {"word": torch.randint(0, len(ids), (64, 1))}

        def load(seconds: float) -> list[float]:
            taken, until = [], time.monotonic() + seconds
            while time.monotonic() < until:
                begun = time.perf_counter()
                client.predict(batch)
                taken.append(time.perf_counter() - begun)
            return taken

        load(2)
        rest, pushed = [], []
        rounds = 0
        with publish({"words": table}, net=net, targets=[address], model="flow", every=None) as publication:
            for _ in range(arguments.rounds):
                rest += load(arguments.seconds / 4)
                done = threading.Event()

                def push(done: threading.Event = done) -> None:
                    nonlocal rounds
                    while not done.is_set():
                        begun = time.monotonic()
                        with torch.no_grad():
                            for weight in net.parameters():
                                weight.mul_(1.0001)
                        publication.flush()
                        rounds += 1
                        done.wait(max(0.0, 1.0 - (time.monotonic() - begun)))

                thread = threading.Thread(target=push)
                thread.start()
                pushed += load(arguments.seconds / 4)
                done.set()
                thread.join()
        p99 = [sorted(each)[int(len(each) * 0.99)] * 1000 for each in (pushed, rest)]
        count = sum(weight.numel() for weight in net.parameters())
        report.add(f"p99 of predict while {count / 1e6:.1f} M weights are pushed ({rounds} rounds)", f"{p99[0]:.2f} ms",
                   f"{p99[1]:.2f} ms", p99[0] / p99[1], 1.5, at_most=True)  # fmt: skip


# --- kills ------------------------------------------------------------------------------------------------------------


class Asking(threading.Thread):
    """A client that keeps asking, through the registry, and counts answers and failures."""

    def __init__(self, registry: str) -> None:
        super().__init__(daemon=True)
        self._client = Client(registry, model="flow")
        self._done = threading.Event()
        self.answers, self.failures = 0, []

    def run(self) -> None:
        batch = rows_of([f"probe{number}" for number in range(16)])
        while not self._done.is_set():
            try:
                self._client.predict(batch, deadline=ANSWER_S)
                self.answers += 1
            except Exception as error:
                self.failures.append(repr(error))
            time.sleep(0.002)

    def stop(self) -> None:
        self._done.set()
        self.join(60)
        self._client.close()


def bench_kills(report: Report, arguments: argparse.Namespace) -> None:
    """A run whose trainer, server and replicas are killed in turn, against an undisturbed one."""
    period = TOUCHED_PER_STEP / arguments.rate
    steps = int(arguments.kills * 9 / period)
    checked = rows_of([f"probe{step}" for step in range(0, steps, max(1, steps // 512))], seed=7)
    results = {}
    for kills in (arguments.kills, 0):
        with tempfile.TemporaryDirectory() as given:
            folder = Path(given)
            with system(folder, servers=2, steps=steps, rate=arguments.rate if kills else 0) as running:
                trainer, shards, replicas, addresses = running
                asking = Asking(f"dir:{folder / 'registry'}")
                asking.start()
                victims = itertools.cycle([trainer, shards[0], replicas[0], shards[1], replicas[1]])
                for number in range(kills * 3):
                    time.sleep(1.0)
                    victim = trainer if number % 3 == 0 else next(each for each in victims if each is not trainer)
                    if victim is trainer and trainer.process.poll() is not None:
                        continue
                    victim.kill()
                    victim.start()
                    victim.ready()
                trainer.process.wait(steps * max(period, 0.1) + START_S)
                if trainer.process.returncode:
                    raise RuntimeError(f"the trainer failed:\n{(folder / 'train.log').read_text()[-2000:]}")
                time.sleep(3)  # the servers' last round
                asking.stop()
                answers = []
                for address in addresses:
                    with Client(address, model="flow") as client:
                        answers.append(logits(client.predict(checked)))
                results[kills] = answers
                if kills:
                    what = f"predictions that failed in {kills * 3} kills, of {asking.answers:,}"
                    report.add(what, str(len(asking.failures)), "", float(len(asking.failures)), 0, at_most=True)
                    for failure in asking.failures[:3]:
                        print("  ", failure)
    if not float(results[0][0].std()):
        raise RuntimeError("all answers are alike, so nothing was learnt")
    between = float((results[arguments.kills][0] - results[arguments.kills][1]).abs().max())
    without = float((results[arguments.kills][0] - results[0][0]).abs().max())
    report.add("answers of the two replicas, largest difference", f"{between:.1e}", "", between, 1e-6, at_most=True)
    report.add("answers after kills against a run without, difference", f"{without:.1e}", "", without, 1e-5,
               at_most=True)  # fmt: skip


PARTS = {"freshness": bench_freshness, "cpu": bench_cpu, "dense": bench_dense, "kills": bench_kills}


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--only", choices=PARTS, action="append", help="some of the parts; all by default")
    made.add_argument("--seconds", type=float, default=30.0, help="length of each run")
    made.add_argument("--rate", type=float, default=RATE, help="touched rows per second")
    made.add_argument("--rounds", type=int, default=3, help="repetitions of cpu and dense")
    made.add_argument("--kills", type=int, default=10, help="kills of each kind of process")
    made.add_argument("--picture", metavar="FILE", help="plot the freshness into this file")
    arguments = made.parse_args()
    report = Report("flow")
    report.start()
    for name in arguments.only or PARTS:
        PARTS[name](report, arguments)
    report.save(arguments.json)


if __name__ == "__main__":
    main()
