"""Time steps of small models over ranks and with a parameter server, and fit the costs that explain them best."""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shoal.errors import PeerError
from shoal.sharded.all_to_all.ways import Way
from shoal.sharded.placement.costs import Costs
from shoal.sharded.placement.model import FLOAT_BYTES, ID_BYTES, TableLoad, calls, local_ns, work
from shoal.sharded.placement.plan import Placement, Plan

Shape = tuple[tuple[int, int, int], ...]
"""Dim, ids per sample and samples of each table."""

SHAPES: tuple[Shape, ...] = (
    ((16, 20, 1024),), ((64, 20, 512),), ((16, 1, 256),), ((64, 2, 2048),), ((16, 4, 512),) * 4,
    ((8, 4, 512), (16, 4, 512), (32, 4, 512), (64, 4, 512)),
    ((48, 8, 1024), (128, 4, 1024), (192, 3, 1024)),  # rows that do not fit into a core's cache
)  # fmt: skip
WAYS = ("row", "table", "data")
LOCAL = "local"
"""Every process has its own tables; shows how much ranks on one machine slow each other."""
RANKS = (2, 4, 8)
_ROWS = 200_000
_BATCHES = 6
_STEPS = 12
_TRUST = 0.03
"""The weight of an assumed cost, relative to one measured step."""


@dataclass(frozen=True)
class Timed:
    """The measured time of a step of a small model."""

    ranks: int
    way: str
    loads: tuple[TableLoad, ...]
    seconds: float

    def ways(self) -> list[Way]:
        return [way_of(self.way, number, self.ranks) for number in range(len(self.loads))]


def way_of(kind: str, number: int, ranks: int) -> Way:
    """The way of table ``number``; tables of kind ``table`` are assigned to ranks in turn."""
    return Way("table", (number % ranks,)) if kind == "table" else Way.parse(kind)


def steps_of(make: Any, shape: Shape, seed: int) -> tuple[float, list[float]]:
    """The median seconds of a training step on tables from ``make(number, dim)``, and the distinct ids per table."""
    import torch

    from shoal.nn import EmbeddingBagCollection

    tables = {f"plan_{number}": make(number, dim) for number, (dim, _, _) in enumerate(shape)}
    model = EmbeddingBagCollection(tables)
    generator = torch.Generator().manual_seed(seed)
    batches = [
        {
            name: torch.randint(_ROWS, (samples, ids), generator=generator, device="cpu") * 982451653
            for name, (_, ids, samples) in zip(tables, shape, strict=True)
        }
        for _ in range(_BATCHES)
    ]
    upstream = torch.full((shape[0][2], sum(dim for dim, _, _ in shape)), 0.01, device="cpu")
    times = []
    for number in range(_BATCHES + _STEPS):
        begin = time.perf_counter()
        model(batches[number % _BATCHES]).backward(upstream)
        times.append(time.perf_counter() - begin)
    distinct = [statistics.mean(batch[name].unique().numel() for batch in batches) for name in tables]
    return statistics.median(times[_BATCHES:]), distinct


def _ways(ranks: int) -> tuple[str, ...]:
    return (LOCAL, *WAYS) if ranks > 1 else (LOCAL,)


def on_rank(rank: int, world: int) -> list[tuple[float, list[float]]]:
    """Time steps of every shape in every way on this rank."""
    import torch

    import shoal
    from shoal.sharded import AllToAllHashTable

    torch.set_num_threads(1)
    shoal.set_num_threads(1)
    found = []
    for way in _ways(world):
        for shape in SHAPES:

            def make(number: int, dim: int, way: str = way) -> Any:
                if way == LOCAL:
                    return shoal.HashTable(dim, name=f"plan_{number}", optimizer=shoal.Adagrad(lr=0.01))
                return AllToAllHashTable(dim, name=f"plan_{number}", optimizer=shoal.Adagrad(lr=0.01),
                                         way=way_of(way, number, world))  # fmt: skip

            found.append(steps_of(make, shape, rank))
    return found


def loads_of_shape(shape: Shape, distinct: Sequence[float]) -> tuple[TableLoad, ...]:
    return tuple(
        TableLoad(name=f"plan_{number}", dim=dim, rows=_ROWS, ids=ids * samples, distinct=own, bags=samples)
        for number, ((dim, ids, samples), own) in enumerate(zip(shape, distinct, strict=True))
    )


def timed_on(ranks: int) -> list[Timed]:
    """Time steps on several processes of this machine; the slowest rank counts."""
    from shoal.testing import run_ranks

    every = run_ranks(ranks, on_rank, timeout_s=300.0)
    cases = [(way, shape) for way in _ways(ranks) for shape in SHAPES]
    found = []
    for number, (way, shape) in enumerate(cases):
        seconds = max(own[number][0] for own in every)
        found.append(Timed(ranks, way, loads_of_shape(shape, every[0][number][1]), seconds))
    return found


def _terms(one: Timed, costs: Costs) -> tuple[dict[str, float], float]:
    """Seconds that one unit of each cost adds to the slowest rank's step, and seconds that are already known."""
    crowded = costs.beside(one.ranks)
    plan = Plan(tables=tuple(Placement(load=load, way=way) for load, way in zip(one.loads, one.ways(), strict=True)),
                ranks=one.ranks, costs=crowded)  # fmt: skip
    total, step = plan.total, plan.step
    slowest = int((total.compute_s + total.calls_s).argmax())
    known = step.network_s + step.latency_s + step.merging_s
    slower = 1 + costs.crowd * (one.ranks - 1)
    terms = {name: 1e-6 * slower * often for name, often in calls(one.loads, one.ways(), one.ranks).items()}
    for load, way in zip(one.loads, one.ways(), strict=True):
        if way.kind in ("row", "data"):
            known += 1e-9 * local_ns(load, load.dim, crowded)
        for name, often in work(load, way, one.ranks, costs).items():
            unit = slower * (1e-6 if name.endswith("_us") else 1e-9)
            terms[name] = terms.get(name, 0.0) + float(often[slowest]) * unit
    return terms, known


def explained(costs: Costs, steps: Sequence[Timed]) -> Costs:
    """Fit the costs of steps over ranks to the measured ``steps``.

    Minimises relative errors with costs >= 0; a cost that the steps do not determine stays close to its old value.
    """
    costs = _local(costs, [one for one in steps if one.way == LOCAL])
    found = [(*_terms(one, costs), one.seconds) for one in steps if one.way != LOCAL]
    names = sorted({name for terms, _, _ in found for name in terms})
    before = np.array([max(1e-3, getattr(costs, name)) for name in names])
    rows = [[terms.get(name, 0.0) / seconds for name in names] for terms, _, seconds in found]
    wanted = [max(0.0, 1 - known / seconds) for _, known, seconds in found]
    a = np.concatenate([np.array(rows) * before, _TRUST * np.eye(len(names))])
    b = np.concatenate([np.array(wanted), np.full(len(names), _TRUST)])
    factors = _positive_least_squares(a, b)
    fitted: dict[str, Any] = dict(zip(names, (factors * before).tolist(), strict=True))
    return replace(costs, **fitted)


def _local(costs: Costs, steps: Sequence[Timed]) -> Costs:
    """Fit the costs of rows within modules, and how much ranks slow each other, to steps without exchanges.

    Such a step takes ``slower * (share * rows + step + groups + tables)``. The last three terms are also part of steps
    over ranks, and are determined from those.
    """
    if not steps:
        return costs
    rows = []
    for one in steps:
        known = 1e-9 * sum(local_ns(load, load.dim, costs) for load in one.loads)
        often = [known, 1e-4, 1e-4 * len({load.dim for load in one.loads}), 1e-4 * len(one.loads)]
        rows.append(np.array(often) / one.seconds)
    best: tuple[float, float, float] | None = None
    for crowd in np.arange(0.0, 0.5, 0.005).tolist():
        a = np.array([row * (1 + crowd * (one.ranks - 1)) for row, one in zip(rows, steps, strict=True)])
        x = _positive_least_squares(a, np.ones(len(steps)))
        error = float(((a @ x - 1) ** 2).sum())
        if best is None or error < best[0]:
            best = error, crowd, float(x[0])
    assert best is not None
    _, crowd, share = best
    return replace(costs.rows_times(share), crowd=crowd)


def _positive_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The ``x >= 0`` that minimises ``|a @ x - b|``, by coordinate descent."""
    square, along, x = a.T @ a, a.T @ b, np.zeros(a.shape[1])
    for _ in range(4000):
        for j in range(x.shape[0]):
            x[j] = max(0.0, x[j] + (along[j] - square[j] @ x) / square[j, j])
    return x


def with_server(costs: Costs) -> dict[str, Any]:
    """Measure the costs of rows on a server: per request, per id and per byte."""
    import shoal
    from shoal.sharded import PsClient, ps_table

    rows, wanted = [], []
    with _server() as address, PsClient([address]) as client:
        for case, shape in enumerate(SHAPES):

            def make(number: int, dim: int, case: int = case) -> Any:
                return ps_table(client, dim, name=f"plan_{case}_{number}", optimizer=shoal.Adagrad(lr=0.01))

            seconds, distinct = steps_of(make, shape, 0)
            loads = loads_of_shape(shape, distinct)
            groups, ids = len({load.dim for load in loads}), sum(load.ids for load in loads)
            moved = sum(load.distinct * (2 * ID_BYTES + FLOAT_BYTES * load.dim) for load in loads)
            rows.append([2e-6 * groups / seconds, ids * 1e-9 / seconds, moved * 1e-9 / seconds])
            known = sum(local_ns(load, load.dim, costs) for load in loads)
            wanted.append(max(0.0, 1 - 1e-9 * known / seconds))
    before = np.array([costs.ps_latency_us, costs.ps_fixed, 1 / costs.ps_gb_per_s])
    a = np.concatenate([np.array(rows) * before, _TRUST * np.eye(3)])
    latency, fixed, per_byte = _positive_least_squares(a, np.array([*wanted, *[_TRUST] * 3])) * before
    return {"ps_latency_us": float(latency), "ps_fixed": float(fixed), "ps_gb_per_s": float(1 / max(per_byte, 1e-3))}


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """Start a parameter server in another process; yields its address."""
    command = [sys.executable, "-m", "shoal", "ps", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise PeerError("a parameter server did not start on this machine; run `shoal ps` to see why")
            yield json.loads(line)["address"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
