"""A shard on two servers: leaders lost with their disks, hand-overs, partitions from the registry, and throughput."""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import time
from argparse import Namespace
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch

from benchmarks.harness import Report
from benchmarks.reliability.group import (
    DIM,
    LONG,
    WAIT_S,
    Server,
    Worker,
    checked,
    group,
    leader,
    pair,
    resumed,
    roles,
    running,
    shoal,
    table_of,
    tell,
    tell_wrong,
    until,
)  # fmt: skip
from shoal.sharded import PsClient, ps_table
from shoal.testing.history import History
from shoal.testing.proxy import Proxy


def failover(report: Report, options: Namespace, folder: Path, zookeeper: str) -> None:
    rng, gaps, history = random.Random(options.seed), [], History()
    end = time.monotonic() + options.share("failover")
    with pair(folder, f"zk://{zookeeper}", "follower", "--group", "failover") as servers:
        addresses = group(servers)
        workers = [Worker(number, addresses, history) for number in range(3)]
        with running(workers):
            while not gaps or (len(gaps) < options.kills and time.monotonic() < end):
                victim = leader(servers, 2)
                time.sleep(rng.uniform(0.1, 0.6))
                victim.kill()
                shutil.rmtree(victim.folder)
                gaps.append(resumed(workers))
                victim.start()
            leader(servers, 2)
        wrong = checked(history, addresses, workers)
    tell_wrong(report, f"of {history.acknowledged} updates lost or doubled, {len(gaps)} leaders killed for good", wrong)
    gaps.sort()
    tell(report, "writes resume after, p50", statistics.median(gaps), "s")
    tell(report, "writes resume after, p99", gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))], "s", 5)


def handover(report: Report, options: Namespace, folder: Path, zookeeper: str) -> None:
    history, done = History(), 0
    end = time.monotonic() + options.share("handover")
    with pair(folder, f"zk://{zookeeper}", "follower", "--group", "handover") as servers:
        addresses = group(servers)
        workers = [Worker(number, addresses, history) for number in range(3)]
        with running(workers):
            leader(servers, 2)
            began = time.monotonic()
            while not done or (done < options.handovers and time.monotonic() < end):
                leading = leader(servers, 2)
                subprocess.run(
                    shoal("ps", "handover", leading.address), check=True, capture_output=True, timeout=WAIT_S
                )
                done += 1
                time.sleep(0.5)
            leader(servers, 2)
        wrong = checked(history, addresses, workers)
    tell_wrong(report, f"updates lost or doubled in {done} hand-overs", wrong)
    tell(report, "longest wait of a write", history.longest_wait_s(began), "s", 0.5)


def partition(report: Report, options: Namespace, folder: Path, zookeeper: str) -> None:
    host, _, port = zookeeper.partition(":")
    proxies = [Proxy((host, int(port))) for _ in range(2)]
    history, both, done = History(), 0, 0
    end = time.monotonic() + options.share("partition")
    servers = [
        Server(folder / name, f"zk://127.0.0.1:{proxy.address[1]}", "follower", ("--group", "partition")).start()
        for name, proxy in zip(("a", "b"), proxies, strict=True)
    ]
    try:
        addresses = group(servers)
        workers = [Worker(number, addresses, history) for number in range(2)]
        with running(workers):
            while not done or (done < options.partitions and time.monotonic() < end):
                cut = leader(servers, 2)
                other = servers[1 - servers.index(cut)]
                proxies[servers.index(cut)].cut()
                until(lambda other=other: _role(other) == "leader", "the other server to lead")
                both += _acknowledges(cut)
                resumed(workers)
                proxies[servers.index(cut)].heal()
                until(lambda cut=cut: _role(cut) == "follower", "the old leader to follow")
                done += 1
        wrong = checked(history, addresses, workers)
    finally:
        for server in servers:
            server.end()
        for proxy in proxies:
            proxy.close()
    tell(report, f"old leaders that acknowledged, {done} partitions from the registry", both, at_most=0)
    tell_wrong(report, "acknowledged updates lost or doubled", wrong)


def _role(server: Server) -> str:
    return roles([server], timedelta(seconds=10)).get(server.address, {}).get("role", "")


def _acknowledges(server: Server) -> int:
    """1 if a server that was cut off from the registry acknowledges a write, else 0."""
    with PsClient([server.address], deadline=timedelta(seconds=1)) as client:
        try:
            table_of(client).apply_gradients(torch.tensor([5]), torch.ones(1, DIM), 0)
            return 1
        except Exception:
            return 0


def throughput(report: Report, options: Namespace, folder: Path, zookeeper: str) -> None:
    rates: dict[str, list[float]] = {"none": [], "local": [], "follower": []}
    for attempt in range(options.repeats):
        for kind, found in rates.items():
            with ExitStack() as stack:
                place = folder / f"{kind}{attempt}"
                if kind == "none":
                    command = shoal("ps", "--durability", "log", "--dir", place, "--json")
                    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                    stack.callback(process.wait, WAIT_S)
                    stack.callback(process.kill)
                    assert process.stdout is not None
                    addresses = [json.loads(process.stdout.readline())["address"]]
                else:
                    name = f"throughput-{kind}{attempt}"
                    servers = stack.enter_context(pair(place, f"zk://{zookeeper}", kind, "--group", name))
                    leader(servers, 2)
                    addresses = group(servers)
                found.append(_rate(addresses, options.seconds))
            shutil.rmtree(place, ignore_errors=True)
    middle = {kind: statistics.median(found) for kind, found in rates.items()}
    for kind, goal in (("local", 0.7), ("follower", 0.45)):
        report.add(
            f"updates of 4,096 ids with a follower, --ack {kind}", f"{middle[kind]:.2f} M/s",
            f"{middle['none']:.2f} M/s", middle[kind] / middle["none"], goal,
        )  # fmt: skip


def _rate(addresses: list[str], seconds: float) -> float:
    ids, done = torch.arange(4096), 0
    gradients = torch.ones(4096, 16)
    with PsClient(addresses, deadline=LONG, max_staleness=4) as client:
        table = ps_table(client, 16, name="wide", optimizer="adagrad", lr=0.1)
        for step in range(200):
            table.apply_gradients(ids + step * 4096, gradients, step)
        client.flush()
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            table.apply_gradients(ids + (done % 200) * 4096, gradients, done)
            done += 1
        client.flush()
        return done * 4096 / (time.perf_counter() - begin) / 1e6
