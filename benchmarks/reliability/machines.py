"""A shard on two servers that are frozen and killed; slow, full and failing disks, stepped clocks, damaged files."""

from __future__ import annotations

import errno
import random
import signal
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import Report
from benchmarks.reliability import group as g
from shoal.testing.history import History
from shoal.testing.machine import Machine
from shoal.testing.zookeeper import ZooKeeper


class Scene:
    """Two servers, each with its own machine (clock and disk), and a ZooKeeper."""

    def __init__(self, servers: list[g.Server], zookeeper: ZooKeeper, rng: random.Random) -> None:
        self.servers, self.zookeeper, self.rng = servers, zookeeper, rng
        self.lead, self.other = servers

    def some(self) -> g.Server:
        return self.rng.choice(self.servers)

    def frozen(self, server: g.Server) -> None:
        server.signal(signal.SIGSTOP)
        time.sleep(self.rng.uniform(0.2, 5.0))
        server.signal(signal.SIGCONT)

    def on(self, server: g.Server, **numbers: float) -> None:
        assert server.machine is not None
        server.machine.set(**numbers)
        time.sleep(self.rng.uniform(0.5, 3.0))
        server.machine.heal()

    def failing_sync(self) -> None:
        """A sync fails: the server must end, and start again from the unchanged disk."""
        server = self.some()
        self.on(server, sync_errno=errno.EIO)
        assert server.process is not None
        g.until(lambda: server.process.poll() is not None, "a server whose sync failed to end", 30)
        server.start()

    def stepped(self) -> None:
        """Steps a clock permanently, so that the two clocks differ."""
        machine = self.some().machine
        assert machine is not None
        machine.set(clock_s=self.rng.uniform(-86400, 86400))

    def damaged(self) -> None:
        """Changes a byte of a follower's file while the follower is down."""
        self.other.kill()
        files = [path for path in self.other.folder.rglob("*") if path.is_file() and path.stat().st_size > 64]
        path = self.rng.choice([path for path in files if "log-" in path.name or "checkpoint" in str(path)] or files)
        data = bytearray(path.read_bytes())
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        path.write_bytes(data)
        self.other.start()

    def no_registry(self) -> None:
        self.zookeeper.kill()
        time.sleep(self.rng.uniform(0.2, 4.0))
        self.zookeeper.start()

    def killed(self, server: g.Server) -> None:
        server.kill()
        time.sleep(self.rng.uniform(0.0, 3.0))
        server.start()


FAULTS: dict[str, Callable[[Scene], None]] = {
    "leader frozen": lambda scene: scene.frozen(scene.lead),
    "follower frozen": lambda scene: scene.frozen(scene.other),
    "leader's disk slow": lambda scene: scene.on(scene.lead, sync_s=0.5, write_s=0.05),
    "follower's disk slow": lambda scene: scene.on(scene.other, sync_s=0.5, write_s=0.05),
    "leader's disk full": lambda scene: scene.on(scene.lead, write_errno=errno.ENOSPC),
    "follower's disk full": lambda scene: scene.on(scene.other, write_errno=errno.ENOSPC),
    "a sync fails": Scene.failing_sync,
    "a clock stepped, back or ahead": Scene.stepped,
    "a follower's file damaged": Scene.damaged,
    "ZooKeeper killed": Scene.no_registry,
    "leader killed": lambda scene: scene.killed(scene.lead),
    "follower killed": lambda scene: scene.killed(scene.other),
}


def machines(report: Report, options: Namespace, folder: Path) -> None:
    rng, history, done = random.Random(options.seed), History(), Counter[str]()
    zookeeper = ZooKeeper(folder / "zookeeper", tick_ms=500).start()
    both = [Machine(), Machine()]
    servers = [
        g.Server(folder / name, f"zk://{zookeeper.hosts}", "follower",
                 ("--group", "machines", "--checkpoint-every", "5s"), machine=machine)
        for name, machine in zip(("a", "b"), both, strict=True)
    ]  # fmt: skip
    names, slowest, last = list(FAULTS), 0.0, ""
    try:
        for server in servers:
            server.start()
        addresses = g.group(servers)
        workers = [g.Worker(number, addresses, history) for number in range(2)]
        end = time.monotonic() + options.share("machines")
        with g.running(workers):
            while not done or time.monotonic() < end:
                lead = g.leader(servers, 2)
                scene = Scene([lead, servers[1 - servers.index(lead)]], zookeeper, rng)
                last = names[sum(done.values()) % len(names)] if options.every_fault else rng.choice(names)
                FAULTS[last](scene)
                slowest = max(slowest, g.resumed(workers))
                done[last] += 1
        g.leader(servers, 2)
        wrong = g.checked(history, addresses, workers)
    except BaseException:
        print(f"  at {last!r} after {dict(done)}; the servers' logs end with")
        for server in servers:
            print(f"--- {server.folder.name}\n{Path(f'{server.folder}.log').read_text()[-1500:]}")
        raise
    finally:
        for server in servers:
            server.end()
        zookeeper.kill()
        for machine in both:
            machine.close()
    for which in names:
        print(f"  {which}: {done[which]} times")
    g.tell_wrong(report, f"of {history.acknowledged} updates wrong, {sum(done.values())} faults of two machines", wrong)
    g.tell(report, "slowest return of writes after a fault", slowest, "s")
