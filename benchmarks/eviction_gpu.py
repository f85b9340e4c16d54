"""GPU tables at a full budget: find, evict and insert in one call, against HierarchicalKV's own benchmark.

    python -m benchmarks.eviction_gpu                          # 134 M rows at dim 8 and 32
    python -m benchmarks.eviction_gpu --hkv ./hkv_bench        # runs HierarchicalKV's benchmark after ours, for 100 s
    python -m benchmarks.eviction_gpu --rows 1000000 --profile # a quick look, kernel by kernel

Every call has 1,048,576 distinct ids, 60 % of them known, and goes to a full table that evicts by Lru. Times are
medians of device events around series of consecutive calls of the table's public methods.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import torch

import shoal

N = 1 << 20
CALLS = 6
RESULTS: list[dict[str, Any]] = []


def show(what: str, ms: float, **more: Any) -> float:
    rate = N / ms / 1e6
    RESULTS.append({"what": what, "ms": round(ms, 4), "G_ids_per_s": round(rate, 3), **more})
    print(f"{what:78s} {ms:8.4f} ms {rate:7.2f} G/s {more or ''}", flush=True)
    return rate


def id_of(number: torch.Tensor) -> torch.Tensor:
    """Turns numbers into ids that look random; a bijection."""
    return number * -7046029254386353131


class Stream:
    """Batches of distinct ids: new ones, and some from the newer half of the earlier ones."""

    def __init__(self, rows: int) -> None:
        self.rows, self.next = rows, 0

    def fill(self) -> Iterator[torch.Tensor]:
        while self.next < self.rows:
            count = min(N, self.rows - self.next)
            yield id_of(torch.arange(self.next, self.next + count, device="cuda"))
            self.next += count

    def batch(self, known: float) -> torch.Tensor:
        new = N - int(known * N)
        window = max(self.rows // 2, 2 * N) if self.rows > 4 * N else self.rows // 2
        old = (
            self.next
            - window
            + torch.randperm(min(window, 1 << 24), device="cuda")[: N - new] * (max(1, window // (1 << 24)))
        )
        ids = torch.cat([torch.arange(self.next, self.next + new, device="cuda"), old])
        self.next += new
        return id_of(ids[torch.randperm(ids.numel(), device="cuda")])


def timed(call: Callable[[torch.Tensor], Any], stream: Stream, known: float, repeats: int) -> float:
    """Median milliseconds of one call."""
    times = []
    for _ in range(repeats + 1):
        batches = [stream.batch(known) for _ in range(CALLS)]
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for ids in batches:
            call(ids)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / CALLS)
    return statistics.median(times[1:])


def make(dim: int, max_rows: int, rows: int) -> tuple[Any, Stream]:
    """A table with this many rows, and the stream of ids that filled it."""
    table = shoal.HashTable(dim, optimizer="sgd", initializer="zeros", max_rows=max_rows, device="cuda")
    stream = Stream(rows)
    for ids in stream.fill():
        table.lookup(ids, insert_missing=True)
    return table, stream


def profile(name: str, call: Callable[[], Any]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    print(
        f"  {name}:", ", ".join(f"{row.key[:28]} {row.self_device_time_total:.0f} us" for row in rows[:9]), flush=True
    )


def run(dim: int, rows: int, repeats: int, profiled: bool) -> float:
    """Measures one dim; returns the rate of the call that HierarchicalKV names insert_and_evict."""
    half, half_stream = make(dim, rows, rows // 2)
    table, stream = make(dim, rows, rows)
    print(f"dim {dim}, {table.size():,} rows, {table.memory_bytes() / table.size():.1f} bytes per row", flush=True)
    values = torch.randn(N, dim, device="cuda")
    half_ms = timed(half.lookup, half_stream, 1.0, repeats)
    full_ms = timed(table.lookup, stream, 1.0, repeats)
    del half
    show(f"find, dim {dim}, half full", half_ms)
    show(f"find, dim {dim}, full", full_ms, of_half=round(half_ms / full_ms, 3))
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "assign, distinct ids": lambda ids: table.assign(ids, values, distinct=True),
        "assign": lambda ids: table.assign(ids, values),
        "find or insert": lambda ids: table.lookup(ids, insert_missing=True),
        "SGD step, distinct ids": lambda ids: table.apply_gradients(ids, values, distinct=True),
    }
    for name, call in calls.items():
        show(f"{name}, dim {dim}, full, 60 % known", timed(call, stream, 0.6, repeats))
    with table.collect_evicted(1 << 40) as evicted:
        ms = timed(calls["assign, distinct ids"], stream, 0.6, repeats)
        left = evicted.take()
    rate = show(f"assign, distinct ids, and what left, dim {dim}, full, 60 % known", ms, left=len(left.ids))
    stats = table.eviction_stats()
    print(f"  {stats}, size {table.size():,}", flush=True)
    assert table.size() == rows
    newest = id_of(torch.arange(stream.next - rows // 2, stream.next, device="cuda"))
    young = torch.isin(left.ids[:100_000].cuda(), newest).float().mean()
    print(f"  of those that left {100 * float(young):.2f} % are of the newest half", flush=True)
    if profiled:
        batch = stream.batch(0.6)
        profile("assign, distinct", lambda: table.assign(batch, values, distinct=True))
        batch = stream.batch(0.6)
        profile("find or insert", lambda: table.lookup(batch, insert_missing=True))
    return rate


def hkv(program: str, seconds: int) -> dict[int, float]:
    """HierarchicalKV's rates of insert_and_evict at load 1.00, by dim, as far as its benchmark ran."""
    command = ["timeout", str(seconds), "stdbuf", "-oL", program]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    print(text, flush=True)
    found: dict[int, float] = {}
    dim, column = 0, -1
    for line in text.splitlines():
        if seen := re.search(r"dim\D*(\d+)", line, re.I):
            dim = int(seen[1])
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if "insert_and_evict" in cells:
            column = cells.index("insert_and_evict")
        elif column > 0 and cells[0] == "1.00" and len(cells) > column:
            found.setdefault(dim, float(cells[column]))
    return found


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--rows", type=int, default=1 << 27)
    args.add_argument("--dims", default="8,32")
    args.add_argument("--repeats", type=int, default=7)
    args.add_argument("--profile", action="store_true")
    args.add_argument("--hkv", metavar="PROGRAM", help="HierarchicalKV's benchmark, to run after ours")
    args.add_argument("--hkv-seconds", type=int, default=100)
    args.add_argument("--json")
    given = args.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    ours = {int(dim): run(int(dim), given.rows, given.repeats, given.profile) for dim in given.dims.split(",")}
    if given.hkv:
        theirs = hkv(given.hkv, given.hkv_seconds)
        for dim, rate in theirs.items():
            if dim in ours:
                print(
                    f"insert and evict, dim {dim}: {ours[dim]:.2f} / {rate:.2f} G/s = {ours[dim] / rate:.2f}x (goal 2x)"
                )
    if given.json:
        with open(given.json, "w") as file:
            json.dump(RESULTS, file, indent=1)


if __name__ == "__main__":
    main()
