"""Faults applied to real processes, and their cost: `make chaos`.

    python -m benchmarks.reliability                                  # all kinds of faults, in less than ten minutes
    python -m benchmarks.reliability --only failover --kills 30 --minutes 60
    python -m benchmarks.reliability --figures                        # every figure of docs/reliability.md: 1.5 hours

- **failover**: three workers write to a shard on two servers with ``--ack follower``; the leader is repeatedly killed
  and its directory deleted.
- **handover**: the same load during `shoal ps handover`; measures how long a write waits.
- **partition**: the leader is cut off from ZooKeeper; two servers must never acknowledge at the same time.
- **hosts**: servers, ZooKeeper and workers on four hosts (network namespaces), between which connections are cut and
  packets delayed, lost and doubled.
- **machines**: servers frozen and killed, disks slow, full or failing, clocks stepped, files damaged, ZooKeeper killed.
- **powerloss**: a trace of writes and syncs, cut at every point; unsynced data is lost or torn.
- **elastic**: ranks of a training run killed and frozen; rows are compared with those of an undisturbed run.
- **system**: a joiner, a trainer, servers with followers, replicas, Redis and ZooKeeper, all of them killed and frozen.
- **throughput**: updates per second without a follower, and with one for each ``--ack``.
- **restore**: 5 M rows from an S3 API on loopback, against a restore from the disk.
- **soak**: a million requests to a replica that gets pushes, and the growth of its memory.

Every update of a worker goes once to a separate row, and each worker also sets one row to rising numbers: the checker
(`shoal.testing.history`) reports each acknowledged update that is missing, doubled or out of order. The exit code is 1
if it finds one, or if a goal is missed.
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
"""The share of each part in the time of a run, including starting and ending its processes."""
OVERHEAD_S = {"failover": 15, "handover": 8, "partition": 15, "hosts": 20, "machines": 20, "elastic": 30, "system": 70}
GRACE_S = 45.0
"""How much longer than its share the last part may take."""
LEAST_S = 10.0
"""If less time is left, a part is omitted, and the run fails."""
FIGURES = (*SHARES, "throughput", "restore", "soak")


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.set_defaults(repeats=3)
    arguments.add_argument("--only", choices=FIGURES, action="append", help="run only this part; can be repeated")
    arguments.add_argument("--figures", action="store_true", help="run all parts, in full")
    arguments.add_argument(
        "--minutes", type=float, default=9.0, help="minutes of the run; no part begins a fault after its share"
    )
    arguments.add_argument("--kills", type=int, default=30)
    arguments.add_argument("--handovers", type=int, default=10)
    arguments.add_argument("--partitions", type=int, default=20)
    arguments.add_argument("--operations", type=int, default=2000, help="writes in the trace of powerloss")
    arguments.add_argument("--every", type=float, default=30.0, help="seconds between kills of elastic")
    arguments.add_argument("--elastic-seconds", type=float, default=300.0, help="how long elastic kills ranks")
    arguments.add_argument("--freeze", action="store_true", help="elastic freezes every third rank instead")
    arguments.add_argument("--seconds", type=float, default=10.0, help="seconds of each measurement of throughput")
    arguments.add_argument("--rows", type=int, default=5_000_000, help="rows of restore")
    arguments.add_argument("--requests", type=int, default=1_000_000, help="requests of soak")
    arguments.add_argument("--every-fault", action="store_true", help="apply all faults in turn, not at random")
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
    """Divides the time of a run among its parts; if one takes too long, all later ones get less."""

    def __init__(self, seconds: float, parts: Sequence[str]) -> None:
        self._begin, self._seconds, self._parts = time.monotonic(), seconds, list(parts)

    def elapsed(self) -> float:
        return time.monotonic() - self._begin

    def left(self) -> float:
        return self._seconds - self.elapsed()

    def share(self, part: str) -> float:
        """Seconds in which a part may begin faults; it always begins at least one."""
        following = self._parts[self._parts.index(part) :]
        of = SHARES.get(part, 1.0) / (sum(SHARES.get(one, 0.0) for one in following) or 1.0)
        return max(0.0, self.left() * of - OVERHEAD_S.get(part, 0))


def _too_late(*_: Any) -> None:
    raise TimeoutError("the run did not end in time")


def _end_children() -> None:
    """Kills the processes that a failed part has left running."""
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
