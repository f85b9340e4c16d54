"""Faults applied to real servers, and what they cost: `make chaos`.

    python -m benchmarks.reliability                       # all parts, bounded to ten minutes
    python -m benchmarks.reliability --only failover --kills 30

- **failover**: three workers write to a shard on two servers with ``--ack follower``; the leader is killed and its
  directory deleted, again and again. A checker compares every row with what was acknowledged.
- **handover**: the same load while the lead is handed over by plan; how long a write waited.
- **partition**: the leader is cut off from ZooKeeper. Never do two servers acknowledge.
- **powerloss**: a trace of writes and syncs of the log, cut at every point; what was not synced is lost or torn:
  the server comes back with what was acknowledged.
- **throughput**: updates per second without a follower, and with one for each ``--ack``.
- **restore**: 5 M rows from an S3 API on loopback, against a restore from the disk.

Every update of a worker goes to a row of its own, once: a row that is not there was lost, one that counts two was
applied twice. Each worker also assigns rising numbers to one row: a smaller one at the end came out of order.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Report, parser
from shoal.errors import DeadlineError
from shoal.sharded import Engine, ParameterServer, PsClient, Shard, ps_table
from shoal.sharded.ps.archive.restoring import restore
from shoal.sharded.ps.archive.store import Archive
from shoal.sharded.ps.archive.uploading import Uploading
from shoal.sharded.ps.protocol import Op, Request
from shoal.sharded.ps.replica.replication import server_name
from shoal.sharded.ps.server import log as log_module
from shoal.testing.proxy import Proxy
from shoal.testing.zookeeper import ZooKeeper, zookeeper_unavailable

SESSION_S = 2.0
WAIT_S = 60.0
DIM = 4
LONG = timedelta(minutes=5)


@dataclass
class Server:
    """A `shoal ps` process of a group, which is started again at its port."""

    folder: Path
    registry: str
    ack: str
    options: tuple[str, ...] = ()
    port: int = 0
    process: subprocess.Popen[str] | None = None

    def start(self) -> Server:
        command = [
            sys.executable, "-m", "shoal", "ps", "--durability", "log", "--dir", str(self.folder), "--json",
            "--registry", self.registry, "--ack", self.ack, "--session-timeout", f"{SESSION_S}s", "--port",
            str(self.port), *self.options,
        ]  # fmt: skip
        with open(f"{self.folder}.log", "a") as told:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, text=True)
        assert self.process.stdout is not None
        self.port = int(json.loads(self.process.stdout.readline())["address"].rpartition(":")[2])
        return self

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return server_name(self.folder / "shard-00000")

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_S)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)


@dataclass
class Worker:
    """Writes one row after another, and notes what was acknowledged and how long it took."""

    number: int
    addresses: list[str]
    acknowledged: int = 0
    waits: list[float] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def run(self) -> None:
        try:
            with PsClient(self.addresses, deadline=LONG) as client:
                table = table_of(client)
                while not self.ended.is_set():
                    step = self.acknowledged
                    begin = time.perf_counter()
                    table.apply_gradients(self.row(step), torch.ones(1, DIM), step)
                    table.assign(self.last(), torch.full((1, DIM), float(step)))
                    self.waits.append((time.perf_counter() - begin) / 2)
                    self.acknowledged += 1
        except BaseException as error:
            self.error = error

    def row(self, step: int) -> torch.Tensor:
        return torch.tensor([(self.number + 1) * 10_000_000 + step])

    def last(self) -> torch.Tensor:
        return torch.tensor([self.number])

    def check(self, table: Any) -> list[str]:
        """What is wrong: rows that were lost or doubled, and a last number that is not the last."""
        if self.error is not None:
            return [f"worker {self.number}: {self.error!r}"]
        found = []
        for begin in range(0, self.acknowledged, 100_000):
            ids = torch.arange(begin, min(self.acknowledged, begin + 100_000)) + (self.number + 1) * 10_000_000
            rows = table.lookup(ids)[:, 0]
            for place in (rows != -1).nonzero().view(-1).tolist():
                what = "is missing" if rows[place] == 0 else f"was applied {-rows[place]:g} times"
                found.append(f"worker {self.number}: update {begin + place} {what}")
        last = table.lookup(self.last())[0, 0].item()
        if self.acknowledged and last < self.acknowledged - 1:
            found.append(f"worker {self.number}: the last number is {last:g}, {self.acknowledged - 1} was acknowledged")
        return found


def table_of(client: PsClient) -> Any:
    return ps_table(client, DIM, name="t", optimizer="sgd", lr=1.0, initializer="zeros")


@contextmanager
def running(workers: list[Worker]) -> Iterator[None]:
    threads = [threading.Thread(target=worker.run, daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for worker in workers:
            worker.ended.set()
        for thread in threads:
            thread.join(WAIT_S)


def until(check: Any, what: str, seconds: float = WAIT_S) -> Any:
    end = time.monotonic() + seconds
    while not (found := check()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.02)
    return found


def in_sync(addresses: list[str], count: int) -> dict[str, Any]:
    def look() -> Any:
        for address in addresses[0].split("|"):
            with PsClient([address], deadline=timedelta(seconds=2)) as client, suppress(DeadlineError):
                told = client.info()[0]["group"]
                if told["role"] == "leader" and len(told["in_sync"]) == count:
                    return told
        return None

    return until(look, f"{count} servers in sync")


@contextmanager
def pair(folder: Path, registry: str, ack: str, *options: str) -> Iterator[list[Server]]:
    folder.mkdir(exist_ok=True)
    servers = [Server(folder / name, registry, ack, options).start() for name in ("a", "b")]
    try:
        yield servers
    finally:
        for server in servers:
            server.end()


def group(servers: list[Server]) -> list[str]:
    return ["|".join(server.address for server in servers)]


def tell(report: Report, what: str, value: float, unit: str = "", at_most: float | None = None) -> None:
    """A number, and the largest that is wanted."""
    text = f"{value:.2f} {unit}" if unit else f"{value:g}"
    report.add(what, text, ratio=None if at_most is None else value, goal=at_most, at_most=True)


def failover(report: Report, options: argparse.Namespace, folder: Path, zookeeper: str) -> None:
    rng, gaps = random.Random(options.seed), []
    with pair(folder, f"zk://{zookeeper}", "follower", "--group", "failover") as servers:
        addresses = group(servers)
        workers = [Worker(number, addresses) for number in range(3)]
        with running(workers):
            for _ in range(options.kills):
                told = in_sync(addresses, 2)
                time.sleep(rng.uniform(0.1, 0.6))
                leader = next(server for server in servers if server.name == told["name"])
                counts, begin = [worker.acknowledged for worker in workers], time.monotonic()
                leader.kill()
                shutil.rmtree(leader.folder)
                until(
                    lambda counts=counts: all(w.acknowledged > n + 2 for w, n in zip(workers, counts, strict=True)),
                    "writes to resume",
                )
                gaps.append(time.monotonic() - begin)
                leader.start()
        with PsClient(addresses, deadline=LONG) as client:
            wrong = [text for worker in workers for text in worker.check(table_of(client))]
    total = sum(worker.acknowledged for worker in workers)
    for text in wrong[:10]:
        print(text)
    tell(report, f"of {total} acknowledged updates lost or doubled, {options.kills} kills", len(wrong), at_most=0)
    gaps.sort()
    tell(report, "writes resume after, p50", statistics.median(gaps), "s")
    tell(report, "writes resume after, p99", gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))], "s", 5)


def handover(report: Report, options: argparse.Namespace, folder: Path, zookeeper: str) -> None:
    with pair(folder, f"zk://{zookeeper}", "follower", "--group", "handover") as servers:
        addresses = group(servers)
        workers = [Worker(number, addresses) for number in range(3)]
        with running(workers):
            for _ in range(options.handovers):
                told = in_sync(addresses, 2)
                leader = next(server for server in servers if server.name == told["name"])
                subprocess.run([sys.executable, "-m", "shoal", "ps", "handover", leader.address], check=True,
                               capture_output=True, timeout=WAIT_S)  # fmt: skip
                time.sleep(0.5)
            in_sync(addresses, 2)
        with PsClient(addresses, deadline=LONG) as client:
            wrong = [text for worker in workers for text in worker.check(table_of(client))]
    tell(report, f"updates lost or doubled in {options.handovers} hand-overs", len(wrong), at_most=0)
    tell(report, "longest wait of a write", max(max(worker.waits) for worker in workers), "s", 0.5)


def partition(report: Report, options: argparse.Namespace, folder: Path, zookeeper: str) -> None:
    host, _, port = zookeeper.partition(":")
    proxies = [Proxy((host, int(port))) for _ in range(2)]
    servers = [
        Server(folder / name, f"zk://127.0.0.1:{proxy.address[1]}", "follower", ("--group", "partition")).start()
        for name, proxy in zip(("a", "b"), proxies, strict=True)
    ]
    both = 0
    try:
        addresses = group(servers)
        workers = [Worker(number, addresses) for number in range(2)]
        with running(workers):
            for _ in range(options.partitions):
                told = in_sync(addresses, 2)
                place = next(i for i, server in enumerate(servers) if server.name == told["name"])
                proxies[place].cut()
                until(lambda place=place: _role(servers[1 - place]) == "leader", "the other server to lead")
                both += _acknowledges(servers[place])
                proxies[place].heal()
                until(lambda place=place: _role(servers[place]) == "follower", "the old leader to follow")
        with PsClient(addresses, deadline=LONG) as client:
            wrong = [text for worker in workers for text in worker.check(table_of(client))]
    finally:
        for server in servers:
            server.end()
        for proxy in proxies:
            proxy.close()
    tell(report, f"old leaders that acknowledged, {options.partitions} partitions", both, at_most=0)
    tell(report, "acknowledged updates lost or doubled", len(wrong), at_most=0)


def _role(server: Server) -> str:
    with PsClient([server.address], deadline=timedelta(seconds=10)) as client:
        return client.info()[0]["group"]["role"]


def _acknowledges(server: Server) -> int:
    """1 where a server that was cut off from the registry acknowledges a write."""
    with PsClient([server.address], deadline=timedelta(seconds=1)) as client:
        try:
            table_of(client).apply_gradients(torch.tensor([5]), torch.ones(1, DIM), 0)
            return 1
        except Exception:
            return 0


def powerloss(report: Report, options: argparse.Namespace, folder: Path) -> None:
    trace, acknowledged = _trace(folder / "trace", options.operations)
    rng, wrong, cuts = random.Random(options.seed), 0, 0
    for cut in range(len(trace) + 1):
        for kept in ("none", "all", "torn", "some"):
            cuts += 1
            least = max((n for at, n in acknowledged if at <= cut), default=0)
            if not _recovers(folder / "cut", trace[:cut], kept, least, options.operations, rng):
                wrong += 1
    tell(report, f"wrong states, {options.operations} writes cut at {cuts} points", wrong, at_most=0)


def _trace(folder: Path, operations: int) -> tuple[list[tuple[str, str, int, bytes]], list[tuple[int, int]]]:
    """What a server wrote and synced, and after how many of these how many writes were acknowledged."""
    trace: list[tuple[str, str, int, bytes]] = []
    acknowledged: list[tuple[int, int]] = []
    real_write, real_sync, names = os.pwritev, os.fdatasync, {}
    real_new = log_module._new_file

    def new_file(path: Path, head: bytes) -> int:
        fd = real_new(path, head)
        names[fd] = path.name
        trace.append(("write", path.name, 0, head))
        trace.append(("sync", path.name, 0, b""))
        return fd

    def write(fd: int, parts: Any, offset: int) -> int:
        data = b"".join(bytes(memoryview(part).cast("B")) if len(part) else b"" for part in parts)
        trace.append(("write", names[fd], offset, data))
        return real_write(fd, parts, offset)

    def sync(fd: int) -> None:
        real_sync(fd)
        if fd in names:
            trace.append(("sync", names[fd], 0, b""))

    log_module._new_file, log_module.os = new_file, _Os(pwritev=write, fdatasync=sync)  # type: ignore[assignment]
    try:
        engine = Engine(Shard(0, 1), "log", folder)
        engine.recover()
        with ParameterServer(Engine(Shard(0, 1), "none")) as maker, PsClient([maker.address]) as client:
            table_of(client)
            spec = maker.engine.shard.specs["t"]
        create = Request(Op.CREATE, counts=[0], names=("t",), ids=bytes.fromhex(spec["config"]),
                         values=json.dumps({k: v for k, v in spec.items() if k != "config"}).encode())  # fmt: skip
        assert engine.apply([create])[0].status == 0
        assert engine.log is not None
        engine.log.sync()
        rng = random.Random(1)
        done = 0
        while done < operations:
            for _ in range(min(rng.choice((1, 1, 2, 5)), operations - done)):
                done += 1
                request = Request(
                    Op.APPLY, stream=bytes(15) + b"w", seq=done, acked=done - 1, counts=(1,), names=("t",),
                    rates=(1.0,), ids=torch.tensor([done]), values=torch.ones(DIM),
                )  # fmt: skip
                assert engine.apply([request])[0].status == 0
            engine.log.sync()
            acknowledged.append((len(trace), done))
        engine.close()
    finally:
        log_module._new_file, log_module.os = real_new, os
    return trace, acknowledged


class _Os:
    """The functions of `os`, some of them replaced."""

    def __init__(self, **others: Any) -> None:
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def _recovers(folder: Path, trace: list[Any], kept: str, least: int, most: int, rng: random.Random) -> bool:
    """Whether a server comes back with at least the acknowledged writes, in order, from a disk that kept all that was
    synced and of the rest none, all, a torn part, or some."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    safe = {}
    for place, (kind, name, _, _) in enumerate(trace):
        if kind == "sync":
            safe[name] = place
    files: dict[str, bytearray] = {}
    for place, (kind, name, offset, data) in enumerate(trace):
        if kind != "write":
            continue
        if place > safe.get(name, -1):
            if kept == "none" or (kept == "some" and rng.random() < 0.5):
                continue
            if kept == "torn":
                data = data[: rng.randrange(len(data) + 1)]
        file = files.setdefault(name, bytearray())
        file.extend(bytes(max(0, offset + len(data) - len(file))))
        file[offset : offset + len(data)] = data
    for name, content in files.items():
        (folder / name).write_bytes(content)
    engine = Engine(Shard(0, 1), "log", folder)
    try:
        engine.recover()
        table = engine.shard.tables.get("t")
        if table is None:
            return least == 0
        ids = torch.arange(1, most + 1)
        applied = (table.lookup(ids)[:, 0] == -1).tolist()
        count = sum(applied)
        return count >= least and all(applied[:count])
    finally:
        engine.close()


def throughput(report: Report, options: argparse.Namespace, folder: Path, zookeeper: str) -> None:
    rates: dict[str, float] = {}
    for kind in ("none", "local", "follower"):
        with ExitStack() as stack:
            if kind == "none":
                command = [
                    sys.executable,
                    "-m",
                    "shoal",
                    "ps",
                    "--durability",
                    "log",
                    "--dir",
                    str(folder / kind),
                    "--json",
                ]
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                stack.callback(process.wait, WAIT_S)
                stack.callback(process.kill)
                assert process.stdout is not None
                addresses = [json.loads(process.stdout.readline())["address"]]
            else:
                registry = f"zk://{zookeeper}"
                servers = stack.enter_context(pair(folder / kind, registry, kind, "--group", f"throughput-{kind}"))
                addresses = group(servers)
                in_sync(addresses, 2)
            rates[kind] = _rate(addresses, options.seconds)
    for kind, goal in (("local", 0.7), ("follower", 0.45)):
        report.add(
            f"updates of 4,096 ids with a follower, --ack {kind}", f"{rates[kind]:.2f} M/s", f"{rates['none']:.2f} M/s",
            rates[kind] / rates["none"], goal,
        )  # fmt: skip


def _rate(addresses: list[str], seconds: float) -> float:
    ids, done = torch.arange(4096), 0
    gradients = torch.ones(4096, 16)
    with PsClient(addresses, deadline=LONG, max_staleness=4) as client:
        table = ps_table(client, 16, name="wide", optimizer="adagrad", lr=0.1)
        for step in range(10):
            table.apply_gradients(ids + step * 4096, gradients, step)
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            table.apply_gradients(ids + (done % 200) * 4096, gradients, done)
            done += 1
        client.flush()
        return done * 4096 / (time.perf_counter() - begin) / 1e6


def restoring(report: Report, options: argparse.Namespace, folder: Path) -> None:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it tells of every request
    s3 = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    s3.start()
    try:
        host, port = s3.get_host_and_port()
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_REGION": "us-east-1",
        }  # fmt: skip
        import urllib.request

        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT"), timeout=60).close()
        archive = Archive("s3://bucket/p", 0)
        with ParameterServer(Engine(Shard(0, 1), "log", folder / "a")) as server:
            with PsClient([server.address], deadline=LONG) as client:
                table = ps_table(client, 16, name="wide", optimizer="sgd", lr=0.1)
                for begin in range(0, options.rows, 500_000):
                    table.assign(
                        torch.arange(begin, min(options.rows, begin + 500_000)),
                        torch.ones(500_000, 16)[: options.rows - begin],
                    )
                client.checkpoint()
            log = server.engine.log
            assert log is not None
            Uploading(archive, folder / "a", durable=lambda: log.durable_number).round()
        begin = time.perf_counter()
        _recover(folder / "a")
        local = time.perf_counter() - begin
        begin = time.perf_counter()
        data = sum(len(archive.get(f"checkpoints/checkpoint-{n.number:016d}/{f}")) for n in archive.checkpoints()[-1:]
                   for f in archive.files(n.number))  # fmt: skip
        transfer = time.perf_counter() - begin
        begin = time.perf_counter()
        restore(archive, folder / "b")
        _recover(folder / "b")
        whole = time.perf_counter() - begin
    finally:
        s3.stop()
    tell(report, f"{options.rows / 1e6:g} M rows ({data >> 20} MB): transfer alone", transfer, "s")
    tell(report, "local restore", local, "s")
    report.add(
        "restored from S3, against 2 local restores + the transfer", f"{whole:.2f} s", f"{2 * local + transfer:.2f} s",
        whole / (2 * local + transfer), 1, at_most=True,
    )  # fmt: skip


def _recover(folder: Path) -> None:
    engine = Engine(Shard(0, 1), "log", folder)
    engine.lock()
    engine.recover()
    engine.close()


PARTS = ("failover", "handover", "partition", "powerloss", "throughput", "restore")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=PARTS, action="append", help="some of the parts; all by default")
    arguments.add_argument("--kills", type=int, default=30)
    arguments.add_argument("--handovers", type=int, default=10)
    arguments.add_argument("--partitions", type=int, default=20)
    arguments.add_argument("--operations", type=int, default=2000, help="of the trace of powerloss")
    arguments.add_argument("--seconds", type=float, default=10.0, help="of each throughput")
    arguments.add_argument("--rows", type=int, default=5_000_000, help="of restore")
    arguments.add_argument("--seed", type=int, default=int(time.time()))
    options = arguments.parse_args()
    report = Report("reliability")
    report.start()
    print(f"seed {options.seed}")
    with tempfile.TemporaryDirectory(prefix="shoal-chaos-") as name, ExitStack() as stack:
        root = Path(name)
        wanted = options.only or PARTS
        zookeeper = ""
        if {"failover", "handover", "partition", "throughput"} & set(wanted):
            if why := zookeeper_unavailable():
                raise SystemExit(why)
            server = ZooKeeper(root / "zookeeper", tick_ms=500).start()
            stack.callback(server.kill)
            zookeeper = server.hosts
        for part in wanted:
            folder = root / part
            folder.mkdir()
            if part in ("powerloss", "restore"):
                {"powerloss": powerloss, "restore": restoring}[part](report, options, folder)
            else:
                made = {"failover": failover, "handover": handover, "partition": partition, "throughput": throughput}
                made[part](report, options, folder, zookeeper)
    if options.json:
        report.save(options.json)


if __name__ == "__main__":
    main()
