"""Distribution ops against the same work composed of torch ops, and against FBGEMM if it has the op.

    python -m benchmarks.ops                    # everything, at full size
    python -m benchmarks.ops -k layout --json out.json
    python -m benchmarks.ops -k lookup --profile traces     # also a trace of one call of each, for chrome://tracing

Ours and the rival take turns in one process. Printed are the fastest of nine runs, because other work on the machine
only adds to a time, the ratio rival / ours (larger is better; the JSON also has the ratio of medians), and the gain
from a second thread.
"""

import argparse
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import shoal
from shoal import Ragged, ops
from shoal.ops.layout import reference as layout_reference
from shoal.ops.layout.op import _arguments, _requests
from shoal.ops.layout.plan import plan_of
from shoal.ops.reorder.reference import fused_reorder_by_indices as reorder_composed
from shoal.ops.unique import reference as unique_reference

try:
    import fbgemm_gpu  # registers torch.ops.fbgemm
except ImportError:
    fbgemm_gpu = None


@dataclass
class Row:
    """One comparison, with times in milliseconds."""

    name: str
    rival: str
    ours_ms: float
    rival_ms: float
    ratio: float
    """Rival over ours, by the fastest run of each."""
    median_ratio: float
    target: float
    threads_ratio: float | None = None
    """Our time with one thread over our time with all."""


ROWS: list[Row] = []
REPEATS = 9
TRACES: list[str] = []
"""The folder for traces, if ``--profile`` names one."""


def seconds(f: Callable[[], Any]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def compare(
    name: str, ours: Callable[[], Any], rivals: dict[str, Callable[[], Any]], target: float, *, scale: bool = True
) -> None:
    """Times ours and each rival in turn; the fastest rival counts."""
    threads = shoal.num_threads()
    for f in (ours, *rivals.values()):
        f()
    mine: list[float] = []
    alone: list[float] = []
    theirs: dict[str, list[float]] = {rival: [] for rival in rivals}
    for _ in range(REPEATS):
        mine.append(seconds(ours))
        for rival, f in rivals.items():
            theirs[rival].append(seconds(f))
        if scale and threads > 1:
            shoal.set_num_threads(1)
            alone.append(seconds(ours))
            shoal.set_num_threads(threads)
    best = min(rivals, key=lambda rival: min(theirs[rival]))
    ours_ms, rival_ms = min(mine) * 1e3, min(theirs[best]) * 1e3
    speedup = min(alone) / min(mine) if alone else None
    middle = statistics.median(theirs[best]) / statistics.median(mine)
    row = Row(name, best, ours_ms, rival_ms, rival_ms / ours_ms, middle, target, speedup)
    ROWS.append(row)
    trace(name, ours)
    mark = "ok  " if row.ratio >= target else "MISS"
    more = f"   1 -> {threads} threads {speedup:4.2f}x" if speedup else ""
    print(
        f"{mark} {name:52s} {ours_ms:9.3f} ms   {best:28s} {rival_ms:9.3f} ms   {row.ratio:6.2f}x (>= {target}){more}"
    )


def trace(name: str, f: Callable[[], Any]) -> None:
    """Writes a profiler trace of one call, which is not timed."""
    if TRACES:
        profile = torch.profiler.profile(record_shapes=True, acc_events=True)
        with profile as profiler, torch.profiler.record_function(name):
            f()
        file = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json"
        profiler.export_chrome_trace(os.path.join(TRACES[0], file))


def reorder() -> None:
    generator = torch.Generator().manual_seed(0)
    distinct = torch.randint(-(2**63), 2**63 - 1, (1_000_000,), generator=generator)
    cuts = torch.randint(0, 1_000_000, (29,), generator=generator).sort().values
    parts = distinct.tensor_split(cuts)
    doubled = [torch.cat([p, p])[torch.randperm(2 * len(p), generator=generator)] for p in parts]
    many = [torch.randint(0, 2**31, (10_240,), generator=generator) for _ in range(128)]
    cases = (
        ("30 tables, 2e6 ids, 256 shards", doubled, [p.unique() for p in parts], 256),
        ("128 tables x 10240, 8 shards", many, [ids.unique() for ids in many], 8),
    )
    for name, inputs, unique, shards in cases:
        dims = [16] * len(inputs)
        rivals: dict[str, Callable[[], Any]] = {
            "unique + stable sort": lambda i=inputs, s=shards, d=dims: reorder_composed(i, s, d, 1)
        }
        compare(
            f"fused_reorder_by_indices, {name}",
            lambda i=inputs, s=shards, d=dims: ops.fused_reorder_by_indices(i, s, d),
            rivals,
            5,
        )
        if fbgemm_gpu:
            flat = torch.cat(unique)
            lengths = torch.tensor([len(u) for u in unique])
            # Each block is the range of ids divided by the number of shards, as in FBGEMM's row-wise sharding.
            blocks = torch.full((len(inputs),), 2**62 // shards)
            compare(
                f"fused_reorder_by_indices, {name}",
                lambda i=inputs, s=shards, d=dims: ops.fused_reorder_by_indices(i, s, d),
                {
                    "fbgemm bucketize, distinct ids": lambda le=lengths, f=flat, b=blocks, s=shards: (
                        torch.ops.fbgemm.block_bucketize_sparse_features(le, f, False, True, b, s, None)
                    )
                },
                0.7,
                scale=False,
            )


def lookup() -> None:
    table = torch.arange(16.0).repeat(1_000_000, 1)
    every = torch.arange(1_000_000)
    ids = ops.split_by_indices(every % 10, every, 10)
    rows = ops.split_by_indices(every % 10, table, 10)

    def composed(lists: list[torch.Tensor], embeddings: list[torch.Tensor], wanted: torch.Tensor) -> torch.Tensor:
        known, order = torch.cat(lists).sort()
        return torch.cat(embeddings).index_select(0, order[torch.searchsorted(known, wanted.flatten())])

    for multi in (True, False):
        assert torch.equal(ops.map_id_to_embedding(ids, rows, every, use_multi_threads=multi), table)
        compare(
            f"map_id_to_embedding, 1e6 x 16, 10 shards{'' if multi else ', single-threaded'}",
            lambda m=multi: ops.map_id_to_embedding(ids, rows, every, use_multi_threads=m),
            {"sort + searchsorted": lambda: composed(ids, rows, every)},
            5 if multi else 3,
            scale=multi,
        )
    spread = [i * 0x9E3779B97F4A7C15 % 2**63 for i in ids]
    wanted = torch.cat(spread)[torch.randperm(1_000_000)]
    compare(
        "map_id_to_embedding, the same with spread ids, shuffled",
        lambda: ops.map_id_to_embedding(spread, rows, wanted),
        {"sort + searchsorted": lambda: composed(spread, rows, wanted)},
        5,
    )
    for dim, columns in ((32, 4), (256, 2)):
        known = torch.arange(100_000)
        embeddings = torch.randn(100_000, dim)
        wanted = (known[:, None] + torch.arange(columns)) % 100_000
        for multi in (True, False):
            compare(
                f"gather_embeddings_by_input, dim {dim}, {'multi' if multi else 'single'}-threaded",
                lambda e=embeddings, w=wanted, k=known, m=multi: ops.gather_embeddings_by_input(k, e, w, m),
                {"sort + searchsorted": lambda e=embeddings, w=wanted, k=known: composed([k], [e], w)},
                3,
                scale=multi,
            )


def fused_gather() -> None:
    buffer = torch.randn(3 * 12345 + 2 * 9159)
    first = (torch.arange(12345) * 3).repeat(6).int()
    second = (3 * 12345 + torch.arange(9159) * 2).repeat(9)[:82_439].int()
    heads = [buffer[: 3 * 12345].view(-1, 3), buffer[3 * 12345 :].view(-1, 2)]
    rows = [(first // 3).long(), ((second - 3 * 12345) // 2).long()]
    compare(
        "fused_gather_embeddings_by_input, 74070 x 3, 82439 x 2",
        lambda: ops.fused_gather_embeddings_by_input(buffer, [first, second], [3, 2]),
        {"index_select": lambda: [h.index_select(0, r) for h, r in zip(heads, rows, strict=True)]},
        1,
        scale=False,
    )
    wide = torch.randn(100_000 * 16)
    many = (torch.randint(0, 100_000, (1_000_000,)) * 16).int()
    index = (many // 16).long()
    compare(
        "fused_gather_embeddings_by_input, 1e6 x 16",
        lambda: ops.fused_gather_embeddings_by_input(wide, [many], [16]),
        {"index_select": lambda: wide.view(-1, 16).index_select(0, index)},
        1,
    )
    # Two tables, four rows of 3 floats and five of 2, each hit 888 x 13 times.
    rows = [torch.randint(0, 4, (888 * 13,)), torch.randint(0, 5, (888 * 13,))]
    offsets = [(rows[0] * 3).int(), (12 + rows[1] * 2).int()]
    grads = [torch.randn(888 * 13, 3), torch.randn(888 * 13, 2)]

    def per_table() -> torch.Tensor:
        out = torch.zeros(22)
        out[:12].view(4, 3).index_add_(0, rows[0], grads[0])
        out[12:].view(5, 2).index_add_(0, rows[1], grads[1])
        return out

    def flat() -> torch.Tensor:
        places = [(o.long()[:, None] + torch.arange(d)).flatten() for o, d in zip(offsets, (3, 2), strict=True)]
        return torch.zeros(22).index_add_(0, torch.cat(places), torch.cat([g.flatten() for g in grads]))

    ours = ops.fused_gather_embeddings_by_input_gradient(22, grads, offsets, [3, 2])
    torch.testing.assert_close(ours, per_table(), rtol=8.88e-5, atol=1e-3)
    compare(
        "fused gather gradient, 888 x 13 rows into 22 floats",
        lambda: ops.fused_gather_embeddings_by_input_gradient(22, grads, offsets, [3, 2]),
        {"index_add_ per table": per_table, "flat index_add_": flat},
        2,
        scale=False,
    )
    rows_grad = torch.randn(1_000_000, 16)
    few = (torch.randint(0, 1000, (1_000_000,)) * 16).int()
    few_index = (few // 16).long()
    compare(
        "fused gather gradient, 1e6 x 16 into 1000 rows",
        lambda: ops.fused_gather_embeddings_by_input_gradient(16_000, [rows_grad], [few], [16]),
        {"index_add_": lambda: torch.zeros(1000, 16).index_add_(0, few_index, rows_grad)},
        2,
    )


def reductions() -> None:
    for dim in (8, 32, 64, 256):
        n = 8_000_000 // dim
        rows = n // 8
        values = torch.randn(n, dim)
        is_sorted = torch.randint(0, rows, (n,)).sort().values
        for kind, index in (("sorted", is_sorted), ("shuffled", is_sorted[torch.randperm(n)])):
            rivals: dict[str, Callable[[], Any]] = {
                "index_add_": lambda i=index, r=rows, v=values: torch.zeros(r, v.shape[1]).index_add_(0, i, v)
            }
            if kind == "sorted":
                lengths = torch.bincount(index, minlength=rows)
                splits = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
                rivals["segment_reduce"] = lambda v=values, le=lengths: torch.segment_reduce(v, "sum", lengths=le)
                compare(
                    f"fused_reduce_and_split_gpu, dim {dim}",
                    lambda s=splits, v=values: ops.fused_reduce_and_split_gpu([s], [v], [[v.shape[1]]]),
                    {"segment_reduce": rivals["segment_reduce"]},
                    1,
                )
            compare(
                f"reduce_sum, {kind}, dim {dim}",
                lambda i=index, r=rows, v=values: ops.reduce_sum(i[:, None], v, r),
                rivals,
                1,
            )
            if kind == "sorted":
                compare(
                    f"reduce_mean, sorted, dim {dim}",
                    lambda i=index, r=rows, v=values: ops.reduce_mean(i[:, None], v, r),
                    {"segment_reduce": lambda v=values, le=lengths: torch.segment_reduce(v, "mean", lengths=le)},
                    1,
                )
    if fbgemm_gpu:
        values = torch.randn(4_000_000)
        splits = torch.arange(0, 4_000_001, 8)
        compare(
            "segment sum of scalars, 4e6 in 5e5",
            lambda: ops.fused_reduce_and_split_gpu([splits], [values[:, None]], [[1]]),
            {"fbgemm segment_sum_csr": lambda: torch.ops.fbgemm.segment_sum_csr(1, splits, values)},
            1,
        )
    lengths = [torch.randperm(256) for _ in range(102)]
    splits = [torch.cat([torch.zeros(1, dtype=torch.int64), le.cumsum(0)]) for le in lengths]
    tables = [torch.ones(32_640, w) for w in range(1, 204, 2)]
    cuts = [[1] * w if w < 4 else [w // 4] * 3 + [w - 3 * (w // 4)] for w in range(1, 204, 2)]
    ids = [torch.arange(256).repeat_interleave(le) for le in lengths]

    def scatter() -> list[torch.Tensor]:
        sums = [torch.zeros(256, t.shape[1]).index_add_(0, i, t) for i, t in zip(ids, tables, strict=True)]
        return [part for s, c in zip(sums, cuts, strict=True) for part in s.split(c, 1)]

    got = ops.fused_reduce_and_split_gpu(splits, tables, cuts)
    assert all(torch.equal(a, b) for a, b in zip(got, scatter(), strict=True))
    compare(
        "fused_reduce_and_split_gpu, 102 tables",
        lambda: ops.fused_reduce_and_split_gpu(splits, tables, cuts),
        {"index_add_ + split": scatter},
        1,
    )


def unique() -> None:
    key = Ragged.from_row_lengths(torch.randint(0, 500_000, (1_000_000,)), [100_000] * 10)
    dims = [16] * 10

    def ours() -> torch.Tensor:
        distinct, offset, buffer = ops.unique_key_with_value_and_offset(key, dims)
        _, pos = ops.ragged_split_by_indices(distinct.values % 10, distinct, 10)
        handles = [ops.fill_with_offset_map(p, v, offset, buffer, dims) for p, v in zip(pos, values, strict=True)]
        return ops.finalize_shared_tensor(handles, torch.float32, [None])

    def composed() -> torch.Tensor:
        ids, _, offset_splits, offsets, buffer = unique_reference.unique_key_with_value_and_offset(
            key.values, key.row_splits, dims, True
        )
        shard = ids % 10
        out = buffer.view(-1, 16)
        for s in range(10):
            mine = (shard == s).nonzero().flatten()
            repeats = offset_splits.diff()[mine]
            element = torch.arange(len(mine)).repeat_interleave(repeats)
            nth = torch.arange(len(element)) - (repeats.cumsum(0) - repeats)[element]
            places = offsets[offset_splits[mine][element] + nth] // 16
            out[places] = values[s].view(-1, 16)[element]
        return buffer

    distinct = ops.unique_key_with_value_and_offset(key, dims, False).unique_key
    values = [torch.randn(int((distinct.values % 10 == s).sum()) * 16) for s in range(10)]
    assert torch.equal(ours(), composed())
    compare("unique_key + fill + finalize, 1e6 keys, 10 shards", ours, {"torch ops": composed}, 4)


def layout_case(features: int, shards: int, sliding: bool) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    kinds = [([1, 4, 8], 0, 0), ([1, 4, 16], 1, 0), ([1, 4, 16], 3, 3)]
    names = [f"f{i:03d}" for i in range(features)]
    kind = {n: kinds[i % 3] for i, n in enumerate(names)}
    config = ops.FeatureConfigs(
        {n: ops.FeatureConfig(f"t{i % 2}", kind[n][1], kind[n][0], kind[n][2]) for i, n in enumerate(names)}, {}
    )
    pooled = [n for n in names if kind[n][1] != 3]
    sums, means, firsts = ([n for n in names if kind[n][1] == k] for k in (0, 1, 3))

    def out(chosen: list[str], start: int, end: int, out_type: int, shape: list[list[int]]) -> ops.OutConfig:
        return ops.OutConfig([ops.SliceConfig(n, start, end) for n in chosen], out_type, shape)

    config.out_configs = {
        "addn": out(pooled, 0, 1, 2, [[-1, 1]]),
        "concat": out(pooled, 1, 5, 0, [[-1, 4 * len(pooled)]]),
        "stack": out(sums, 5, 13, 1, [[-1, len(sums), 8]]),
        "none": out(means, 5, 21, 3, [[-1, 16]] * len(means)),
        "sequence": out(firsts, 1, 21, 3, [[-1, 3, 20]] * len(firsts)),
    }
    batch: dict[str, Any] = {}
    for i, n in enumerate(names):
        if sliding:
            count = 257 + i % 10
            fids = torch.randperm(10**6, generator=generator)[:count]
            batch[n] = Ragged.from_lists([fids[b : b + count - 256].tolist() for b in range(256)])
        elif i % 2 == 0:
            batch[n] = torch.randint(
                0, 10**6, (int(torch.randint(1, 7, (1,), generator=generator)),), generator=generator
            )
        else:
            lengths = torch.randint(1, 7, (256,), generator=generator)
            batch[n] = Ragged.from_row_lengths(
                torch.randint(0, 10**6, (int(lengths.sum()),), generator=generator), lengths
            )
    sharded = ops.sharding_sparse_fids(batch, shards, config, True, "example_batch")
    embeddings = [torch.randn(int(n), requires_grad=sliding) for n in sharded.emb_size]
    return config, sharded, embeddings, shards


def layout() -> None:
    for name, features, shards, sliding in (("forward", 199, 5, False), ("backward", 29, 3, True)):
        config, sharded, embeddings, ps = layout_case(features, shards, sliding)

        def ours(
            e: list[torch.Tensor] = embeddings, s: Any = sharded, c: Any = config, p: int = ps
        ) -> list[torch.Tensor]:
            return ops.fused_embedding_to_layout(
                e, None, s.fid_offset, s.feature_offset, s.nfl_offset, s.batch_size, "example_batch", c, p
            )

        args = _arguments(
            "bench", embeddings, None, sharded.fid_offset, sharded.feature_offset, sharded.nfl_offset,
            sharded.batch_size, "example_batch", config, ps, None, (None,) * 4, 3,
        )  # fmt: skip
        plan = plan_of(config)
        requests = _requests(plan, args)

        def composed(a: Any = args, pl: Any = plan, r: Any = requests) -> list[torch.Tensor]:
            return layout_reference.embedding_to_layout(pl, r, a[0], a[1], a[2], a[3])

        mine, theirs = ours(), composed()
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        if not sliding:
            compare(f"layout {name}, {features} features", ours, {"torch ops": composed}, 5)
            continue
        upstream = [torch.ones_like(o) for o in mine]

        def grad(outs: list[torch.Tensor], e: Any = embeddings, u: Any = upstream) -> Any:
            return torch.autograd.grad(outs, e, u, retain_graph=True)

        compare(
            f"layout {name}, {features} features",
            lambda g=grad, o=mine: g(o),
            {"autograd of torch ops": lambda g=grad, o=theirs: g(o)},
            5,
        )


def small() -> None:
    """An op on ten elements, from Python, in microseconds."""
    index, values, length = torch.randint(0, 3, (10, 1)), torch.randn(10, 4), torch.tensor([3])
    ids, ragged = torch.arange(10), Ragged.from_row_lengths(torch.arange(10), [5, 5])
    offsets = torch.zeros(10, dtype=torch.int32)
    config = ops.FeatureConfigs(
        {"f": ops.FeatureConfig("t", 0, [4])}, {"o": ops.OutConfig([ops.SliceConfig("f", 0, 4)], 0, [[-1, 4]])}
    )
    sharded = ops.sharding_sparse_fids({"f": [[i] for i in range(10)]}, 1, config, True, "example")
    calls: dict[str, Callable[[], Any]] = {
        "split_by_indices": lambda: ops.split_by_indices(index[:, 0], values, 3),
        "ragged_split_by_indices": lambda: ops.ragged_split_by_indices(index[:, 0], ragged, 3),
        "reorder_by_indices": lambda: ops.reorder_by_indices(ids, index[:, 0], 3),
        "fused_reorder_by_indices": lambda: ops.fused_reorder_by_indices([ids, ids], 3, [4, 4]),
        "unique_key_with_value_and_offset": lambda: ops.unique_key_with_value_and_offset(ragged, [1, 2]),
        "map_id_to_embedding": lambda: ops.map_id_to_embedding([ids], [values], ids),
        "gather_embeddings_by_input": lambda: ops.gather_embeddings_by_input(ids, values, ids),
        "fused_gather_embeddings_by_input": lambda: ops.fused_gather_embeddings_by_input(values, [offsets], [4]),
        "reduce_sum": lambda: ops.reduce_sum(index, values, length),
        "fused_reduce_and_split_gpu": lambda: ops.fused_reduce_and_split_gpu([ragged.row_splits], [values], [[2, 2]]),
        "normalize_merged_split": lambda: ops.normalize_merged_split(ragged.row_splits, [3]),
        "fused_embedding_to_layout": lambda: ops.fused_embedding_to_layout(
            [values], None, sharded.fid_offset, sharded.feature_offset, sharded.nfl_offset, 10, "example", config, 1
        ),
    }
    for name, call in calls.items():
        best = min(statistics.median(seconds(call) for _ in range(200)) for _ in range(5)) * 1e3
        ROWS.append(Row(f"{name}, 10 elements", "30 us", best, 0.03, 0.03 / best, 0.03 / best, 1))
        print(f"{'ok  ' if best <= 0.03 else 'MISS'} {name + ', 10 elements':52s} {best * 1e3:9.1f} us")


BENCHMARKS = {f.__name__: f for f in (reorder, lookup, fused_gather, reductions, unique, layout, small)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops", description=__doc__.splitlines()[0])
    parser.add_argument("-k", default="", help=f"run only those whose name contains this: {', '.join(BENCHMARKS)}")
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--profile", metavar="DIR", help="also write a trace of one call of each to this folder")
    options = parser.parse_args(argv)
    if options.profile:
        os.makedirs(options.profile, exist_ok=True)
        TRACES[:] = [options.profile]
    machine = {
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "threads": shoal.num_threads(),
        "fbgemm": getattr(fbgemm_gpu, "__version__", "not installed") if fbgemm_gpu else "not installed",
    }
    print(", ".join(f"{k} {v}" for k, v in machine.items()))
    for name, run in BENCHMARKS.items():
        if options.k in name:
            run()
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine, "rows": [asdict(row) for row in ROWS]}, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
