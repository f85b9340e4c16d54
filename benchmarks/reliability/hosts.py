"""A shard on two hosts, ZooKeeper on a third, workers on a fourth; the network between them is cut, slow and lossy."""

from __future__ import annotations

import random
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import Report
from benchmarks.reliability import group as g
from shoal.testing.history import History
from shoal.testing.network import Network
from shoal.testing.zookeeper import ZooKeeper

Fault = Callable[[Network, str, str, random.Random], None]


def _one_way(network: Network, lead: str, other: str, rng: random.Random) -> None:
    network.link(lead, other).cut = True


FAULTS: dict[str, Fault] = {
    "leader cut off from the registry": lambda net, lead, other, rng: net.cut(lead, "zk"),
    "leader cut off from its follower": lambda net, lead, other, rng: net.cut(lead, other),
    "leader cut off from everybody": lambda net, lead, other, rng: net.cut(lead),
    "follower cut off from everybody": lambda net, lead, other, rng: net.cut(other),
    "workers cut off from the leader": lambda net, lead, other, rng: net.cut("w", lead),
    "registry cut off from everybody": lambda net, lead, other, rng: net.cut("zk"),
    "leader heard by its follower, which is not": _one_way,
    "packets delayed": lambda net, lead, other, rng: net.shape(delay_s=0.02, jitter_s=0.05),
    "packets doubled": lambda net, lead, other, rng: net.shape(repeat=0.3, jitter_s=0.005),
    "packets lost": lambda net, lead, other, rng: net.shape(drop=0.05),
}


def hosts(report: Report, options: Namespace, folder: Path) -> None:
    with Network("zk", "a", "b", "w", seed=options.seed) as network:
        network.inside("w", lambda: _on_hosts(report, options, folder, network))


def _on_hosts(report: Report, options: Namespace, folder: Path, network: Network) -> None:
    rng, history = random.Random(options.seed), History()
    zookeeper = ZooKeeper(folder / "zookeeper", tick_ms=500, host=network["zk"]).start()
    servers = [
        g.Server(folder / name, f"zk://{zookeeper.hosts}", "follower", ("--group", "hosts"), host=network[name])
        for name in ("a", "b")
    ]
    names, done, slowest = list(FAULTS), Counter[str](), 0.0
    try:
        for server in servers:
            server.start()
        addresses = g.group(servers)
        workers = [g.Worker(number, addresses, history) for number in range(2)]
        end = time.monotonic() + options.share("hosts")
        with g.running(workers):
            while not done or time.monotonic() < end:
                lead = g.leader(servers, 2)
                which = names[sum(done.values()) % len(names)] if options.every_fault else rng.choice(names)
                other = "b" if lead.folder.name == "a" else "a"
                FAULTS[which](network, lead.folder.name, other, rng)
                time.sleep(rng.uniform(0.5, 6.0))
                network.heal()
                slowest = max(slowest, g.resumed(workers))
                done[which] += 1
        g.leader(servers, 2)
        wrong = g.checked(history, addresses, workers)
    finally:
        for server in servers:
            server.end()
        zookeeper.kill()
    for which in names:
        print(f"  {which}: {done[which]} times")
    counts = network.counts
    print(
        f"  {counts.passed:,} packets, {counts.dropped:,} lost, {counts.repeated:,} doubled, {counts.delayed:,} delayed"
    )
    g.tell_wrong(report, f"of {history.acknowledged} updates wrong, {sum(done.values())} faults between 4 hosts", wrong)
    g.tell(report, "slowest return of writes once the network is whole", slowest, "s")
