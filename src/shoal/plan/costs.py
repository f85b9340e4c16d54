"""What the pieces of a step cost on this machine: measured in some seconds, kept as JSON."""

from __future__ import annotations

import errno
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shoal.errors import DataError

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Nanoseconds on one core unless the name says otherwise. ``x_fixed + x_per_dim * dim`` is the cost of a row."""

    lookup_fixed: float
    lookup_per_dim: float
    update_fixed: float
    update_per_dim: float
    pool_fixed: float
    """An id in a bag, forward and backward, beyond the look-up and the update of its row."""
    pool_per_dim: float
    route_fixed: float
    """An id on its way to the rank that owns it and back: de-duplication, order, scatter and gather."""
    route_per_dim: float
    row_overhead_bytes: float
    """Of a row, beyond weights and optimizer state."""
    dense_gflops: float
    dense_update: float
    """One parameter in the dense optimizer's step."""
    step_us: float
    """What a step costs however small it is."""
    link_gb_per_s: float
    """What the all-to-all's software moves, one process."""
    link_latency_us: float
    """One all-to-all of nothing."""
    reduce_gb_per_s: float
    """Gradients that an all-reduce of two processes sums."""
    reduce_latency_us: float
    ps_gb_per_s: float
    """What a parameter server's connection moves."""
    ps_latency_us: float
    """One request that asks for one row."""
    load: float = 0.0
    """How busy each CPU was with other work, as processes that wanted it; above some tenths, measure again later."""
    machine: str = ""
    measured: str = ""

    def rows(self, what: str, dim: float) -> float:
        return getattr(self, f"{what}_fixed") + getattr(self, f"{what}_per_dim") * dim


def cache_path() -> Path:
    """Where costs are kept between calls."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "plan-costs.json"


def load_costs(path: Path) -> Costs:
    """Raises `DataError` for a file that was not written by `save_costs`."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("version") != VERSION or not isinstance(content.get("costs"), dict):
        raise DataError(f"{path} holds no costs, version {VERSION}; measure them with: shoal plan --measure")
    values = content["costs"]
    for each in fields(Costs):
        good = isinstance(values.get(each.name), str if str(each.type) == "str" else int | float)
        if not good:
            raise DataError(f"{path}: {each.name} is missing or no number; measure again with: shoal plan --measure")
    return Costs(**{each.name: values[each.name] for each in fields(Costs)})


def prepare(path: Path) -> None:
    """Makes the folder that costs will be written to; raises ``OSError`` where they cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def save_costs(costs: Costs, path: Path) -> None:
    from shoal.durable import write_whole

    prepare(path)
    write_whole(path, json.dumps({"format": "shoal.plan-costs", "version": VERSION, "costs": asdict(costs)}, indent=1))


# --- measuring --------------------------------------------------------------------------------------------------------

_DIMS = (8, 64)
_ROWS = 200_000
_BATCH = 20_000


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
    from shoal.sharded import AllToAllHashTable
    from shoal.sharded.all_to_all.backend import SingleRank
    from shoal.sharded.all_to_all.group import AllToAllGroup
    from shoal.table.protocol import Features, Part, Step

    of: dict[str, dict[int, float]] = {"lookup": {}, "update": {}, "pool": {}, "route": {}}
    overhead = 0.0
    counts, features = torch.tensor([_BATCH], device="cpu"), Features()
    for dim in _DIMS:
        table = shoal.HashTable(dim, optimizer=shoal.Adagrad(lr=0.01), name=f"plan_{dim}")
        ids = torch.randperm(_ROWS, device="cpu")[:_BATCH] * 982451653
        every = torch.arange(_ROWS, device="cpu") * 982451653
        table.assign(every, torch.zeros(_ROWS, dim, device="cpu"))
        overhead = max(overhead, table.memory_bytes() / _ROWS - 8 * dim) if dim == _DIMS[0] else overhead
        grads = torch.ones(_BATCH, dim, device="cpu")
        lookup = _usual(lambda table=table, ids=ids: table.lookup(ids))
        update = _usual(lambda table=table, ids=ids, grads=grads: table.apply_gradients(ids, grads, enable_dedup=False))
        bag = shoal.nn.HashEmbeddingBag(table, combiner="sum")
        bags = ids.view(-1, 20)

        def step(bag: Any = bag, bags: Any = bags) -> None:
            bag(bags).sum().backward()

        pool = _usual(step)
        whole = AllToAllHashTable(backend=SingleRank(), factory=lambda _, table=table: table)
        group = AllToAllGroup((whole,))

        def routed(group: Any = group, ids: Any = ids, grads: Any = grads) -> None:
            found = group.find(ids, counts, features, missing="zeros")
            group.rows(found, features, missing="zeros")
            group.update([Part(found, features, grads)], step=Step())

        route = _usual(routed)
        scale = 1e9 / _BATCH
        of["lookup"][dim], of["update"][dim] = lookup * scale, update * scale
        of["pool"][dim] = max(0.0, pool - lookup - update) * scale
        of["route"][dim] = max(0.0, route - lookup - update) * scale
    lines = {key: value for name, values in of.items() for key, value in _line(values, name).items()}
    return lines | {"row_overhead_bytes": max(12.0, overhead)}


def _dense() -> dict[str, float]:
    """dense arithmetic"""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    small = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
    batch = torch.randn(1024, 256, device="cpu")

    def step() -> None:
        model(batch).sum().backward()

    def nothing() -> None:
        optimizer.zero_grad()
        small(batch[:4, :4]).sum().backward()
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

    torch.set_num_threads(1)
    large = torch.zeros(1 << 20, device="cpu")
    small = torch.zeros(world, device="cpu")
    out = torch.empty_like(large)
    calls = [
        lambda: collectives.all_to_all(out[:world], small),
        lambda: collectives.all_to_all(out, large),
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
