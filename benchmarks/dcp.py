"""`torch.distributed.checkpoint` against our own format: a table of 5 M rows saved on 2 ranks and loaded on 3.

    python -m benchmarks.dcp [--rows 5000000] [--dim 16] [--rounds 3]

A table over ranks is written by ``torch.distributed.checkpoint.save`` and by ``table.save``, one after the other
in the same processes, and read on three ranks by ``dcp.load``, by ``shoal.nn.load_dcp`` and by ``table.restore``. The
goal: a save and a load together take at most 1.5 times as long as with our own format.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import Report, parser

GOAL = 1.5


def _model(dim: int) -> Any:
    from shoal.nn import HashEmbeddingBag
    from shoal.sharded import AllToAllHashTable

    return HashEmbeddingBag(AllToAllHashTable(dim, optimizer="adagrad", name="t", seed=1))


def _timed(call: Callable[[], Any]) -> float:
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - begin


def _begin() -> Any:
    import torch.distributed.checkpoint as dcp

    import shoal

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    shoal.set_num_threads(1)
    return dcp


def save(rank: int, world: int, folder: str, rows: int, dim: int, rounds: int) -> dict[str, float]:
    dcp = _begin()
    model = _model(dim)
    mine = (torch.arange(rows) * 982451653)[rank::world]
    for ids in mine.split(100_000):
        model.table.apply_gradients(ids, torch.ones(ids.numel(), dim))
    times: dict[str, list[float]] = {"own": [], "dcp": []}
    for number in range(rounds):
        times["own"].append(_timed(lambda: model.table.save(f"{folder}/own")))
        times["dcp"].append(_timed(lambda n=number: dcp.save(model.state_dict(), checkpoint_id=f"{folder}/dcp-{n}")))
        if rank == 0 and number + 1 < rounds:
            shutil.rmtree(f"{folder}/dcp-{number}")
    return {name: statistics.median(series) for name, series in times.items()}


def load(rank: int, world: int, folder: str, rows: int, dim: int, rounds: int) -> dict[str, float]:
    dcp = _begin()
    from shoal.nn import load_dcp

    path = f"{folder}/dcp-{rounds - 1}"

    def plain(model: Any) -> None:
        state = model.state_dict()
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state)

    calls = {
        "own": lambda model: model.table.restore(f"{folder}/own"),
        "dcp": plain,
        "load_dcp": lambda model: load_dcp(model, path),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            model = _model(dim)
            times[name].append(_timed(lambda call=call, model=model: call(model)))
            assert model.table.size() == rows
    return {name: statistics.median(series) for name, series in times.items()}


def main() -> None:
    from benchmarks import dcp as own  # other processes find its functions by this name
    from shoal.testing import run_ranks

    made = parser(__doc__ or "")
    made.add_argument("--rows", type=int, default=5_000_000)
    made.add_argument("--dim", type=int, default=16)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--folder", default=None, help="a folder on the disk to measure; by default a temporary one")
    options = made.parse_args()
    report = Report("dcp")
    report.start()
    given = options.rows, options.dim, options.rounds
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        saved = run_ranks(2, own.save, folder, *given, timeout_s=1200.0)[0]
        loaded = run_ranks(3, own.load, folder, *given, timeout_s=1200.0)[0]
    what = f"{options.rows / 1e6:g} M rows of dim {options.dim}"

    def add(name: str, ours: float, theirs: float, goal: float | None = None) -> None:
        report.add(f"{what}, {name}", f"{theirs:.2f} s", f"{ours:.2f} s", theirs / ours, goal, at_most=True)

    add("save on 2 ranks, against table.save", saved["own"], saved["dcp"])
    add("dcp.load on 3 ranks, against table.restore", loaded["own"], loaded["dcp"])
    add("load_dcp on 3 ranks, against table.restore", loaded["own"], loaded["load_dcp"])
    add("save and dcp.load", saved["own"] + loaded["own"], saved["dcp"] + loaded["dcp"], GOAL)
    add("save and load_dcp", saved["own"] + loaded["own"], saved["dcp"] + loaded["load_dcp"], GOAL)
    report.save(options.json)


if __name__ == "__main__":
    main()
