"""A complete embedding step (lookup, pooling, backward, Adagrad) against `nn.EmbeddingBag` with a sparse optimizer.

    python -m benchmarks.nn
    python -m benchmarks.nn --rows 4000000 --json out.json

Ours and the rival take turns in one process, each on a batch that is new to the caches. The fastest runs are
printed, because other work on the machine only adds to a time, with the ratio rival / ours (larger is better).
"""

import argparse
import json
import os
import platform
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import shoal
from shoal.nn import HashEmbeddingBag


def seconds(f: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    f(*args)
    return time.perf_counter() - start


def compare(rows: int, bags: int, length: int, dim: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of the fastest run of both sides, for the forward and for the complete step."""
    generator = torch.Generator().manual_seed(0)
    n = bags * length
    offsets = torch.arange(0, n + 1, length)
    table = shoal.HashTable(dim, optimizer=shoal.Adagrad(lr=0.05), seed=0)
    for begin in range(0, rows, 1 << 20):
        table.lookup(torch.arange(begin, min(begin + (1 << 20), rows)), insert_missing=True)
    ours = HashEmbeddingBag(table)
    theirs = torch.nn.EmbeddingBag(rows, dim, mode="sum", include_last_offset=True, sparse=True)
    optimizer = torch.optim.Adagrad(theirs.parameters(), lr=0.05)
    grad = torch.randn(bags, dim, generator=generator)

    def our_forward(ids: torch.Tensor) -> None:
        with torch.no_grad():
            ours(ids, offsets)

    def their_forward(ids: torch.Tensor) -> None:
        with torch.no_grad():
            theirs(ids, offsets)

    def our_step(ids: torch.Tensor) -> None:
        ours(ids, offsets).backward(grad)

    def their_step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        theirs(ids, offsets).backward(grad)
        optimizer.step()

    runs = {"forward": (our_forward, their_forward), "step": (our_step, their_step)}
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in runs}
    for number in range(repeats + 2):
        for name, pair in runs.items():
            ids = torch.randint(rows, (2, n), generator=generator)
            for which in (0, 1) if number % 2 else (1, 0):  # each on a batch that neither side has just used
                took = seconds(pair[which], ids[which])
                if number >= 2:
                    times[name][which].append(took)
    result: dict[str, Any] = {"rows": rows, "bags": bags, "ids_per_bag": length, "dim": dim}
    for name, (mine, rival) in times.items():
        a, b = min(mine) * 1e3, min(rival) * 1e3
        result |= {f"{name}_ms": a, f"torch_{name}_ms": b, f"{name}_ratio": b / a}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    print(f"{platform.machine()}, {os.cpu_count()} CPUs; torch {torch.__version__}, shoal {shoal.__version__}")
    print(f"{options.rows:,} rows; fastest of {options.repeats}; ratio: nn.EmbeddingBag / HashEmbeddingBag\n")
    print("  bags x ids   dim |  forward ms   torch   ratio |    step ms   torch   ratio")
    results = []
    for bags, length, dim in ((64, 1, 16), (2048, 10, 16), (4096, 50, 16), (4096, 50, 64)):
        one = compare(options.rows, bags, length, dim, options.repeats)
        results.append(one)
        forward = f"{one['forward_ms']:11.3f} {one['torch_forward_ms']:7.3f} {one['forward_ratio']:6.2f}x"
        step = f"{one['step_ms']:10.3f} {one['torch_step_ms']:7.2f} {one['step_ratio']:6.2f}x"
        print(f"{bags:6} x {length:3}  {dim:4} | {forward} | {step}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
