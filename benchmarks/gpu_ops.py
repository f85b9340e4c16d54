"""The ops on a GPU, against the same work composed of torch ops, and against the copy bandwidth of the GPU.

    python -m benchmarks.gpu_ops                    # everything
    python -m benchmarks.gpu_ops -k layout --json out.json

Unless a row says otherwise, there are 1,048,576 ids or rows. Inputs rotate among eight sets, more than fit into the
cache. Times are medians by device events around one call on an idle GPU, including the host's work and all waits.
``roof`` is the share of the bandwidth of a large copy, counting only the bytes that the op must read and write: each
input once, each output once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Report, median, parser
from benchmarks.ops import layout_case
from shoal import Ragged, ops
from shoal.gather.payload.codec import unpack12, unpack12_reference
from shoal.ops.layout import reference as layout_reference
from shoal.ops.layout.op import _arguments, _requests
from shoal.ops.layout.plan import plan_of
from shoal.ops.reorder import reference as reorder_reference
from shoal.train.aggregation.compression import topk_indices, topk_indices_reference

N = 1 << 20
SETS = 8
DEVICE = "cuda"


class Bench:
    """Times calls and adds rows to a report."""

    def __init__(self, report: Report, repeats: int) -> None:
        self.report, self.repeats = report, repeats
        source = torch.randn(1 << 28, device=DEVICE)
        target = torch.empty_like(source)
        self.roof = 2 * source.numel() * 4 / self.ms(lambda i: target.copy_(source))
        report.add("copy of 1 GiB", f"{self.roof / 1e9:.2f} TB/s")

    def ms(self, call: Callable[[int], Any]) -> float:
        """Median milliseconds of ``call(i)``; ``i`` counts up, so that inputs rotate."""
        for i in range(10):
            call(i)
        times = []
        for i in range(self.repeats):
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call(i)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return median(times)

    def add(
        self, what: str, ours: Callable[[int], Any], rival: Callable[[int], Any] | None = None, *, count: int = N,
        unit: str = "G ids/s", bytes_: float = 0, goal: float | None = None, ratio: float | None = None,
    ) -> None:  # fmt: skip
        """Adds a row. ``goal`` is in ``unit``; ``ratio`` is the smallest acceptable ratio to the rival."""
        mine = self.ms(ours)
        theirs = None if rival is None else self.ms(rival)
        rate = count / mine / 1e6
        share = f", {bytes_ / mine / self.roof:.0%} roof" if bytes_ else ""
        text = f"{mine * 1e3:.0f} us, {rate:.2f} {unit}{share}" if unit else f"{mine * 1e3:.0f} us{share}"
        if goal is not None:
            self.report.add(what, text, f">= {goal:g} {unit}", rate / goal, 1)
            if theirs is not None:
                self.report.add(f"  rival of {what}", "", f"{theirs * 1e3:.0f} us", theirs / mine)
        else:
            self.report.add(
                what, text, "" if theirs is None else f"{theirs * 1e3:.0f} us",
                None if theirs is None else theirs / mine, ratio,
            )  # fmt: skip


def sets(make: Callable[[], Any]) -> Callable[[int], Any]:
    """Makes eight inputs; the result maps ``i`` to one of them."""
    made = [make() for _ in range(SETS)]
    return lambda i: made[i % SETS]


def uniform() -> Tensor:
    return torch.randint(0, 1 << 40, (N,), device=DEVICE)


def skewed() -> Tensor:
    """Log-uniform ids: a heavy head and a long tail, about one in three distinct."""
    return torch.exp(torch.rand(N, device=DEVICE, dtype=torch.float64) * 16).long()


def dedup(bench: Bench) -> None:
    from shoal.ops.cuda.dedup import unique_ids

    for name, make in (("uniform", uniform), ("skewed", skewed)):
        ids = sets(make)
        bench.add(
            f"de-duplicate, {name}", lambda i, ids=ids: unique_ids(ids(i)),
            lambda i, ids=ids: torch.unique(ids(i), return_inverse=True), bytes_=24 * N, goal=6,
        )  # fmt: skip


def reorder(bench: Bench) -> None:
    for name, make in (("uniform", uniform), ("skewed", skewed)):
        ids = sets(make)
        bench.add(
            f"fused_reorder_by_indices, 8 shards, {name}", lambda i, ids=ids: ops.fused_reorder_by_indices([ids(i)],
            8, [16]),
            lambda i, ids=ids: reorder_reference.fused_reorder_by_indices([ids(i)], 8, [16], 1), bytes_=20 * N, goal=4,
        )  # fmt: skip
    tables = sets(lambda: list(uniform().split(N // 32)))
    dims = [16] * 32
    bench.add(
        "fused_reorder_by_indices, 32 tables, 8 shards", lambda i: ops.fused_reorder_by_indices(tables(i), 8, dims),
        lambda i: reorder_reference.fused_reorder_by_indices(tables(i), 8, dims, 1), bytes_=20 * N,
    )  # fmt: skip
    ids = sets(uniform)
    shard = torch.randint(0, 8, (N,), device=DEVICE)
    bench.add(
        "reorder_by_indices, 8 shards", lambda i: ops.reorder_by_indices(ids(i), shard, 8),
        lambda i: reorder_reference.reorder_by_indices(ids(i), shard, 8), bytes_=24 * N,
    )  # fmt: skip


def split(bench: Bench) -> None:
    index = sets(lambda: torch.randint(0, 8, (N,), device=DEVICE))
    rows = torch.randn(N, 32, device=DEVICE)

    def composed(i: int) -> Sequence[Tensor]:
        counts = torch.bincount(index(i), minlength=8)
        return rows[index(i).argsort(stable=True)].split(counts.tolist())

    bench.add(
        "split_by_indices, dim 32, 8 parts", lambda i: ops.split_by_indices(index(i), rows, 8), composed,
        bytes_=N * (8 + 256), unit="G rows/s",
    )  # fmt: skip
    ragged = Ragged.from_row_lengths(uniform(), torch.full((N // 8,), 8))
    ragged = Ragged(ragged.values, ragged.row_splits.to(DEVICE))

    def per_part(i: int) -> list[Any]:
        outs = []
        for s in range(8):
            mine = index(i) == s
            before = torch.nn.functional.pad(mine.long().cumsum(0), (1, 0))
            outs.append((ragged.tensor[mine], mine.nonzero().flatten(), before[ragged.row_splits]))
        return outs

    bench.add(
        "ragged_split_by_indices, 8 parts", lambda i: ops.ragged_split_by_indices(index(i), ragged, 8), per_part,
        bytes_=N * 32 + N // 8 * 72,
    )  # fmt: skip


def lookup(bench: Bench) -> None:
    table = torch.arange(N, device=DEVICE) * 7919
    rows = torch.randn(N, 32, device=DEVICE)
    wanted = sets(lambda: table[torch.randint(0, N, (N,), device=DEVICE)])

    def composed(i: int) -> Tensor:
        ordered, order = table.sort()
        return rows[order[torch.searchsorted(ordered, wanted(i))]]

    bench.add(
        "gather_embeddings_by_input, dim 32", lambda i: ops.gather_embeddings_by_input(table, rows, wanted(i)),
        composed,
        bytes_=N * (24 + 256),
    )  # fmt: skip


def gather(bench: Bench) -> None:
    dim = 64
    rows = torch.randn(N, dim, device=DEVICE)
    places = sets(lambda: torch.randint(0, N, (N,), device=DEVICE))
    offsets = sets(lambda: (torch.randint(0, N, (N,), device=DEVICE) * dim).int())
    bench.add(
        "fused_gather, dim 64 (rival: index_select)", lambda i: ops.fused_gather_embeddings_by_input(rows,
        [offsets(i)], [dim]),
        lambda i: rows.index_select(0, places(i)), bytes_=N * (4 + 8 * dim), unit="G rows/s",
    )  # fmt: skip
    grads = torch.randn(N, dim, device=DEVICE)
    bench.add(
        "its gradient (rival: index_add)",
        lambda i: ops.fused_gather_embeddings_by_input_gradient(N * dim, [grads], [offsets(i)], [dim]),
        lambda i: torch.zeros_like(rows).index_add_(0, places(i), grads), bytes_=N * (4 + 8 * dim), unit="G rows/s",
    )  # fmt: skip


def reductions(bench: Bench) -> None:
    dim, bags = 64, N // 8
    rows = sets(lambda: torch.randn(N, dim, device=DEVICE))
    index = torch.arange(N, device=DEVICE) // 8
    for name, f in (
        ("reduce_sum", ops.reduce_sum),
        ("reduce_mean", ops.reduce_mean),
        ("reduce_sqrtn", ops.reduce_sqrtn),
    ):
        bench.add(
            f"{name}, dim 64, bags of 8 (rival: index_add)", lambda i, f=f: f(index[:, None], rows(i), [bags]),
            lambda i: rows(i).new_zeros(bags, dim).index_add_(0, index, rows(i)), bytes_=N * (8 + 4.5 * dim),
            unit="G rows/s",
        )  # fmt: skip
    shape = [bags, dim]
    bench.add(
        "fused_sorted_segment_sum, dim 64 (rival: segment_reduce)",
        lambda i: ops.fused_sorted_segment_sum([index], [rows(i)], [shape]),
        lambda i: torch.segment_reduce(rows(i), "sum", lengths=torch.full((bags,), 8, device=DEVICE)),
        bytes_=N * (8 + 4.5 * dim), unit="G rows/s",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    widths = list(range(1, 204, 2))
    splits, tables = [], []
    for width in widths:
        lengths = torch.randperm(256, generator=generator)
        splits.append(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(DEVICE))
        tables.append(torch.randn(int(lengths.sum()), width, device=DEVICE))
    cuts = [[1] * w if w < 4 else [w // 4] * 3 + [w - w // 4 * 3] for w in widths]

    def composed(i: int) -> list[Tensor]:
        outs: list[Tensor] = []
        for row_splits, table, cut in zip(splits, tables, cuts, strict=True):
            ids = torch.arange(256, device=DEVICE).repeat_interleave(row_splits.diff(), output_size=table.shape[0])
            outs += table.new_zeros(256, table.shape[1]).index_add_(0, ids, table).split(cut, 1)
        return outs

    floats = sum(t.numel() for t in tables)
    bench.add(
        "fused_reduce_and_split_gpu, 102 tables", lambda i: ops.fused_reduce_and_split_gpu(splits, tables, cuts),
        composed, count=floats, unit="G floats/s", bytes_=floats * 4,
    )  # fmt: skip


def unique(bench: Bench) -> None:
    key = sets(lambda: Ragged.trusted(skewed(), torch.arange(0, N + 1, N // 8, device=DEVICE)))
    dims = [16] * 8
    bench.add("unique_key_with_value_and_offset, 8 rows", lambda i: ops.unique_key_with_value_and_offset(key(i), dims))
    made = [ops.unique_key_with_value_and_offset(key(i), dims) for i in range(SETS)]
    pos = [
        Ragged.trusted(torch.arange(u.unique_key.values.shape[0], device=DEVICE), u.unique_key.row_splits) for u in made
    ]
    values = [torch.randn(p.values.shape[0] * 16, device=DEVICE) for p in pos]
    bench.add(
        "fill_with_offset_map, dim 16",
        lambda i: ops.fill_with_offset_map(
            pos[i % SETS], values[i % SETS], made[i % SETS].value_offset, made[i % SETS].value_buffer, dims
        ),
        bytes_=N * (16 * 4 + 8), unit="G rows/s",
    )  # fmt: skip
    grad = torch.randn(N * 16, device=DEVICE)
    bench.add(
        "fill_with_offset_map_gradient, dim 16",
        lambda i: ops.fill_with_offset_map_gradient(pos[i % SETS], grad, made[i % SETS].value_offset, dims),
        bytes_=N * (16 * 4 + 8), unit="G rows/s",
    )  # fmt: skip


def layout(bench: Bench) -> None:
    for features, shards, sliding in ((199, 5, False), (29, 3, True)):
        config, sharded, embeddings, ps = layout_case(features, shards, sliding)
        embeddings = [e.detach().to(DEVICE).requires_grad_(sliding) for e in embeddings]
        offsets = [t.to(DEVICE) for t in (sharded.fid_offset, sharded.feature_offset, sharded.nfl_offset)]
        args = _arguments(
            "benchmark", embeddings, None, *offsets, 256, "example_batch", config, ps, None, (None,) * 4, 3
        )
        plan = plan_of(config)
        requests = _requests(plan, args)

        def ours(i: int, e: Any = embeddings, o: Any = offsets, c: Any = config, p: int = ps) -> list[Tensor]:
            return ops.fused_embedding_to_layout(e, None, *o, 256, "example_batch", c, p)

        def composed(i: int, a: Any = args, pl: Any = plan, r: Any = requests) -> list[Tensor]:
            return layout_reference.embedding_to_layout(pl, r, a[0], a[1], a[2], a[3])

        floats = sum(o.numel() for o in ours(0))
        if not sliding:
            bench.add(f"layout forward, {features} features", ours, composed, unit="", bytes_=floats * 4, ratio=10)
            continue
        grads = [torch.randn_like(o) for o in ours(0)]
        theirs = composed(0)

        def backward(
            i: int, e: Any = embeddings, o: Any = offsets, c: Any = config, p: int = ps, g: Any = grads
        ) -> Any:
            return ops.fused_embedding_to_layout_grad(o[2], o[1], o[0], 256, e, None, g, "example_batch", c, p)

        def autograd(i: int, e: Any = embeddings, t: Any = theirs, g: Any = grads) -> Any:
            return torch.autograd.grad(t, e, g, retain_graph=True)

        bench.add(f"layout backward, {features} features", backward, autograd, unit="", bytes_=floats * 4, ratio=10)


def aligned(bench: Bench) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [
        torch.randint(1, 51, (int(torch.randint(1, 5, (1,), generator=generator)),), generator=generator).tolist()
        for _ in range(155)
    ]
    tensors = [torch.randn(*shape, device=DEVICE) for shape in shapes]
    floats = sum(t.numel() for t in tensors)
    bench.add(
        "aligned_flat_concat, 155 tensors", lambda i: ops.aligned_flat_concat(tensors, 0.5),
        lambda i: torch.cat([t.reshape(-1) for t in tensors]) * 0.5, count=floats, unit="G floats/s", bytes_=floats * 8,
    )  # fmt: skip


def codec(bench: Bench) -> None:
    from shoal.ops.cuda import codec as cuda_codec

    count = 8 * N
    packed = sets(lambda: torch.randint(0, 256, (count // 2 * 3,), dtype=torch.uint8, device=DEVICE))
    bench.add(
        "unpack12, 8 M indices", lambda i: unpack12(packed(i), (count,)), lambda i: unpack12_reference(packed(i)),
        count=count, unit="G/s", bytes_=count * 9.5,
    )  # fmt: skip
    table = torch.randn(256, device=DEVICE)
    bench.add(
        "dequantize, 8 M values", lambda i: cuda_codec.dequantize(packed(i)[:count], table, torch.float32),
        lambda i: table[packed(i)[:count].long()], count=count, unit="G/s", bytes_=count * 5,
    )  # fmt: skip
    gradient = sets(lambda: torch.randn(4 * N, device=DEVICE))
    for k in (4 * N // 100, 4 * N // 10):
        bench.add(
            f"top-{round(k * 100 / (4 * N))} % of 4 M values", lambda i, k=k: topk_indices(gradient(i), k),
            lambda i, k=k: topk_indices_reference(gradient(i), k), count=4 * N, unit="G/s", bytes_=16 * N,
        )  # fmt: skip


BENCHMARKS = {
    f.__name__: f for f in (dedup, reorder, split, lookup, gather, reductions, unique, layout, aligned, codec)
}


def main(argv: Sequence[str] | None = None) -> int:
    flags = parser(__doc__ or "")
    flags.add_argument("-k", metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}")
    args = flags.parse_args(argv)
    if not torch.cuda.is_available():
        print("benchmarks.gpu_ops needs a CUDA GPU, but torch finds none; nothing was measured")
        return 0
    report = Report(f"GPU ops, {torch.cuda.get_device_name()}")
    report.start()
    bench = Bench(report, max(args.repeats, 21))
    for name, run in BENCHMARKS.items():
        if args.k is None or args.k in name:
            run(bench)
    report.save(args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
