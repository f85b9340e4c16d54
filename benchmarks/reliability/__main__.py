"""Faults applied to real processes, and what they cost: `make chaos`.

    python -m benchmarks.reliability                                  # all kinds of faults, in less than ten minutes
    python -m benchmarks.reliability --only failover --kills 30 --minutes 60
    python -m benchmarks.reliability --figures                        # every figure of docs/reliability.md, some hours

- **failover**: three workers write to a shard on two servers with ``--ack follower``; the leader is killed and its
  directory deleted, again and again.
- **handover**: the same load while the lead is handed over by plan; how long a write waited.
- **partition**: the leader is cut off from ZooKeeper. Never do two servers acknowledge.
- **hosts**: servers, ZooKeeper and workers on four hosts (network namespaces); packets are cut, delayed, lost, doubled.
- **machines**: servers frozen and killed, disks slow, full or failing, clocks stepped, files damaged, ZooKeeper killed.
- **powerloss**: a trace of writes and syncs, cut at every point; what was not synced is lost or torn.
- **elastic**: ranks of a training run killed and frozen; rows are compared with those of a run without.
- **system**: a joiner, a trainer, servers with followers, replicas, Redis and ZooKeeper, all of them killed and frozen.
- **throughput**: updates per second without a follower, and with one for each ``--ack``.
- **restore**: 5 M rows from an S3 API on loopback, against a restore from the disk.
- **soak**: a million requests to a replica that gets pushes; its memory.

Every update of a worker goes to a row of its own, once, and each worker sets one row to rising numbers: the checker
(`shoal.testing.history`) names each acknowledged update that is missing, doubled or out of order. Exit code 1 where it
finds one, or where a goal is missed.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, parser
from benchmarks.reliability.elastic import elastic
from benchmarks.reliability.hosts import hosts
from benchmarks.reliability.machines import machines
from benchmarks.reliability.powerloss import powerloss
from benchmarks.reliability.replication import failover, handover, partition, throughput
from benchmarks.reliability.restoring import restoring
from benchmarks.reliability.soak import soak
from benchmarks.reliability.system import system
from shoal.testing.network import network_unavailable
from shoal.testing.zookeeper import ZooKeeper, zookeeper_unavailable

WITH_ZOOKEEPER = {"failover": failover, "handover": handover, "partition": partition, "throughput": throughput}
ALONE = {
    "hosts": hosts, "machines": machines, "powerloss": powerloss, "elastic": elastic, "system": system,
    "restore": restoring, "soak": soak,
}  # fmt: skip
SHARES = {
    "system": 0.22, "elastic": 0.14, "failover": 0.13, "handover": 0.05, "partition": 0.10, "hosts": 0.14,
    "machines": 0.15, "powerloss": 0.07,
}  # fmt: skip
"""Of the minutes of a run, with the starts and ends of processes in them; those that start most come first."""
OVERHEAD_S = {"failover": 15, "handover": 8, "partition": 15, "hosts": 20, "machines": 20, "elastic": 30, "system": 70}
GRACE_S = 45.0
"""What the last part may take longer than its share."""
LEAST_S = 10.0
"""A part is left out, and the run fails, where less time is left."""
FIGURES = (*SHARES, "throughput", "restore", "soak")


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.set_defaults(repeats=3)
    arguments.add_argument("--only", choices=FIGURES, action="append", help="some of the parts")
    arguments.add_argument("--figures", action="store_true", help="all parts, in full")
    arguments.add_argument(
        "--minutes", type=float, default=9.0, help="of the whole run; no fault begins after its share"
    )
    arguments.add_argument("--kills", type=int, default=30)
    arguments.add_argument("--handovers", type=int, default=10)
    arguments.add_argument("--partitions", type=int, default=20)
    arguments.add_argument("--operations", type=int, default=2000, help="of the trace of powerloss")
    arguments.add_argument("--every", type=float, default=30.0, help="seconds between kills of elastic")
    arguments.add_argument("--elastic-seconds", type=float, default=300.0, help="how long ranks are killed")
    arguments.add_argument("--freeze", action="store_true", help="every third rank of elastic is frozen instead")
    arguments.add_argument("--seconds", type=float, default=10.0, help="of each throughput")
    arguments.add_argument("--rows", type=int, default=5_000_000, help="of restore")
    arguments.add_argument("--requests", type=int, default=1_000_000, help="of soak")
    arguments.add_argument("--every-fault", action="store_true", help="faults in turn, not by chance")
    arguments.add_argument("--seed", type=int, default=int(time.time()))
    options = arguments.parse_args()
    wanted = options.only or (FIGURES if options.figures else list(SHARES))
    whole = 60 * options.minutes * (100 if options.figures else 1)
    options.clock = Clock(whole, wanted)
    options.share = options.clock.share
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGALRM, _too_late)
    signal.setitimer(signal.ITIMER_REAL, whole + GRACE_S)
    try:
        _run(options, wanted)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _end_children()


class Clock:
    """Divides the time of a run among its parts; what one takes too long is taken from all that follow."""

    def __init__(self, seconds: float, parts: Sequence[str]) -> None:
        self._begin, self._seconds, self._parts = time.monotonic(), seconds, list(parts)

    def elapsed(self) -> float:
        return time.monotonic() - self._begin

    def left(self) -> float:
        return self._seconds - self.elapsed()

    def share(self, part: str) -> float:
        """Seconds in which a part may begin faults; it begins one in any case."""
        following = self._parts[self._parts.index(part) :]
        of = SHARES.get(part, 1.0) / (sum(SHARES.get(one, 0.0) for one in following) or 1.0)
        return max(0.0, self.left() * of - OVERHEAD_S.get(part, 0))


def _too_late(*_: Any) -> None:
    raise TimeoutError("the run did not end in its time")


def _end_children() -> None:
    """Kills what a part that failed has left running."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    for process in parents:
        above = process
        while above in parents and above != os.getpid():
            above = parents[above]
        if above == os.getpid() and process != above:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)


def _run(options: Namespace, wanted: Sequence[str]) -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(each or os.getcwd() for each in sys.path)
    report = Report("reliability")
    report.start()
    print(f"seed {options.seed}", flush=True)
    left_out = []
    with tempfile.TemporaryDirectory(prefix="shoal-chaos-") as name, ExitStack() as stack:
        root, zookeeper = Path(name), ""
        if why := zookeeper_unavailable():
            raise SystemExit(why)
        if set(wanted) & WITH_ZOOKEEPER.keys():
            server = ZooKeeper(root / "zookeeper", tick_ms=500).start()
            stack.callback(server.kill)
            zookeeper = server.hosts
        for part in wanted:
            folder = root / part
            folder.mkdir()
            print(f"# {part}, after {options.clock.elapsed():.0f} s", flush=True)
            if options.clock.left() < LEAST_S:
                left_out.append(part)
            elif part == "hosts" and (why := network_unavailable()):
                print(f"  left out: {why}")
            elif part in WITH_ZOOKEEPER:
                WITH_ZOOKEEPER[part](report, options, folder, zookeeper)
            else:
                ALONE[part](report, options, folder)
    print(f"# {options.clock.elapsed():.0f} s")
    report.save(options.json)
    if left_out:
        raise SystemExit(f"no time was left for {', '.join(left_out)}; give more --minutes, or --only these")
    if any(row["met"] is False for row in report.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
