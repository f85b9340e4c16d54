"""Measure the costs of the parts of a step on this machine, through the interfaces that a model uses."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shoal.plan import steps
from shoal.sharded.placement.costs import USUAL, Costs, cache_path, load_costs, prepare, save_costs

__all__ = ["Costs", "cache_path", "load_costs", "measure", "prepare", "save_costs"]

# --- measuring --------------------------------------------------------------------------------------------------------

_DIMS = (8, 64)
_ROWS = 200_000
_BATCH = 20_000
_BAG = 20


def measure(progress: Callable[[str], None] = lambda _: None) -> Costs:
    """Measure all costs, with up to 8 ranks. Takes 20 seconds on an idle machine with two cores, a minute with eight.

    ``progress`` is called with the name of each part before it is measured.
    """
    import torch

    import shoal

    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    threads, native = torch.get_num_threads(), shoal.num_threads()
    torch.set_num_threads(1)
    shoal.set_num_threads(1)
    try:
        found: dict[str, Any] = {}
        parts = {
            "table rows": _tables,
            "dense arithmetic": _dense,
            "exchanges and sums between processes": lambda: _ranks(cpus),
        }
        for what, part in parts.items():
            progress(what)
            found |= part()
        machine = f"{platform.machine()}, {cpus} CPUs, Python {platform.python_version()}, torch {torch.__version__}"
        costs = replace(USUAL, **found, load=load, machine=machine, measured=time.strftime("%Y-%m-%d %H:%M:%S"))
        progress("steps with a parameter server")
        costs = replace(costs, **steps.with_server(costs))
        timed = []
        for ranks in (1, *steps.RANKS):
            if ranks <= max(2, cpus):
                progress(f"steps on {ranks} rank{'s'[: ranks > 1]}")
                timed += steps.timed_on(ranks)
    finally:
        torch.set_num_threads(threads)
        shoal.set_num_threads(native)
    return steps.explained(costs, timed)


def _median_s(call: Callable[..., Any], given: Sequence[Any] = (), seconds: float = 0.4, least: int = 7) -> float:
    """The median duration of several calls, on each of ``given`` in turn. (The shortest would not be typical.)"""
    turns = itertools.cycle([(one,) for one in given] or [()])
    call(*next(turns))
    times, end = [], time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        arguments = next(turns)
        begin = time.perf_counter()
        call(*arguments)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _line(values: dict[int, float], name: str) -> dict[str, float]:
    """A line through the values at two widths, with intercept and slope >= 0."""
    (low, at_low), (high, at_high) = sorted(values.items())
    slope = max(0.0, (at_high - at_low) / (high - low))
    return {f"{name}_fixed": max(0.0, at_low - slope * low), f"{name}_per_dim": slope}


def _tables() -> dict[str, float]:
    """Costs per row."""
    import torch

    import shoal

    of: dict[str, dict[int, float]] = {name: {} for name in ("lookup", "update", "pool")}
    found: dict[str, float] = {}
    for dim in _DIMS:
        table = shoal.HashTable(dim, optimizer=shoal.Adagrad(lr=0.01), name=f"plan_{dim}")
        every = torch.arange(_ROWS, device="cpu") * 982451653
        table.assign(every, torch.zeros(_ROWS, dim, device="cpu"))
        if dim == _DIMS[0]:
            found["row_overhead_bytes"] = max(12.0, table.memory_bytes() / _ROWS - 8 * dim)
        distinct = [every[own] for own in torch.randperm(_ROWS, device="cpu").split(_BATCH)]
        repeating = [ids[torch.randint(_BATCH // 4, (_BATCH,), device="cpu")] for ids in distinct]
        grads = torch.ones(_BATCH, dim, device="cpu")
        step = _step(table)
        lookup = _median_s(table.lookup, distinct)
        update = _median_s(lambda ids, table=table, grads=grads: table.apply_gradients(ids, grads), distinct)
        once, repeated = _median_s(step, distinct) / _BATCH, _median_s(step, repeating) / _BATCH
        # A step has a cost per id and a cost per distinct id: two unknowns, two equations.
        share = statistics.mean(ids.unique().numel() / _BATCH for ids in repeating)
        row = max(0.0, (once - repeated) / (1 - share))
        of["pool"][dim] = 1e9 * max(0.0, once - row)
        of["lookup"][dim] = 1e9 * row * lookup / (lookup + update)
        of["update"][dim] = 1e9 * row * update / (lookup + update)
    lines = {key: value for name, values in of.items() for key, value in _line(values, name).items()}
    return lines | found | {"merge_gb_per_s": _merge()}


def _step(table: Any) -> Callable[[Any], None]:
    """A function that looks up, pools and updates the rows of ids in bags."""
    import torch

    from shoal.table.protocol import SUM, Features, Part, Step, group_of

    group = group_of([table])
    features = Features((0,), (SUM,), (0,), table.dim_size)

    def step(ids: Any) -> None:
        bags = ids.numel() // _BAG
        offsets = torch.arange(bags + 1, device="cpu") * _BAG
        out = torch.empty(bags, table.dim_size, device="cpu")
        counts = offsets if group.traits.takes_bags else torch.tensor([ids.numel()], device="cpu")
        found = group.find(ids, counts, features, missing="initial")
        group.pooled(found, features, offsets, None, out, missing="initial")
        group.update([Part(found, features, out, offsets)], step=Step())

    return step


def _merge() -> float:
    """GB/s of concatenating and splitting tensors, which takes two copies."""
    import torch

    parts = [torch.zeros(1 << 18, device="cpu") for _ in range(4)]
    seconds = _median_s(lambda: torch.cat(parts).split(1 << 18)[0].clone(), seconds=0.1)
    return 4 * (1 << 20) / seconds / 1e9


def _dense() -> dict[str, float]:
    """Costs of the dense part and of an almost empty step."""
    import torch

    import shoal

    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    small = torch.nn.Linear(4, 1)
    bag = shoal.nn.HashEmbeddingBag(shoal.HashTable(4, name="plan_small"))
    one = torch.zeros(4, 1, dtype=torch.int64, device="cpu")
    optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
    batch = torch.randn(1024, 256, device="cpu")

    def step() -> None:
        model(batch).sum().backward()

    def small_step() -> None:
        optimizer.zero_grad()
        small(bag(one)).sum().backward()
        optimizer.step()

    flops = 6 * 1024 * 2 * 256 * 256
    many = [torch.nn.Parameter(torch.zeros(1 << 18, device="cpu")) for _ in range(4)]
    for each in many:
        each.grad = torch.ones_like(each)
    updates = torch.optim.SGD(many, lr=0.1)
    return {
        "dense_gflops": flops / _median_s(step) / 1e9,
        "dense_update": 1e9 * _median_s(updates.step, seconds=0.2) / (1 << 20),
        "step_us": 1e6 * _median_s(small_step, seconds=0.2),
    }


def _exchange(rank: int, world: int) -> list[float]:
    """Median seconds of a small and a large exchange, and of a small and a large all-reduce."""
    import torch

    from shoal.comm.ranks import collectives
    from shoal.comm.ranks.torch_ranks import default_ranks

    torch.set_num_threads(1)
    ranks = default_ranks()
    large = torch.zeros(1 << 20, device="cpu")
    some = torch.zeros(1 << 14, device="cpu")
    small = torch.zeros(world, device="cpu")

    def send(flat: Any) -> None:
        each = [flat.numel() // world] * world
        ranks.exchange(flat, each, each, [1])

    calls = [
        lambda: send(small),
        lambda: send(large),
        lambda: collectives.all_reduce(some),
        lambda: collectives.all_reduce(large),
    ]
    times = []
    for call in calls:
        series = []
        for _ in range(60):  # in sequence, as in a step: a late rank makes the others wait
            begin = time.perf_counter()
            call()
            series.append(time.perf_counter() - begin)
        times.append(statistics.median(series))
    return times


def _ranks(cpus: int) -> dict[str, float]:
    """Costs of exchanges and all-reduces."""
    from shoal.testing import run_ranks

    small, large, sum_some, sum_large = run_ranks(2, _exchange, timeout_s=300.0)[0]
    nbytes = 4 << 20
    found = {
        "link_latency_us": 1e6 * small,
        "link_gb_per_s": nbytes / 2 / max(1e-6, large - small) / 1e9,
        "reduce_latency_us": 1e6 * sum_some,
        "reduce_gb_per_s": nbytes / max(1e-6, sum_large - sum_some) / 1e9,
        "reduce_peer_us": 0.6e6 * sum_some,
    }
    most = max(ranks for ranks in steps.RANKS if ranks <= max(2, cpus))
    if most > 2:
        more = run_ranks(most, _exchange, timeout_s=300.0)[0][2]
        found["reduce_peer_us"] = 1e6 * max(0.0, more - sum_some) / (most - 2)
    return found
