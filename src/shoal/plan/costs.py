"""What the pieces of a step cost on this machine, measured in some seconds through the interfaces that a model uses."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

from shoal.sharded.placement.costs import Costs, cache_path, load_costs, prepare, save_costs

__all__ = ["Costs", "cache_path", "load_costs", "measure", "prepare", "save_costs"]

# --- measuring --------------------------------------------------------------------------------------------------------

_DIMS = (8, 64)
_ROWS = 200_000
_BATCH = 20_000
_BAG = 20


def measure(progress: Callable[[str], None] = lambda _: None) -> Costs:
    """Takes about ten seconds on an idle machine; uses one core, and two processes for the network's share."""
    import torch

    import shoal

    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    threads, native = torch.get_num_threads(), shoal.num_threads()
    torch.set_num_threads(1)
    shoal.set_num_threads(1)
    try:
        found: dict[str, Any] = {}
        for part in (_tables, _dense, _servers, _ranks):
            progress(part.__doc__ or "")
            found |= part()
    finally:
        torch.set_num_threads(threads)
        shoal.set_num_threads(native)
    machine = (
        f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}"
    )
    return Costs(**found, load=load, machine=machine, measured=time.strftime("%Y-%m-%d %H:%M:%S"))


def _usual(call: Callable[[], Any], seconds: float = 0.4, least: int = 7) -> float:
    """The median of several runs, in seconds. Not the shortest: a plan is about what happens, not about what can."""
    call()
    times, end = [], time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _line(values: dict[int, float], name: str) -> dict[str, float]:
    """A line through two widths; neither part is below 0."""
    (low, at_low), (high, at_high) = sorted(values.items())
    slope = max(0.0, (at_high - at_low) / (high - low))
    return {f"{name}_fixed": max(0.0, at_low - slope * low), f"{name}_per_dim": slope}


def _tables() -> dict[str, float]:
    """table rows"""
    import torch

    import shoal

    of: dict[str, dict[int, float]] = {name: {} for name in ("lookup", "update", "pool", "route", "bag", "copy")}
    found: dict[str, float] = {}
    for dim in _DIMS:
        table = shoal.HashTable(dim, optimizer=shoal.Adagrad(lr=0.01), name=f"plan_{dim}")
        every = torch.arange(_ROWS, device="cpu") * 982451653
        table.assign(every, torch.zeros(_ROWS, dim, device="cpu"))
        if dim == _DIMS[0]:
            found["row_overhead_bytes"] = max(12.0, table.memory_bytes() / _ROWS - 8 * dim)
        ids = every[torch.randperm(_ROWS, device="cpu")[:_BATCH]]
        again = ids[torch.randint(_BATCH // 4, (_BATCH,), device="cpu")]
        grads = torch.ones(_BATCH, dim, device="cpu")
        lookup = _usual(lambda table=table, ids=ids: table.lookup(ids))
        update = _usual(lambda table=table, ids=ids, grads=grads: table.apply_gradients(ids, grads, enable_dedup=False))
        calls = _calls(table)
        once = {name: _usual(lambda call=call, ids=ids: call(ids)) / _BATCH for name, call in calls.items()}
        often = {name: _usual(lambda call=call, ids=again: call(ids)) / _BATCH for name, call in calls.items()}
        # A step costs something per id and something per distinct id: two equations.
        share = again.unique().numel() / _BATCH
        row = max(0.0, (once["local"] - often["local"]) / (1 - share))
        of["pool"][dim] = 1e9 * max(0.0, once["local"] - row)
        of["lookup"][dim] = 1e9 * row * lookup / (lookup + update)
        of["update"][dim] = 1e9 * row * update / (lookup + update)
        for name, of_way in (("route", "row"), ("bag", "table"), ("copy", "data")):
            more = (once[of_way] - once["local"] + often[of_way] - often["local"]) / 2
            of[name][dim] = 1e9 * max(0.0, more)
        if dim == _DIMS[0]:
            one = _usual(lambda call=calls["row"], ids=ids[:_BAG]: call(ids), 0.2)
            found["group_us"] = 1e6 * one
    lines = {key: value for name, values in of.items() for key, value in _line(values, name).items()}
    found["copy_fixed"] = statistics.mean(of["copy"].values())
    lines["bag_per_dim"] *= _BAG  # it is of a bag, not of an id
    del lines["copy_per_dim"]
    return lines | found | {"merge_gb_per_s": _merge()}


def _calls(table: Any) -> dict[str, Callable[[Any], None]]:
    """A step of the bags of some ids: in this process, and by the groups of each way, with nobody else."""
    import torch

    from shoal.sharded import AllToAllHashTable
    from shoal.sharded.all_to_all.backend import SingleRank
    from shoal.sharded.all_to_all.group import AllToAllGroup
    from shoal.sharded.all_to_all.owned import OwnedGroup
    from shoal.sharded.all_to_all.replicated import ReplicatedGroup
    from shoal.table.protocol import SUM, Features, Part, Step, group_of

    kinds: dict[str, Any] = {"row": AllToAllGroup, "table": OwnedGroup, "data": ReplicatedGroup}
    groups: dict[str, Any] = {"local": group_of([table])}
    for way, kind in kinds.items():
        groups[way] = kind((AllToAllHashTable(backend=SingleRank(), factory=lambda _: table, way=way),))
    features = Features((0,), (SUM,), (0,), table.dim_size)

    def step(group: Any) -> Callable[[Any], None]:
        def made(ids: Any) -> None:
            bags = ids.numel() // _BAG
            offsets = torch.arange(bags + 1, device="cpu") * _BAG
            out = torch.empty(bags, table.dim_size, device="cpu")
            counts = offsets if group.traits.takes_bags else torch.tensor([ids.numel()], device="cpu")
            found = group.find(ids, counts, features, missing="initial")
            group.pooled(found, features, offsets, None, out, missing="initial")
            group.update([Part(found, features, out, offsets)], step=Step())

        return made

    return {name: step(group) for name, group in groups.items()}


def _merge() -> float:
    """GB/s of what is put together and taken apart: two copies."""
    import torch

    parts = [torch.zeros(1 << 18, device="cpu") for _ in range(4)]
    seconds = _usual(lambda: torch.cat(parts).split(1 << 18)[0].clone(), 0.1)
    return 4 * (1 << 20) / seconds / 1e9


def _dense() -> dict[str, float]:
    """dense arithmetic"""
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

    def nothing() -> None:
        optimizer.zero_grad()
        small(bag(one)).sum().backward()
        optimizer.step()

    flops = 6 * 1024 * 2 * 256 * 256
    many = [torch.nn.Parameter(torch.zeros(1 << 18, device="cpu")) for _ in range(4)]
    for each in many:
        each.grad = torch.ones_like(each)
    updates = torch.optim.SGD(many, lr=0.1)
    return {
        "dense_gflops": flops / _usual(step) / 1e9,
        "dense_update": 1e9 * _usual(updates.step, 0.2) / (1 << 20),
        "step_us": 1e6 * _usual(nothing, 0.2),
    }


def _servers() -> dict[str, float]:
    """a parameter server's connection"""
    import torch

    from shoal.sharded import PsClient, ps_table
    from shoal.sharded.ps.server.engine import Engine
    from shoal.sharded.ps.server.server import ParameterServer
    from shoal.sharded.ps.server.shard import Shard

    server = ParameterServer(Engine(Shard(0, 1)))
    server.start()
    try:
        with PsClient([server.address]) as client:
            table = ps_table(client, 64, name="plan", optimizer="sgd", lr=1.0, initializer="zeros")
            ids = torch.arange(_BATCH, device="cpu")
            table.assign(ids, torch.zeros(_BATCH, 64, device="cpu"))
            table.as_op()
            one = _usual(lambda: table.lookup(ids[:1]), 0.3)
            many = _usual(lambda: table.lookup(ids), 0.5)
    finally:
        server.stop()
    return {"ps_latency_us": 1e6 * one, "ps_gb_per_s": _BATCH * (8 + 4 * 64) / max(1e-6, many - one) / 1e9}


def _exchange(rank: int, world: int) -> list[float]:
    import torch

    from shoal.comm.ranks import collectives
    from shoal.comm.ranks.torch_ranks import default_ranks

    torch.set_num_threads(1)
    ranks = default_ranks()
    large = torch.zeros(1 << 20, device="cpu")
    small = torch.zeros(world, device="cpu")

    def send(flat: Any) -> None:
        each = [flat.numel() // world] * world
        ranks.exchange(flat, each, each, [1])

    calls = [
        lambda: send(small),
        lambda: send(large),
        lambda: collectives.all_reduce(small),
        lambda: collectives.all_reduce(large),
    ]
    times = []
    for call in calls:
        series = []
        for _ in range(60):  # one behind the other, as in a step: a rank that is late makes the others wait
            begin = time.perf_counter()
            call()
            series.append(time.perf_counter() - begin)
        times.append(statistics.median(series))
    return times


def _ranks() -> dict[str, float]:
    """what two processes exchange and sum"""
    from shoal.testing import run_ranks

    small, large, sum_small, sum_large = run_ranks(2, _exchange, timeout_s=300.0)[0]
    nbytes = 4 << 20
    return {
        "link_latency_us": 1e6 * small,
        "link_gb_per_s": nbytes / 2 / max(1e-6, large - small) / 1e9,
        "reduce_latency_us": 1e6 * sum_small,
        "reduce_gb_per_s": nbytes / max(1e-6, sum_large - sum_small) / 1e9,
    }
