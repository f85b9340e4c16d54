"""Faults applied to real processes, and what they cost: `make chaos`.

    python -m benchmarks.reliability                                  # all kinds of faults, bounded to ten minutes
    python -m benchmarks.reliability --only failover --kills 30 --minutes 60
    python -m benchmarks.reliability --figures                        # every figure of docs/reliability.md, some hours

- **failover**: three workers write to a shard on two servers with ``--ack follower``; the leader is killed and its
  directory deleted, again and again.
- **handover**: the same load while the lead is handed over by plan; how long a write waited.
- **partition**: the leader is cut off from ZooKeeper. Never do two servers acknowledge.
- **hosts**: servers, ZooKeeper and workers on four hosts (network namespaces); packets are cut, delayed, lost, doubled.
- **machines**: servers frozen and killed, disks slow, full and failing, clocks stepped, files damaged, ZooKeeper killed.
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
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

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
    "failover": 0.14, "handover": 0.05, "partition": 0.10, "hosts": 0.16, "machines": 0.17, "powerloss": 0.08,
    "elastic": 0.12, "system": 0.18,
}  # fmt: skip
"""Of the minutes of a run, with the starts and ends of processes in them."""
OVERHEAD_S = {"failover": 15, "handover": 8, "partition": 15, "hosts": 20, "machines": 20, "elastic": 30, "system": 60}
FIGURES = (*SHARES, "throughput", "restore", "soak")


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.set_defaults(repeats=3)
    arguments.add_argument("--only", choices=FIGURES, action="append", help="some of the parts")
    arguments.add_argument("--figures", action="store_true", help="all parts, in full")
    arguments.add_argument(
        "--minutes", type=float, default=10.0, help="of the whole run; no fault begins after its share"
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
    parts = sum(SHARES.get(part, 0.0) for part in wanted) or 1.0

    def share(part: str) -> float:
        """Seconds in which a part may begin faults."""
        return max(5.0, whole * SHARES.get(part, 1.0) / parts - OVERHEAD_S.get(part, 0))

    options.share = share
    os.environ["PYTHONPATH"] = os.pathsep.join(each or os.getcwd() for each in sys.path)
    report = Report("reliability")
    report.start()
    print(f"seed {options.seed}", flush=True)
    began = time.monotonic()
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
            print(f"# {part}, after {time.monotonic() - began:.0f} s", flush=True)
            if part == "hosts" and (why := network_unavailable()):
                print(f"  left out: {why}")
            elif part in WITH_ZOOKEEPER:
                WITH_ZOOKEEPER[part](report, options, folder, zookeeper)
            else:
                ALONE[part](report, options, folder)
    print(f"# {time.monotonic() - began:.0f} s")
    report.save(options.json)
    if any(row["met"] is False for row in report.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
