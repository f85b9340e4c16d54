"""How near `shoal plan` comes to real runs: one process, ranks by all-to-all, a worker and a parameter server.

    python -m benchmarks plan                     # 1 and 2 ranks
    python -m benchmarks plan --ranks 1,2,4,8     # on 16 cores

Costs are measured first, then every case is run for real and predicted from them: a table by row, by table and as
copies on each number of ranks. The claim: within 20 % in the median and 35 % at worst.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.harness import Report, parser
from shoal.plan.config import HostPlan, ModelPlan, Plan, TablePlan
from shoal.plan.costs import measure
from shoal.plan.model import estimate, loads_of_plan
from shoal.sharded import Plan as Sharding
from shoal.sharded import Way
from shoal.sharded.placement.plan import Placement
from shoal.testing import run_ranks

WORST, MEDIAN = 1.35, 1.20
IDS = 300_000
WAYS = ("row", "table", "data")
CASES = [
    {"dim": 16, "ids": 20, "batch": 2048, "hidden": 128},
    {"dim": 64, "ids": 20, "batch": 1024, "hidden": 128},
    {"dim": 16, "ids": 5, "batch": 512, "hidden": 512},
]


class Step:
    """One training step of a small model on some table."""

    def __init__(self, table: Any, case: dict[str, int], seed: int) -> None:
        import shoal

        torch.set_num_threads(1)
        shoal.set_num_threads(1)
        generator = torch.Generator().manual_seed(seed)
        shape = (case["batch"], case["ids"])
        self.batches = [torch.randint(IDS, shape, generator=generator) * 982451653 for _ in range(8)]
        self.bag = shoal.nn.HashEmbeddingBag(table, combiner="sum")
        hidden = case["hidden"]
        self.net = torch.nn.Sequential(
            torch.nn.Linear(case["dim"], hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, hidden), torch.nn.ReLU(),
            torch.nn.Linear(hidden, 1),
        )  # fmt: skip
        self.dense = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.parameters = sum(p.numel() for p in self.net.parameters())
        self.at = 0

    def __call__(self) -> None:
        import torch.distributed as dist

        ids = self.batches[self.at % len(self.batches)]
        self.at += 1
        self.dense.zero_grad()
        self.net(self.bag(ids)).square().mean().backward()
        if dist.is_initialized() and dist.get_world_size() > 1:
            flat = torch.cat([p.grad.view(-1) for p in self.net.parameters() if p.grad is not None])
            dist.all_reduce(flat)
        self.dense.step()

    def timed(self, seconds: float = 3.0) -> dict[str, float]:
        for _ in range(len(self.batches)):
            self()
        times = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times) < 8:
            begin = time.perf_counter()
            self()
            times.append(time.perf_counter() - begin)
            if len(times) >= 400:
                break
        unique = statistics.mean(batch.unique().numel() / batch.numel() for batch in self.batches)
        return {"step_s": min(times), "median_s": statistics.median(times), "unique": unique, "dense": self.parameters}


def all_to_all(rank: int, world: int, case: dict[str, int], way: str) -> dict[str, float]:
    from shoal.sharded import AllToAllHashTable

    step = Step(AllToAllHashTable(case["dim"], optimizer="adagrad", lr=0.01, name="plan", way=way), case, rank)
    for _ in range(8):
        step()
    times = []
    for _ in range(60):  # every rank the same number
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    unique = statistics.mean(batch.unique().numel() / batch.numel() for batch in step.batches)
    return {"step_s": min(times), "median_s": statistics.median(times), "unique": unique, "dense": step.parameters}


def alone(case: dict[str, int]) -> dict[str, float]:
    import shoal

    return Step(shoal.HashTable(case["dim"], optimizer="adagrad", lr=0.01, name="plan_local"), case, 0).timed()


def with_server(case: dict[str, int]) -> dict[str, float]:
    from shoal.sharded import PsClient, ps_table

    process = subprocess.Popen([sys.executable, "-m", "shoal", "ps", "--json"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        with PsClient([address]) as client:
            table = ps_table(client, case["dim"], name=f"plan_{os.getpid()}", optimizer="adagrad", lr=0.01)
            return Step(table, case, 0).timed()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def predicted(
    case: dict[str, int], measured: dict[str, float], costs: Any, hosts: int, layout: str, way: str = "row"
) -> float:
    plan = Plan(
        tables=(
            TablePlan(name="t", dim=case["dim"], ids_per_sample=case["ids"], ids_per_day=IDS, expire_days=1,
                      unique_share=measured["unique"]),
        ),
        model=ModelPlan(batch=case["batch"], dense_parameters=measured["dense"]),
        host=HostPlan(cores=1, network_gbps=1000, latency_us=0, servers_per_worker=1, hosts=(hosts,)),
    )  # fmt: skip
    found = estimate(plan, costs, hosts, layout)
    if hosts == 1 or layout == "parameter_server" or way == "row":
        return found.step_s
    tables = Placement(load=loads_of_plan(plan, costs)[0], way=Way.parse(way))
    spread = Sharding(tables=(tables,), ranks=hosts, costs=costs)
    return spread.step.seconds + sum(found.seconds.get(part, 0.0) for part in ("step", "dense", "all-reduce"))


def main() -> None:
    from benchmarks import plan as own  # other processes find its functions by this name

    made = parser(__doc__ or "")
    made.add_argument("--ranks", default="1,2", help="numbers of ranks, such as 1,2,4,8 on 16 cores")
    options = made.parse_args()
    report = Report("plan")
    report.start()
    costs = measure()
    off = []
    for case in CASES:
        what = f"dim {case['dim']}, {case['ids']} ids, batch {case['batch']}, hidden {case['hidden']}"
        runs: dict[tuple[str, int, str, str], Any] = {}
        for ranks in (int(n) for n in options.ranks.split(",")):
            if ranks == 1:
                runs["one process", 1, "all_to_all", "row"] = lambda case=case: alone(case)
                continue
            for way in WAYS:
                runs[f"{ranks} ranks, {way}", ranks, "all_to_all", way] = lambda case=case, way=way, ranks=ranks: (
                    run_ranks(ranks, own.all_to_all, case, way, timeout_s=240.0)[0]
                )
        runs["worker + server", 1, "parameter_server", "row"] = lambda case=case: with_server(case)
        for (name, hosts, layout, way), run in runs.items():
            measured = run()
            guess = predicted(case, measured, costs, hosts, layout, way)
            real = measured["median_s"]
            off.append(max(guess / real, real / guess))
            report.add(f"{name}: {what}", f"{1e3 * guess:.2f} ms", f"{1e3 * real:.2f} ms", off[-1], WORST, at_most=True)
    report.add(f"median of {len(off)} configurations", "", "", statistics.median(off), MEDIAN, at_most=True)
    report.save(options.json)


if __name__ == "__main__":
    main()
