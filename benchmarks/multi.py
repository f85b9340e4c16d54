"""Many tables in one call against one call per table, and the cost of an admission filter.

    python -m benchmarks.multi
    python -m benchmarks.multi --json out.json

Both sides take turns in one process. Printed are the fastest of nine runs, because other work on the machine only adds
to a time, and the ratio other / ours.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import shoal
from shoal.table import (
    AdagradOptimizer,
    CombineAsSegment,
    CuckooEmbeddingHashTableConfig,
    EmbeddingHashTableConfig,
    EntryConfig,
    HashTableConfigInstance,
    MultiHashTable,
    SlotOccurrenceThresholdConfig,
    ZerosInitializer,
    create_hash_filter,
    reset_registry,
)

REPEATS = 9


@dataclass
class Row:
    """One comparison, in milliseconds."""

    name: str
    other: str
    ours_ms: float
    other_ms: float
    ratio: float


def config(dim: int) -> HashTableConfigInstance:
    segment = CombineAsSegment(dim, ZerosInitializer(), AdagradOptimizer())
    message = EmbeddingHashTableConfig(
        entry_config=EntryConfig(segments=[segment]), cuckoo=CuckooEmbeddingHashTableConfig()
    )
    return HashTableConfigInstance(message, [0.05])


def compare(name: str, other: str, ours: Callable[[], Any], theirs: Callable[[], Any]) -> Row:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(REPEATS):
        for side, call in zip(times, (ours, theirs), strict=True):
            start = time.perf_counter()
            call()
            side.append(1e3 * (time.perf_counter() - start))
    a, b = (min(side) for side in times)
    row = Row(name, other, round(a, 3), round(b, 3), round(b / a, 2))
    print(f"{row.name:<44} {row.ours_ms:>9.3f} ms   {row.other:<28} {row.other_ms:>9.3f} ms   x{row.ratio}", flush=True)
    return row


def fused(tables: int, shards: int, block: int, dim: int) -> list[Row]:
    """Compares fused calls for K tables and the ids of N shards with one call per block."""
    reset_registry()
    multi = MultiHashTable.from_configs({f"t{i:03}": config(dim) for i in range(tables)})
    parts = list(multi.tables.values())
    sizes = torch.full((tables * shards,), block, dtype=torch.int32)
    ids = torch.randint(0, 20 * block, (tables * shards * block,))
    grads = torch.randn(ids.numel() * dim)
    blocks = list(zip(ids.split(block), grads.view(-1, dim).split(block), strict=True))
    _, _, id_offsets, offsets, indices = multi.fused_lookup(ids, sizes, shards)

    def one_by_one() -> None:
        for number, (of_block, rows) in enumerate(blocks):
            parts[number % tables].apply_gradients(of_block, rows, 0)

    def together() -> None:
        multi.fused_apply_gradient(ids, indices, sizes, grads, id_offsets, offsets, 0, None, shards)

    together()
    what = f"{tables} tables x {shards} shards x {block} ids, dim {dim}"
    return [
        compare(
            f"lookup {what}",
            "one call per block",
            lambda: multi.fused_lookup(ids, sizes, shards),
            lambda: torch.cat([parts[n % tables].lookup(b).view(-1) for n, (b, _) in enumerate(blocks)]),
        ),
        compare(f"update {what}", "one call per block", together, one_by_one),
    ]


def admission(n: int, dim: int) -> list[Row]:
    """Compares batches of mostly new ids with and without an admission filter."""
    thresholds = SlotOccurrenceThresholdConfig(default_occurrence_threshold=2).SerializeToString()
    rows = []
    for dedup in (False, True):
        hash_filter = create_hash_filter(30_000_000, 7, thresholds)
        guarded = shoal.HashTable(dim, optimizer="adagrad", initializer="zeros", hash_filter=hash_filter)
        plain = shoal.HashTable(dim, optimizer="adagrad", initializer="zeros")
        grads = torch.randn(n, dim)

        def update(table: shoal.HashTable, dedup: bool = dedup, grads: torch.Tensor = grads) -> None:
            ids = torch.randint(0, 1 << 62, (n,))
            table.apply_gradients(ids, grads, 0, enable_dedup=dedup)

        name = f"{n} new ids, sliding filter{', dedup' if dedup else ''}"
        rows.append(compare(name, "no filter, rows inserted", lambda t=guarded: update(t), lambda t=plain: update(t)))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.multi", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="also write the numbers to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    versions = f"shoal {shoal.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, {shoal.num_threads()} threads; {versions}")
    rows = [*fused(50, 8, 64, 16), *fused(50, 8, 1024, 16), *fused(4, 2, 50_000, 16), *admission(1_000_000, 16)]
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"versions": versions, "rows": [asdict(row) for row in rows]}, file, indent=2)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
