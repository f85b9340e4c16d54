"""GPU tables on one GPU: rates, share of the memory bandwidth, and goals.

    python -m benchmarks.gpu                      # everything
    python -m benchmarks.gpu find update --json out.json

Unless a row says otherwise, every call takes 1,048,576 uniformly random ids, and values are float32. Times are medians
of device events around series of calls with rotating inputs. The roof is the bandwidth of a device-to-device copy,
bytes read plus bytes written.
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
    """Median time of one call; calls are issued without waiting between them."""
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
    """Fills a table of this many slots with random ids, and returns them."""
    group = table._storage
    group.max_load = 0.999
    group._grow_index(0, slots // 8, empty=True)
    count = int(slots * load)
    ids = torch.randint(-(1 << 62), 1 << 62, (count,), device="cuda")
    group._grow_rows(count + (64 << 20) // table.dim_size)
    for begin in range(0, count, 1 << 23):
        group.insert(ids[begin : begin + (1 << 23)], 0, counts=[min(1 << 23, count - begin)])
    group.counts.look(wait=True)
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
            rows = table._storage.find(asked[0], 0, "rows")
            assert int(rows.min()) > 0
            del table, ids, asked, rows


def find_or_insert() -> None:
    """Lookups that insert rows: 60 % known ids, 40 % new ones."""
    for load, begin, goal in ((0.5, 0.47, 4.0), (0.95, 0.92, 2.5)):  # each call adds 0.3 % of the slots
        table = make(32, "sgd")
        ids = fill(table, begin)
        table._storage.max_load = 2.0  # otherwise it would grow
        calls, repeats = 6, 3
        table._storage._grow_rows(ids.numel() + (calls * repeats + 5) * N)
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
                rows = table._storage.insert(batch, 0, counts=[N])
                table._storage.arena.start_fresh(rows, batch, 1)
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
        table._storage.arena.start_fresh(table._storage.find(ids, 0, "rows"), ids, 1, every=True)
        ms = milliseconds(lambda i, t=table, s=sets, g=grads: t.apply_gradients(s[i % 4], g, i, distinct=True))
        # Bytes: gradient read, weights and states read and written, and the line of the index.
        needed = 4 * 64 * (1 + 2 * (1 + words)) + 72 + (16 if name == "adam" else 0)
        report(f"update, {name}, dim 64, distinct", ms=ms, bytes_per_id=needed, goal=">= 60 % of the roof")
        ms = milliseconds(
            lambda i, t=table, s=sets, g=grads: t.apply_gradients(s[i % 4], g, i, enable_dedup=True), 5, 4
        )
        report(f"update, {name}, dim 64, gradients of equal ids summed", ms=ms, bytes_per_id=needed)
        ms = milliseconds(lambda i, t=table, s=sets, g=grads: t.apply_gradients(s[i % 4], g, i), 5, 4)
        report(f"update, {name}, dim 64, a step for each occurrence", ms=ms, bytes_per_id=needed)
        del table, ids, sets, grads


def power_law(n: int, ids: int, alpha: float = 1.05) -> torch.Tensor:
    """Ids whose frequency falls with their rank to the power ``alpha``, scattered over int64."""
    gamma = 1 - alpha
    u = torch.rand(n, device="cuda", dtype=torch.float64)
    rank = ((ids**gamma - 1) * u + 1) ** (1 / gamma)
    return rank.long() * 0x9E3779B97F4A7C1


def training_tables(optimizer: Any, tables: int, dim: int) -> Any:
    from shoal.table import (
        CombineAsSegment,
        CuckooEmbeddingHashTableConfig,
        EmbeddingHashTableConfig,
        EntryConfig,
        HashTableConfigInstance,
        MultiHashTable,
        RandomUniformInitializer,
        reset_registry,
    )

    reset_registry()
    segment = CombineAsSegment(dim, RandomUniformInitializer(), optimizer, None)
    message = EmbeddingHashTableConfig(
        entry_config=EntryConfig(segments=[segment]), cuckoo=CuckooEmbeddingHashTableConfig()
    )
    configs = {f"t{i}": HashTableConfigInstance(message, [0.01]) for i in range(tables)}
    multi = MultiHashTable.from_configs(configs, device="cuda")
    for table in multi.tables.values():
        table.on_bad_gradient = "ignore"
    return multi


def train() -> None:
    """A step of ten tables: lookup, then gradients of equal ids summed and applied."""
    import shoal

    tables, dim, each = 10, 128, 104857
    n = tables * each
    sizes = torch.full((tables,), each, dtype=torch.int32)
    grads = torch.randn(n * dim, device="cuda")
    for optimizer, goal in ((shoal.Sgd(lr=0.01), 0.9), (shoal.Adam(lr=0.01), 1.1)):
        multi = training_tables(optimizer, tables, dim)
        batches = [torch.cat([power_law(each, 10_000_000) for _ in range(tables)]) for _ in range(4)]
        unique = statistics.mean(b.unique().numel() for b in batches) / n

        def step(i: int, multi: Any = multi, batches: list[torch.Tensor] = batches) -> None:
            ids = batches[i % 4]
            multi.fused_lookup(ids, sizes, 1)
            multi.fused_apply_gradient(ids, None, sizes, grads, None, None, 1, 0, 1, True)

        ms = milliseconds(step)
        what = f"training step, 10 tables, dim 128, {type(optimizer).__name__}"
        report(what, ms=ms, ids=n, goal=f"<= {goal} ms", distinct_share=round(unique, 3))
        ids = batches[0].clone()
        batches[0] = ids
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(0)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(0)

        def replay(i: int, graph: Any = graph, ids: Any = ids, batches: Any = batches) -> None:
            ids.copy_(batches[1 + i % 3])
            graph.replay()

        report(f"{what}, CUDA graph", ms=milliseconds(replay), ids=n, goal=f"<= {goal} ms")
        del multi, batches, graph


def cached() -> None:
    """A table in host memory with a tenth of its rows in GPU memory, against the host table alone."""
    import shoal
    from shoal.table.cuda.cache import CachedHashTable

    rows, dim = 10_000_000, 64
    below = shoal.HashTable(dim, optimizer=shoal.Adagrad(lr=0.01), on_bad_gradient="ignore")
    ids = (torch.arange(1, rows + 1, device="cuda") * 0x9E3779B97F4A7C1).cpu()
    for part in ids.split(1 << 20):
        below.lookup(part, insert_missing=True)
    batches = [power_law(N, rows) for _ in range(12)]
    grads = torch.randn(N, dim, device="cuda")

    def on_host(i: int) -> None:
        batch = batches[i % 12]
        home = batch.cpu()
        below.lookup(home).to("cuda")
        below.apply_gradients(home, grads.cpu(), i, enable_dedup=True)

    def wall(call: Callable[[int], None], rounds: int) -> float:
        for i in range(4):
            call(i)
        times = []
        for i in range(rounds):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call(4 + i)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(times)

    host_ms = wall(on_host, 5)
    report("a step of a host table of 10 M rows, dim 64, Adagrad (wall clock)", ms=host_ms)
    table = CachedHashTable(below, cache_rows=rows // 10)

    def on_cache(i: int) -> None:
        table.prefetch(batches[(i + 1) % 12])
        table.lookup(batches[i % 12])
        table.apply_gradients(batches[i % 12], grads, i, enable_dedup=True)

    ms = wall(on_cache, 8)
    before = table.fetched_rows
    on_cache(20)
    report("the same, a tenth of the rows cached on the GPU (wall clock)", ms=ms, goal=">= 5 times the host's rate",
           times=round(host_ms / ms, 2), rows_fetched=table.fetched_rows - before)  # fmt: skip
    table.close()


def groups() -> None:
    """Complete steps through a group of tables, against `nn.EmbeddingBag`."""
    from benchmarks.gpu_groups import groups as measured

    ROWS.extend(measured())


BENCHMARKS: dict[str, Callable[[], None]] = {
    "groups": groups,
    "find": find,
    "find_or_insert": find_or_insert,
    "insert": insert,
    "update": update,
    "train": train,
    "cached": cached,
}


def main(argv: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"which of {', '.join(BENCHMARKS)}; all by default")
    parser.add_argument("--json", metavar="FILE", help="write the results to this file")
    args = parser.parse_args(None if argv is None else list(argv))
    unknown = set(args.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    if not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA GPU, but torch finds none; nothing was measured")
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
