"""The complete system under faults: events into Redis, a joiner, a trainer, a shard on two servers, replicas, a client.

Each process is repeatedly killed or frozen. At the end, every impression must be one sample with the right label, rows
and weights must equal those of an undisturbed run over the same samples, the rows of other workers on the same servers
must be right, the two replicas must agree, and no prediction may have failed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.flow import Process, free_port
from benchmarks.harness import Report
from benchmarks.reliability import group as g
from benchmarks.reliability.traffic import WINDOW_S, Asking, Events
from shoal.errors import ShoalError
from shoal.serving import Client
from shoal.sharded import PsClient
from shoal.testing.brokers import RedisServer
from shoal.testing.history import History
from shoal.testing.zookeeper import ZooKeeper

BATCH = 64
JOIN = """
[impressions]
from = "{redis}/shown"
key = "id"
lateness = "1s"
[actions]
from = "{redis}/acts"
key = "id"
kind = "kind"
lateness = "1s"
[labels.click]
kinds = ["click"]
[join]
window = "{window:g}s"
idle = "1h"
checkpoint_s = 3
state = "join-state"
out = "{redis}/samples"
"""
TRAIN = """
[data]
train = ["{redis}/samples"]
format = "json"
label = "click"
sparse = ["user", "item"]
max_wait_s = inf
[table]
dim = 8
optimizer = "adagrad"
lr = 0.05
[model]
name = "deepfm"
hidden = [16]
[train]
batch_size = {batch}
threads = 1
ps = ["{servers}"]
{steps}
[out]
dir = "{out}"
every_s = 3
log_s = 2
"""
SERVE = """
[serve]
dir = "exports/system"
push_every_s = 1.0
at_start = true
every_s = 3600
registry = "dir:registry"
"""


class System:
    """All processes of the system, with functions that kill, freeze and restart each of them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.zookeeper = ZooKeeper(folder / "zookeeper", tick_ms=500).start()
        stack.callback(self.zookeeper.kill)
        self.redis = RedisServer(folder / "redis")
        stack.callback(self.redis.stop)
        self.registry = f"zk://{self.zookeeper.hosts}"
        self.servers = [
            g.Server(folder / name, self.registry, "follower", ("--group", "system")) for name in ("a", "b")
        ]
        for server in self.servers:
            stack.callback(server.end)
            server.start()
        g.leader(self.servers, 2)
        broker = self.redis.address("").rstrip("/")
        (folder / "join.toml").write_text(JOIN.format(redis=broker, window=WINDOW_S))
        servers = f"{self.registry}#system"
        self.train = TRAIN.format(redis=broker, batch=BATCH, servers=servers, out="run", steps="")
        (folder / "train.toml").write_text(self.train + SERVE)
        self.broker = broker

    def start(self) -> None:
        self.joiner = self._process("join", self.folder / "join.toml", "--json", log=self.folder / "join.log")
        self.trainer = self._process("train", self.folder / "train.toml", "--json", log=self.folder / "train.log")
        g.until(lambda: list(self.folder.glob("exports/system/[0-9]*")), "the first export", 240)
        self.replicas = [
            self._process("serve", self.folder / "exports" / "system", "--name", "system", "--port", free_port(),
                          "--json", "--registry", f"dir:{self.folder / 'registry'}", "--threads", 1,
                          log=self.folder / f"replica{which}.log")
            for which in range(2)
        ]  # fmt: skip
        self.addresses = [replica.ready()["grpc"] for replica in self.replicas]

    def _process(self, *arguments: Any, log: Path) -> Process:
        made = Process(*arguments, log=log)
        self._stack.callback(made.stop)
        if arguments[0] in ("join", "train"):
            made.drain()
        return made

    def faults(self, rng: random.Random) -> dict[str, Callable[[], None]]:
        """The faults, by name."""

        def again(process: Process) -> None:
            process.kill()
            time.sleep(rng.uniform(0, 1))
            process.start()
            if process in self.replicas:
                process.ready()
            else:
                process.drain()

        def frozen(pid: int) -> None:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(rng.uniform(0.3, 3))
            os.kill(pid, signal.SIGCONT)

        def server(which: str) -> g.Server:
            lead = g.leader(self.servers, 2)
            return lead if which == "leader" else self.servers[1 - self.servers.index(lead)]

        def server_again(which: str) -> None:
            one = server(which)
            one.kill()
            time.sleep(rng.uniform(0, 2))
            one.start()

        def broker_again() -> None:
            self.redis.kill()
            time.sleep(rng.uniform(0, 2))
            self.redis.start()

        def registry_again() -> None:
            self.zookeeper.kill()
            time.sleep(rng.uniform(0, 3))
            self.zookeeper.start()

        made: dict[str, Callable[[], None]] = {
            "Redis killed": broker_again,
            "ZooKeeper killed": registry_again,
            "Redis frozen": lambda: frozen(self.redis.pid),
            "ZooKeeper frozen": lambda: frozen(self.zookeeper.process.pid),
        }
        for which in ("leader", "follower"):
            made[f"{which} killed"] = lambda which=which: server_again(which)
            made[f"{which} frozen"] = lambda which=which: frozen(server(which).process.pid)
        for name, process in (("joiner", self.joiner), ("trainer", self.trainer), ("replica", self.replicas[0])):
            made[f"{name} killed"] = lambda process=process: again(process)
            made[f"{name} frozen"] = lambda process=process: frozen(process.process.pid)
        return made

    def alive(self) -> None:
        for process in (self.joiner, self.trainer, *self.replicas):
            if process.process.poll() not in (None, -signal.SIGKILL):
                raise RuntimeError(f"shoal {process.arguments[0]} ended: {process.log.read_text()[-3000:]}")


def system(report: Report, options: Namespace, folder: Path) -> None:
    rng, history, done = random.Random(options.seed), History(), Counter[str]()
    with ExitStack() as stack:
        running = System(folder, stack)
        events = Events(running.redis.address("shown"), running.redis.address("acts"))
        events.start()
        running.start()
        asking = Asking(f"dir:{folder / 'registry'}")
        asking.start()
        workers = [g.Worker(0, g.group(running.servers), history, pause_s=0.02)]
        faults = running.faults(rng)
        names, end = list(faults), time.monotonic() + options.share("system")
        with g.running(workers):
            while not done or time.monotonic() < end:
                which = names[sum(done.values()) % len(names)] if options.every_fault else rng.choice(names)
                print(f"  {which}", flush=True)
                faults[which]()
                running.alive()
                g.resumed(workers)
                done[which] += 1
                time.sleep(rng.uniform(0, 2))
        events.end()
        samples = _samples(running, events)
        running.alive()
        step = _learnt(running, events.count // BATCH)
        asking.stop()
        rows, dense = _rows(g.group(running.servers)), _dense(folder / "run")
        agree = _answers(running)
        wrong = g.checked(history, g.group(running.servers), workers)
        other_rows, other_dense = _undisturbed(running, step)
    print(f"  {dict(done)}")
    differ = sum(one != other for one, other in zip(rows, other_rows, strict=False)) + abs(len(rows) - len(other_rows))
    g.tell_wrong(report, f"of {events.count} samples missing, doubled or with a wrong label", samples)
    g.tell(report, f"of {len(rows)} rows other than undisturbed, {step} steps, {sum(done.values())} faults", differ,
           at_most=0)  # fmt: skip
    g.tell(report, "weights other than undisturbed", int(dense != other_dense), at_most=0)
    g.tell_wrong(report, f"of {history.acknowledged} updates of a worker lost or doubled", wrong)
    g.tell(report, "answers in which the replicas differ", agree, at_most=0)
    for failure in asking.failures[:3]:
        print(f"  {failure}")
    g.tell(report, f"of {asking.answers:,} predictions failed", len(asking.failures), at_most=0)


def _samples(running: System, events: Events) -> list[str]:
    """Waits until all impressions are samples; returns those that are missing, doubled or wrong."""
    import redis

    client = redis.Redis(port=running.redis.port)
    g.until(lambda: client.xlen("samples") >= events.count, f"{events.count} samples", 180)
    found, wrong = Counter[str](), []
    for _, fields in client.xrange("samples"):
        sample = json.loads(next(iter(fields.values())))
        found[sample["id"]] += 1
        number = int(sample["id"][1:]) if sample["id"] != "end" else -1
        if number >= 0 and sample["click"] != events.label(number):
            wrong.append(f"{sample['id']} has label {sample['click']}")
    wrong += [f"r{n}: {found[f'r{n}']} times" for n in range(events.count) if found[f"r{n}"] != 1]
    return wrong


def _learnt(running: System, steps: int) -> int:
    """Waits until the trainer has learnt all full batches, stops it, and returns its last step."""

    def learnt() -> bool:
        running.alive()
        return _step(running) >= steps

    g.until(learnt, f"{steps} steps", 240)
    running.trainer.process.send_signal(signal.SIGTERM)
    running.trainer.process.wait(120)
    return _step(running)


def _step(running: System) -> int:
    return max((int(path.name.rpartition("-")[2]) for path in (running.folder / "run").glob("ckpt-*")), default=0)


def _rows(addresses: list[str]) -> list[Any]:
    with PsClient(addresses, deadline=g.LONG) as client:
        return sorted(
            (int(key), tuple(row))
            for page in client.scan("features")
            for key, row in zip(page[0].tolist(), page[1].tolist(), strict=True)
        )


def _dense(run: Path) -> bytes:
    return (max(run.glob("ckpt-*")) / "dense.safetensors").read_bytes()


def _answers(running: System) -> int:
    """The number of 500 answers in which the two replicas differ, once both have had time to catch up."""
    rows = {"user": [f"u{n}" for n in range(500)], "item": [f"i{n % 131}" for n in range(500)]}

    def ask(address: str) -> list[float]:
        with Client(address, model="system") as client:
            return next(iter(client.predict(rows, deadline=20.0).values())).double().flatten().tolist()

    def differ() -> int:
        one, other = map(ask, running.addresses)
        return sum(abs(a - b) > 1e-6 for a, b in zip(one, other, strict=True))

    try:
        g.until(lambda: differ() == 0, "the replicas to agree", 30)
    except (TimeoutError, ShoalError):
        return differ()
    return 0


def _undisturbed(running: System, step: int) -> tuple[list[Any], bytes]:
    """Rows and weights of an undisturbed run over the same samples, with a separate server."""
    folder = running.folder
    plain = Process("ps", "--durability", "log", "--dir", folder / "plain-ps", "--json", log=folder / "plain-ps.log")
    try:
        address = plain.ready()["address"]
        text = TRAIN.format(
            redis=running.broker, batch=BATCH, servers=address, out="plain", steps=f"max_steps = {step}"
        )
        (folder / "plain.toml").write_text(text)
        trained = Process("train", folder / "plain.toml", "--json", log=folder / "plain.log")
        trained.process.communicate(timeout=300)
        if trained.process.returncode:
            raise RuntimeError(f"the run without faults failed:\n{(folder / 'plain.log').read_text()[-2000:]}")
        return _rows([address]), _dense(folder / "plain")
    finally:
        plain.stop()
