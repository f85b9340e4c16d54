"""Communication and training primitives against their rivals, interleaved.

python -m benchmarks.comm [--quick] [--json FILE]
"""

import argparse
import json
import os
import platform
import statistics
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.comm import DistributedConfig, ProcessGroupTransport, deserialize_tensors, serialize_tensors
from shoal.testing import run_ranks
from shoal.train import (
    AllReduceAggregator,
    CompressedAggregator,
    OverlappedReducer,
    PipelineParallelConfig,
    PipelineRunner,
    TopKCompressor,
    compress_gradients,
)


def interleaved(calls: dict[str, Any], rounds: int) -> dict[str, float]:
    """Median seconds of each call; calls take turns, so that noise affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(t) for name, t in times.items()}


def reduction(rank: int, world: int, megabytes: int, tensors: int, rounds: int) -> dict[str, float]:
    """Native aggregation of many tensors against one flat all-reduce and against one call per tensor."""
    torch.set_num_threads(1)
    transport = ProcessGroupTransport()
    config = DistributedConfig(world, rank)
    n = megabytes * 1_000_000 // 4 // tensors
    gradients = [torch.ones(n) for _ in range(tensors)]
    flat = torch.ones(n * tensors)
    native = AllReduceAggregator(config, transport, algorithm="native")

    def one_by_one() -> None:
        for g in gradients:
            dist.all_reduce(g.clone())

    return interleaved(
        {
            "flat": lambda: dist.all_reduce(flat),
            "native": lambda: native.aggregate(gradients),
            "single calls": one_by_one,
        },
        rounds,
    )


def ring(rank: int, world: int, megabytes: int, rounds: int) -> dict[str, float]:
    """The byte-layer ring against the backend's all-reduce, on the same gradients."""
    torch.set_num_threads(1)
    transport = ProcessGroupTransport()
    config = DistributedConfig(world, rank)
    gradients = [torch.ones(megabytes * 1_000_000 // 4)]
    aggregators = {name: AllReduceAggregator(config, transport, algorithm=name) for name in ("native", "ring")}
    result = interleaved({name: lambda a=a: a.aggregate(gradients) for name, a in aggregators.items()}, rounds)
    size = sum(g.nbytes for g in gradients)
    result["traffic / ideal"] = aggregators["ring"].last_stats["bytes_sent"] / (2 * (world - 1) / world * size)
    return result


def compressed(rank: int, world: int) -> float:
    transport = ProcessGroupTransport()
    agg = CompressedAggregator(DistributedConfig(world, rank), transport, TopKCompressor(0.01))
    agg.aggregate([torch.randn(1_000_000)])
    return agg.last_stats["bytes_sent"] / agg.last_stats["bytes_dense"]


def top_k(n: int, rounds: int) -> dict[str, float]:
    x = torch.randn(n)
    k = n // 100
    return interleaved(
        {
            "compress_gradients": lambda: compress_gradients([x], 0.01),
            "torch.topk": lambda: x[torch.topk(x.abs(), k).indices],
            "sort": lambda: x[torch.sort(x.abs(), descending=True, stable=True).indices[:k]],
        },
        rounds,
    )


def serialisation(megabytes: int, rounds: int) -> dict[str, float]:
    tensors = [torch.randn(megabytes * 1_000_000 // 4 // 8) for _ in range(8)]
    data = serialize_tensors(tensors)
    times = interleaved(
        {"serialize": lambda: serialize_tensors(tensors), "deserialize": lambda: deserialize_tensors(data)}, rounds
    )
    return {name: len(data) / seconds / 1e9 for name, seconds in times.items()}


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, forward_s: float) -> torch.Tensor:
        time.sleep(forward_s)
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        time.sleep(0.02)
        return g * w, (g * x).sum_to_size(w.shape), None


class SlowLayer(nn.Module):
    """A layer with 20 ms of backward, and optionally of forward."""

    def __init__(self, forward_s: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.forward_s = forward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Slow.apply(x, self.w, self.forward_s)


def overlap(rounds: int) -> dict[str, float]:
    """8 layers with 20 ms of backward each, one bucket per layer, 20 ms of reduction each."""
    model = nn.Sequential(*(SlowLayer() for _ in range(8)))
    line = threading.Lock()

    def reduce(index: int, flat: torch.Tensor) -> Any:
        future: Any = torch.futures.Future()

        def work() -> None:
            with line:
                time.sleep(0.02)
            future.set_result(flat)

        threading.Thread(target=work).start()
        return future

    reducer = OverlappedReducer(model, bucket_bytes=1, hook=reduce)
    exposed: list[float] = []

    def overlapped() -> None:
        model(torch.ones(4)).sum().backward()
        reducer.finish()
        exposed.append(reducer.last_stats["exposed_s"])

    def blocking() -> None:
        with reducer.no_sync():
            model(torch.ones(4)).sum().backward()
        reducer.finish()

    times = interleaved({"overlapped": overlapped, "blocking": blocking}, rounds)
    return {**times, "hidden share": 1 - statistics.median(exposed) / (8 * 0.02)}


def pipeline(rank: int, world: int, rounds: int) -> float:
    """A step over the schedule's ideal, with 2 stages of one 20 ms + 20 ms layer and 8 micro-batches."""
    torch.set_num_threads(1)
    runner = PipelineRunner(
        [SlowLayer(0.02), SlowLayer(0.02)], PipelineParallelConfig(2, 8), loss_fn=nn.MSELoss(), group=dist.group.WORLD
    )
    x = torch.ones(8, 4)
    args = {"inputs": x if rank == 0 else None, "target": x if rank == 1 else None}
    runner.step(**args)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        runner.step(**args)
        times.append(time.perf_counter() - began)
    return statistics.median(times) / (2 * (8 + 2 - 1) * 0.02)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comm", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: a smoke test")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    options = parser.parse_args(argv)
    quick = options.quick
    rounds = 3 if quick else 9
    rows: list[dict[str, Any]] = []

    def row(what: str, value: float, bound: str, note: str) -> None:
        rows.append({"what": what, "value": value, "bound": bound, "note": note})
        print(f"{what:<58} {value:8.3f}  {bound:<8} {note}", flush=True)

    machine = {
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
    }
    print(machine, f"median of {rounds} interleaved rounds", flush=True)
    for world in (2, 4):
        got = run_ranks(world, reduction, 10 if quick else 100, 200, rounds, timeout_s=550)[0]
        times = ", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in got.items())
        row(f"native / flat all_reduce, W={world}, 200 tensors", got["native"] / got["flat"], "<= 1.10", times)
        row(f"single calls / native, W={world}", got["single calls"] / got["native"], ">= 1.5", "")
    for world in (2, 4):
        got = run_ranks(world, ring, 4 if quick else 32, rounds, timeout_s=300)[0]
        times = ", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in got.items() if "/" not in k)
        row(f"ring / native, W={world}", got["ring"] / got["native"], "<= 2", times)
        row(f"ring traffic / ideal, W={world}", got["traffic / ideal"], "+-1 %", "")
    got = top_k(1_000_000 if quick else 10_000_000, rounds)
    times = ", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in got.items())
    row("sort / compress_gradients, ratio 0.01", got["sort"] / got["compress_gradients"], ">= 3", times)
    row("torch.topk / compress_gradients", got["torch.topk"] / got["compress_gradients"], ">= 1.2", "")
    row("compressed / dense bytes, W=2, ratio 0.01", run_ranks(2, compressed, timeout_s=100)[0], "<= 0.03", "")
    got = overlap(rounds)
    row(
        "share of the reduction that is hidden",
        got["hidden share"],
        ">= 0.70",
        f"step {got['overlapped'] * 1e3:.0f} ms, blocking {got['blocking'] * 1e3:.0f} ms",
    )
    row(
        "pipeline step / ideal, 2 stages, 8 micro-batches",
        max(run_ranks(2, pipeline, rounds, timeout_s=200)),
        "<= 1.25",
        "",
    )
    got = serialisation(16 if quick else 256, rounds)
    for name, rate in got.items():
        row(f"{name}, GB/s", rate, ">= 1", "")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({**machine, "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
