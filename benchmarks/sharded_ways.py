"""Eight tables of very different sizes and dims: the automatic plan against the plans of one way, on W ranks of gloo.

    python -m benchmarks.sharded --only ways [--ranks 2,4,8] [--rounds 5]

Loads are measured in ten steps of the model, costs on this machine; then the model trains with each plan in turn, in
the same processes. A step is forward and backward of the collection, with one thread per rank.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

# name -> dim, rows, ids per sample
TABLES = {
    "hour": (4, 24, 1), "country": (8, 250, 1), "category": (16, 10_000, 5), "tags": (16, 100_000, 20),
    "history": (32, 500_000, 10), "user": (64, 200_000, 1), "item": (128, 50_000, 5), "text": (256, 20_000, 2),
}  # fmt: skip
BATCH = 1024
WAYS = ("row", "table", "column", "data")


def batches(rank: int, count: int = 4) -> list[dict[str, Any]]:
    """Batches of dense ``[B, L]`` ids, with popular and rare ones."""
    make = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(count):
        batch = {}
        for name, (_, rows, length) in TABLES.items():
            u = torch.rand(BATCH, length, generator=make)
            batch[name] = (rows * u.pow(2)).long() * 982451653
        found.append(batch)
    return found


def model_of(make: Any) -> Any:
    from shoal.nn import EmbeddingBagCollection

    return EmbeddingBagCollection({name: make(name, dim) for name, (dim, _, _) in TABLES.items()})


def _rank(rank: int, world: int, costs: Any, rounds: int) -> dict[str, Any]:
    import shoal
    from shoal.sharded import loads_of, plan, shard

    torch.set_num_threads(1)
    shoal.set_num_threads(1)
    given, first = batches(rank), batches(0)
    upstream = torch.randn(BATCH, sum(dim for dim, _, _ in TABLES.values())) * 0.01

    def fresh() -> Any:
        return model_of(lambda name, dim: shoal.HashTable(dim, name=name, optimizer=shoal.Adagrad(lr=0.01), seed=1))

    local = fresh()
    for name, (_, rows, _) in TABLES.items():
        ids = torch.arange(rows) * 982451653
        local.tables[name].assign(ids, torch.zeros(rows, TABLES[name][0]))
    turn = iter(range(1 << 30))
    loads = loads_of(local, lambda: local(first[next(turn) % len(first)]).backward(upstream))  # the same on all ranks
    plans = {way: plan(loads, world, costs, ways=(way,)) for way in WAYS}
    plans["auto"] = plan(loads, world, costs)
    models = {name: shard(fresh(), each) for name, each in plans.items()}
    for model in models.values():
        for batch in given:
            model(batch).backward(upstream)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            for batch in given:
                begin = time.perf_counter()
                model(batch).backward(upstream)
                times[name].append(time.perf_counter() - begin)
    return {
        "measured": {name: statistics.median(series) for name, series in times.items()},
        "predicted": {name: each.step.seconds for name, each in plans.items()},
        "plan": str(plans["auto"]),
    }


def run(ranks: list[int], rounds: int, report: Any) -> None:
    """Measures the figures for each number of ranks."""
    from shoal.plan.costs import measure
    from shoal.testing import run_ranks

    costs = measure()
    for world in ranks:
        found = run_ranks(world, _rank, costs, rounds, timeout_s=900)
        seconds = {name: max(one["measured"][name] for one in found) for name in found[0]["measured"]}
        singles = {name: seconds[name] for name in WAYS}
        best, worst = min(singles, key=singles.__getitem__), max(singles, key=singles.__getitem__)
        print(found[0]["plan"])
        for name, value in seconds.items():
            print(f"  {name:8} {1e3 * value:8.2f} ms, predicted {1e3 * found[0]['predicted'][name]:8.2f} ms")
        rate = world * BATCH / 1e3
        what = f"8 tables, dims 4 to 256, {world} ranks"
        auto = seconds["auto"]
        report(what, rate / auto, "k samples/s", f"best of one way ({best})", rate / singles[best],
               singles[best] / auto, ">= 0.9")  # fmt: skip
        report(what, rate / auto, "k samples/s", f"worst of one way ({worst})", rate / singles[worst],
               singles[worst] / auto, ">= 1.3")  # fmt: skip
