"""GPU tables on one card: what share of the memory's speed they reach, and the goals of the project's plan.

    python -m benchmarks.gpu                      # everything
    python -m benchmarks.gpu find update --json out.json

Every call takes 1,048,576 uniformly random ids unless a row says otherwise, float32. Times are medians of device events
around a run of calls over rotating inputs. The roof is a device-to-device copy, bytes read plus bytes written.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

N = 1 << 20
SLOTS = 1 << 27
ROWS: list[dict[str, Any]] = []


def milliseconds(call: Callable[[int], Any], repeats: int = 9, calls: int = 8) -> float:
    """Median time of one call; calls follow one another without waiting."""
    for i in range(3):
        call(i)
    torch.cuda.synchronize()
    times = []
    for r in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(calls):
            call(r * calls + i)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return statistics.median(times)


def report(
    what: str, *, ms: float, ids: int = N, bytes_per_id: float | None = None, goal: str = "", **more: Any
) -> None:
    row = {"what": what, "ms": round(ms, 4), "G_ids_per_s": round(ids / ms / 1e6, 2), "goal": goal, **more}
    text = f"{what:62s} {ms:8.4f} ms {row['G_ids_per_s']:7.2f} G/s"
    if bytes_per_id is not None:
        row["roof_share"] = round(ids * bytes_per_id / ms / 1e9 / roof(), 3)
        text += f" {100 * row['roof_share']:5.1f} % of the roof"
    print(f"{text}  {'goal ' + goal if goal else ''} {more or ''}", flush=True)
    ROWS.append(row)


_ROOF: list[float] = []


def roof() -> float:
    """TB/s of a device copy."""
    if not _ROOF:
        x = torch.randn(1 << 28, device="cuda")
        y = torch.empty_like(x)
        _ROOF.append(2 * x.numel() * 4 / milliseconds(lambda _: y.copy_(x), 5, 4) / 1e9)
    return _ROOF[0]


def make(dim: int, optimizer: Any, **options: Any) -> Any:
    import shoal

    return shoal.HashTable(dim, optimizer=optimizer, device="cuda", on_bad_gradient="ignore", **options)


def fill(table: Any, load: float, slots: int = SLOTS) -> torch.Tensor:
    """Puts random ids into a table of so many slots; the ids."""
    group = table._group
    group.max_load = 0.999
    group._grow_index(0, slots // 8, empty=True)
    count = int(slots * load)
    ids = torch.randint(-(1 << 62), 1 << 62, (count,), device="cuda")
    group._grow_rows(count + (64 << 20) // table.dim_size)
    for begin in range(0, count, 1 << 23):
        group.insert(ids[begin : begin + (1 << 23)], 0, counts=[min(1 << 23, count - begin)])
    group._look(wait=True)
    return ids


def sample(ids: torch.Tensor, sets: int = 4) -> list[torch.Tensor]:
    return [ids[torch.randint(0, ids.numel(), (N,), device="cuda")] for _ in range(sets)]


def distinct(ids: torch.Tensor, sets: int = 4) -> list[torch.Tensor]:
    return [ids[torch.randperm(ids.numel() // 4, device="cuda")[:N] + s * (ids.numel() // 4)] for s in range(sets)]


def find() -> None:
    """Lookups of known ids."""
    goals = {8: 7.5, 32: 6.5, 64: 4.5}
    for dim in (8, 32, 64, 128):
        for load in (0.5, 0.75):
            if dim == 128 and load > 0.5:
                continue
            table = make(dim, "sgd")
            ids = fill(table, load)
            asked = sample(ids)
            ms = milliseconds(lambda i, t=table, a=asked: t.lookup(a[i % 4]))
            goal = f">= {goals[dim]} G/s" if dim in goals else ">= 70 % of the roof"
            report(f"find, dim {dim}, load {load}", ms=ms, bytes_per_id=8 * dim + 72, goal=goal)
            rows = table._group.find(asked[0], 0, "rows")
            assert int(rows.min()) > 0
            del table, ids, asked, rows


def find_or_insert() -> None:
    """Lookups that make rows: 60 % known ids, 40 % new ones."""
    for load, goal in ((0.5, 4.0), (0.95, 2.5)):
        table = make(32, "sgd")
        ids = fill(table, load)
        calls, repeats = 4, 5
        known = [a.clone() for a in sample(ids, 4)]
        batches = []
        for i in range(calls * repeats + 3):
            batch = known[i % 4].clone()
            batch[torch.rand(N, device="cuda") < 0.4] = 0
            new = torch.randint(-(1 << 62), 1 << 62, (N,), device="cuda")
            batches.append(torch.where(batch == 0, new, batch))
        made = iter(batches)
        ms = milliseconds(lambda _, t=table, m=made: t.lookup(next(m), insert_missing=True), repeats, calls)
        report(f"find_or_insert, dim 32, 60 % hits, load {load}", ms=ms, goal=f">= {goal} G/s")
        del table, ids, known, batches


def insert() -> None:
    """All-new ids into an empty table that grows."""
    for dim in (32,):
        count = 64
        best = []
        for _ in range(3):
            table = make(dim, "sgd")
            batches = [torch.randint(-(1 << 62), 1 << 62, (N,), device="cuda") for _ in range(count)]
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for batch in batches:
                rows = table._group.insert(batch, 0, counts=[N])
                table._group.start_fresh(rows, batch, 1)
            torch.cuda.synchronize()
            best.append((time.perf_counter() - begin) * 1e3 / count)
            del table, batches
        report(f"insert of {count} M new ids into an empty table, dim {dim}, with growth (wall clock)",
               ms=statistics.median(best), goal=">= 2.0 G/s", first_ms=round(best[0], 3))  # fmt: skip


def update() -> None:
    """Fused updates of distinct known ids."""
    for name, words in (("sgd", 0), ("adagrad", 1), ("adam", 2)):
        table = make(64, name)
        ids = fill(table, 0.5, SLOTS // 4)
        sets = distinct(ids)
        grads = torch.randn(N, 64, device="cuda")
        table._group.start_fresh(table._group.find(ids, 0, "rows"), ids, 1, every=True)
        ms = milliseconds(lambda i, t=table, s=sets, g=grads: t.apply_gradients(s[i % 4], g, i, distinct=True))
        # Gradient read, weights and states read and written, and the line of the index.
        needed = 4 * 64 * (1 + 2 * (1 + words)) + 72 + (16 if name == "adam" else 0)
        report(f"update, {name}, dim 64, distinct", ms=ms, bytes_per_id=needed, goal=">= 60 % of the roof")
        ms = milliseconds(
            lambda i, t=table, s=sets, g=grads: t.apply_gradients(s[i % 4], g, i, enable_dedup=True), 5, 4
        )
        report(f"update, {name}, dim 64, gradients of equal ids summed", ms=ms, bytes_per_id=needed)
        ms = milliseconds(lambda i, t=table, s=sets, g=grads: t.apply_gradients(s[i % 4], g, i), 5, 4)
        report(f"update, {name}, dim 64, a step for each occurrence", ms=ms, bytes_per_id=needed)
        del table, ids, sets, grads


BENCHMARKS: dict[str, Callable[[], None]] = {
    "find": find,
    "find_or_insert": find_or_insert,
    "insert": insert,
    "update": update,
}


def main(argv: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], help="which; all by default")
    parser.add_argument("--json", metavar="FILE", help="keep the results here")
    args = parser.parse_args(None if argv is None else list(argv))
    if not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA GPU, and torch sees none here: nothing was measured")
        return 0
    import triton

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"a copy moves {roof():.2f} TB/s")
    for name in args.names or BENCHMARKS:
        BENCHMARKS[name]()
        torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "copy_TBps": roof(), "rows": ROWS}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
