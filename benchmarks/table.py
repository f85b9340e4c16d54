"""The local table against a static tensor (`torch.index_select`) and FBGEMM's CPU table, in one run.

    python -m benchmarks.table                        # 20 M rows: about ten minutes, 24 GB of memory
    python -m benchmarks.table --rows 2000000         # a quick look
    python -m benchmarks.table --only lookup,update

Batches have 1 M ids. The rivals get row numbers, which need no lookup; we get ids. FBGEMM is compared if `fbgemm_gpu`
can be imported (`pip install --no-deps fbgemm-gpu-cpu==1.8.0` with torch 2.13).
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import shoal
from benchmarks.harness import Report, interleaved, median, parser, touch_memory

BATCH = 1_000_000


def id_of(number: torch.Tensor) -> torch.Tensor:
    """Row numbers as ids that look like hashes."""
    return number * 2654435761 + 7


def zipf_numbers(rows: int, n: int, exponent: float, seed: int) -> torch.Tensor:
    """Numbers in [0, rows) by a Zipf law, with the popular ones scattered over the table."""
    u = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    a = 1.0 - exponent  # the inverse of the continuous law's distribution
    rank = ((u * ((rows + 1.0) ** a - 1.0) + 1.0) ** (1.0 / a)).floor().long() - 1
    return rank.clamp_(0, rows - 1) * 7368787 % rows


def batches(rows: int, law: str) -> list[torch.Tensor]:
    if law == "uniform":
        generator = torch.Generator().manual_seed(1)
        return [torch.randint(0, rows, (BATCH,), generator=generator) for _ in range(4)]
    return [zipf_numbers(rows, BATCH, 1.05, seed) for seed in range(4)]


def filled(rows: int, dim: int, optimizer: str) -> shoal.HashTable:
    table = shoal.HashTable(dim, optimizer=optimizer, lr=0.01, initializer="zeros", seed=0)
    for start in range(0, rows, BATCH):
        ids = id_of(torch.arange(start, min(rows, start + BATCH)))
        table.lookup(ids, insert_missing=True)
    return table


def fbgemm_table(rows: int, dim: int, optimizer: str) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    kinds = {"sgd": EmbOptimType.EXACT_SGD, "adagrad": EmbOptimType.EXACT_ADAGRAD}
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=kinds[optimizer],
        learning_rate=0.01,
        pooling_mode=PoolingMode.SUM,
    )


def have_fbgemm() -> bool:
    try:
        import fbgemm_gpu  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


def rate(seconds: float, n: int = BATCH) -> str:
    return f"{n / seconds / 1e6:.1f} M/s"


class Rotating:
    """Calls a function with several batches in turn, so that no call finds its rows in the cache."""

    def __init__(self, call: Callable[[torch.Tensor], Any], numbers: list[torch.Tensor]) -> None:
        self.call, self.numbers, self.turn = call, numbers, 0

    def __call__(self) -> None:
        self.turn += 1
        self.call(self.numbers[self.turn % len(self.numbers)])


def lookup(report: Report, rows: int, repeats: int, fbgemm: bool) -> None:
    offsets = torch.arange(BATCH + 1)
    for dim in (8, 16, 64):
        table, static = filled(rows, dim, "sgd"), torch.zeros(rows, dim).add_(1)
        rival = fbgemm_table(rows, dim, "sgd") if fbgemm else None
        for law in ("uniform", "zipf"):
            numbers = batches(rows, law)
            calls = [
                Rotating(table.lookup, [id_of(n) for n in numbers]),
                Rotating(lambda n, static=static: torch.index_select(static, 0, n), numbers),
            ]
            if rival is not None:
                calls.append(Rotating(lambda n, rival=rival: rival(n, offsets), numbers))
            with torch.no_grad():
                times = [median(series) for series in interleaved(calls, repeats)]
            what = f"lookup dim {dim} {law}"
            report.add(f"{what} / index_select", rate(times[0]), rate(times[1]), times[1] / times[0], 1.0)
            if rival is not None:
                report.add(f"{what} / FBGEMM", rate(times[0]), rate(times[2]), times[2] / times[0], 1.0)
        del table, static, rival
        gc.collect()


def update(report: Report, rows: int, repeats: int, fbgemm: bool) -> None:
    offsets = torch.arange(BATCH + 1)
    for dim in (16, 64):
        alone: dict[str, float] = {}
        grads = torch.randn(BATCH, dim, generator=torch.Generator().manual_seed(2)) * 0.01
        for optimizer, goal in (("sgd", 1.5), ("adagrad", 3.0), ("adam", None), ("ftrl", None)):
            table = filled(rows, dim, optimizer)
            numbers = batches(rows, "uniform")
            ids = [id_of(n) for n in numbers]

            def step(x: torch.Tensor, table: shoal.HashTable = table, grads: torch.Tensor = grads) -> None:
                table.lookup(x)
                table.apply_gradients(x, grads, 0)

            calls = [
                Rotating(step, ids),
                Rotating(lambda x, t=table, g=grads: t.apply_gradients(x, g, 0), ids),
            ]
            if goal is not None and fbgemm:
                rival = fbgemm_table(rows, dim, optimizer)
                calls.append(Rotating(lambda n, r=rival, g=grads: r(n, offsets).backward(g), numbers))
            times = [median(series) for series in interleaved(calls, repeats)]
            alone[optimizer] = times[1]
            if len(times) == 3:
                what = f"lookup + apply_gradients dim {dim} {optimizer} / FBGEMM"
                report.add(what, rate(times[0]), rate(times[2]), times[2] / times[0], goal)
                del rival
            if optimizer in ("adam", "ftrl"):
                what = f"apply_gradients dim {dim} {optimizer} / our adagrad"
                report.add(what, rate(times[1]), rate(alone["adagrad"]), alone["adagrad"] / times[1], 0.6)
            del table, calls, step
            gc.collect()


def insert(report: Report, rows: int, repeats: int, fbgemm: bool) -> None:
    dim = 16
    touch_memory(rows * (dim * 4 + 40) / 2**30)
    table = shoal.HashTable(dim, optimizer="sgd", initializer="zeros", seed=0)
    values = torch.ones(BATCH, dim)
    times, overhead = [], []
    for start in range(0, rows, BATCH):
        ids = id_of(torch.arange(start, start + BATCH))
        begin = time.perf_counter()
        table.assign(ids, values)
        times.append(time.perf_counter() - begin)
        size = start + BATCH
        overhead.append(table.memory_bytes() / size - 4 * dim)
    ids = [id_of(n) for n in batches(rows, "uniform")]
    found = median(interleaved([Rotating(table.lookup, ids)], repeats)[0])
    total = sum(times)
    report.add(
        "insert from empty, sustained / our lookup", rate(total, rows), rate(found), found * rows / BATCH / total, 0.4
    )
    report.add(
        "slowest batch / median batch",
        f"{max(times) * 1e3:.0f} ms",
        f"{median(times) * 1e3:.0f} ms",
        max(times) / median(times),
        4.0,
        at_most=True,
    )
    mean = sum(overhead) / len(overhead)
    report.add("bytes per entry beyond weights, mean over growth", f"{mean:.1f} B", "", mean, 32.0, at_most=True)


def threads(report: Report, rows: int, repeats: int, fbgemm: bool) -> None:
    cores = shoal.num_threads()
    if cores < 2:
        print("one core only: nothing to compare")
        return
    for dim in (16, 64):
        table = filled(rows, dim, "adagrad")
        ids = [id_of(n) for n in batches(rows, "uniform")]
        grads = torch.zeros(BATCH, dim)
        for what, call in (
            ("lookup", table.lookup),
            ("apply_gradients", lambda x, t=table, g=grads: t.apply_gradients(x, g, 0)),
        ):

            def with_threads(
                n: int, call: Callable[[torch.Tensor], Any] = call, ids: list[torch.Tensor] = ids
            ) -> Rotating:
                def run(x: torch.Tensor) -> None:
                    shoal.set_num_threads(n)
                    call(x)

                return Rotating(run, ids)

            one, two = (median(s) for s in interleaved([with_threads(1), with_threads(2)], repeats))
            report.add(f"{what} dim {dim} adagrad, 2 threads / 1", rate(two), rate(one), one / two, 1.6)
        shoal.set_num_threads(cores)
        del table
        gc.collect()


def small(report: Report, rows: int, repeats: int, fbgemm: bool) -> None:
    table = filled(1_000_000, 16, "sgd")
    ids = id_of(torch.randint(0, 1_000_000, (64,)))

    def many() -> None:
        for _ in range(2000):
            table.lookup(ids)

    seconds = median(interleaved([many], repeats)[0]) / 2000
    report.add("one lookup of 64 ids, microseconds", f"{seconds * 1e6:.1f} us", "", seconds * 1e6, 15.0, at_most=True)


PARTS = {"lookup": lookup, "update": update, "insert": insert, "threads": threads, "small": small}


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument("--rows", type=int, default=20_000_000)
    made.add_argument("--only", default=",".join(PARTS), help="parts to run, of " + ", ".join(PARTS))
    flags = made.parse_args()
    if flags.rows < BATCH:
        made.error(f"--rows is at least {BATCH}, got {flags.rows}")
    rows = math.ceil(flags.rows / BATCH) * BATCH
    fbgemm = have_fbgemm()
    report = Report(f"table, {rows} rows, batches of {BATCH}, {shoal.num_threads()} threads")
    report.start()
    if not fbgemm:
        print("# fbgemm_gpu cannot be imported: its rows are left out")
    for part in flags.only.split(","):
        if part not in PARTS:
            made.error(f"--only takes {', '.join(PARTS)}; got {part!r}")
        PARTS[part](report, rows, flags.repeats, fbgemm)
    report.save(flags.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
