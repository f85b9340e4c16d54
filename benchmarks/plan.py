"""Predictions of `shoal plan` against real runs: one process, ranks by all-to-all, a worker and a parameter server.

    python -m benchmarks.plan                     # 1 and 2 ranks
    python -m benchmarks.plan --ranks 1,2,4,8     # on 16 cores

Costs are measured first. Then ten steps of each model are timed in one process (in as many processes at once as there
will be ranks, because they share this machine). Then the model is trained: with its tables by row, by table and as
copies on each number of ranks, and on a parameter server. Predictions are made from the costs and from those ten steps.
The goal: within 20 % in the median and 35 % at worst.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.harness import Report, parser
from shoal.plan.config import HostPlan, ModelPlan, Plan, TablePlan
from shoal.plan.costs import measure
from shoal.plan.model import alone as alone_of_plan
from shoal.plan.model import estimate, loads_of_plan
from shoal.plan.steps import way_of
from shoal.sharded import Plan as Sharding
from shoal.sharded.placement.plan import Placement
from shoal.testing import run_ranks

WORST, MEDIAN = 1.35, 1.20
IDS = 300_000
WAYS = ("row", "table", "data")
STEPS = 16
CASES: list[dict[str, Any]] = [  # for each table: dim, ids per sample
    {"tables": [(16, 20)], "batch": 2048, "hidden": 128},
    {"tables": [(64, 20)], "batch": 1024, "hidden": 128},
    {"tables": [(16, 5)], "batch": 512, "hidden": 512},
    {"tables": [(8, 1), (32, 10), (64, 2), (16, 5)], "batch": 1024, "hidden": 256},
]


class Step:
    """One training step of a small model on tables that ``make(number, dim)`` makes."""

    def __init__(self, make: Any, case: dict[str, Any], seed: int, *, sums: bool = False) -> None:
        import shoal

        self.sums = sums

        torch.set_num_threads(1)
        shoal.set_num_threads(1)
        generator = torch.Generator().manual_seed(seed)
        tables = {f"t{number}": make(number, dim) for number, (dim, _) in enumerate(case["tables"])}
        shapes = {name: (case["batch"], ids) for name, (_, ids) in zip(tables, case["tables"], strict=True)}
        self.batches = [
            {name: torch.randint(IDS, shape, generator=generator) * 982451653 for name, shape in shapes.items()}
            for _ in range(8)
        ]
        self.bag = shoal.nn.EmbeddingBagCollection(tables)
        hidden = case["hidden"]
        self.net = torch.nn.Sequential(
            torch.nn.Linear(sum(dim for dim, _ in case["tables"]), hidden), torch.nn.ReLU(),
            torch.nn.Linear(hidden, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1),
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
        if self.sums:
            flat = torch.cat([p.grad.view(-1) for p in self.net.parameters() if p.grad is not None])
            dist.all_reduce(flat)
        self.dense.step()

    def timed(self, steps: int = STEPS) -> dict[str, Any]:
        """Times steps; every rank makes the same number of them."""
        for _ in self.batches:
            self()
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            self()
            times.append(time.perf_counter() - begin)
        unique = [
            statistics.mean(batch[name].unique().numel() / batch[name].numel() for batch in self.batches)
            for name in self.batches[0]
        ]
        return {"step_s": statistics.median(times), "unique": unique, "dense": self.parameters}


def over_ranks(rank: int, world: int) -> list[dict[str, Any]]:
    from shoal.sharded import AllToAllHashTable

    found = []
    for case in CASES:
        own = alone(case, 10)["step_s"]
        for way in WAYS:

            def make(number: int, dim: int, way: str = way) -> Any:
                return AllToAllHashTable(dim, optimizer="adagrad", lr=0.01, name=f"plan_{number}",
                                         way=way_of(way, number, world))  # fmt: skip

            found.append(Step(make, case, rank, sums=True).timed() | {"own_s": own})
    return found


def alone(case: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    import shoal

    def make(number: int, dim: int) -> Any:
        return shoal.HashTable(dim, optimizer="adagrad", lr=0.01, name=f"plan_local_{number}")

    return Step(make, case, 0).timed(steps)


def with_server(case: dict[str, Any]) -> dict[str, Any]:
    from shoal.sharded import PsClient, ps_table

    process = subprocess.Popen([sys.executable, "-m", "shoal", "ps", "--json"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        with PsClient([address]) as client:

            def make(number: int, dim: int) -> Any:
                return ps_table(client, dim, name=f"plan_{number}", optimizer="adagrad", lr=0.01)

            return Step(make, case, 0).timed()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def predicted(
    case: dict[str, Any], measured: dict[str, Any], costs: Any, hosts: int, layout: str, way: str = "row"
) -> dict[str, float]:
    plan = Plan(
        tables=tuple(
            TablePlan(name=f"t{number}", dim=dim, ids_per_sample=ids, ids_per_day=IDS, expire_days=1,
                      unique_share=measured["unique"][number])
            for number, (dim, ids) in enumerate(case["tables"])
        ),
        model=ModelPlan(batch=case["batch"], dense_parameters=measured["dense"], step_ms=1e3 * measured["own_s"]),
        host=HostPlan(cores=1, network_gbps=1000, latency_us=0, servers_per_worker=1, hosts=(hosts,)),
    )  # fmt: skip
    costs = costs.beside(hosts)  # all ranks are on this machine
    found = estimate(plan, costs, hosts, layout)
    if hosts == 1 or layout == "parameter_server" or way == "row":
        return found.seconds
    loads, (_, fitted) = loads_of_plan(plan, costs), alone_of_plan(plan, costs)
    tables = tuple(Placement(load=load, way=way_of(way, n, hosts)) for n, load in enumerate(loads))
    dense = {part: found.seconds[part] for part in ("step", "dense", "all-reduce") if part in found.seconds}
    return Sharding(tables=tables, ranks=hosts, costs=fitted).step.parts | dense


def runs_of(ranks: list[int]) -> Iterator[tuple[str, int, str, str, dict[str, Any], dict[str, Any]]]:
    """For each run: its name, number of hosts, layout, way, model, and measured time."""
    from benchmarks import plan as own  # other processes find its functions by this name

    for count in ranks:
        if count == 1:
            for case in CASES:
                own_s = {"own_s": alone(case, 10)["step_s"]}
                yield "one process", 1, "all_to_all", "row", case, alone(case) | own_s
                yield "worker + server", 1, "parameter_server", "row", case, with_server(case) | own_s
            continue
        every = run_ranks(count, own.over_ranks, timeout_s=240.0)
        slowest = [
            max(one, key=lambda run: run["step_s"]) | {"own_s": max(run["own_s"] for run in one)}
            for one in zip(*every, strict=True)
        ]
        cases = [(case, way) for case in CASES for way in WAYS]
        for (case, way), measured in zip(cases, slowest, strict=True):
            yield f"{count} ranks, {way}", count, "all_to_all", way, case, measured


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--ranks", default="1,2", help="numbers of ranks, such as 1,2,4,8 on 16 cores")
    made.add_argument("--parts", action="store_true", help="print the parts of each prediction")
    options = made.parse_args()
    report = Report("plan")
    report.start()
    costs = measure(lambda what: print(f"measuring {what} ...", file=sys.stderr, flush=True))
    off = []
    for name, hosts, layout, way, case, measured in runs_of([int(count) for count in options.ranks.split(",")]):
        what = ", ".join(f"{ids} x {dim}" for dim, ids in case["tables"])
        parts = predicted(case, measured, costs, hosts, layout, way)
        guess, real = sum(parts.values()), measured["step_s"]
        off.append(max(guess / real, real / guess))
        report.add(f"{name}: {what}, batch {case['batch']}", f"{1e3 * guess:.2f} ms", f"{1e3 * real:.2f} ms", off[-1],
                   WORST, at_most=True)  # fmt: skip
        if options.parts:
            print("    " + ", ".join(f"{part} {1e3 * value:.2f}" for part, value in parts.items()))
    report.add(f"median of {len(off)} configurations", "", "", statistics.median(off), MEDIAN, at_most=True)
    report.save(options.json)


if __name__ == "__main__":
    main()
