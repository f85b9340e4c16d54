"""Modules, as users write them, against `torch.nn.EmbeddingBag` in the same run.

    python -m benchmarks.modules                    # on the CPU: in the cache, beyond it, many tables, few ids
    python -m benchmarks.modules --device cuda      # 26 features of dim 64, and a complete DLRM

Times are medians of repeats that take turns; a ratio is our time over the rival's (smaller is better).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from benchmarks.harness import machine
from shoal.nn import EmbeddingBagCollection, FirstN, HashEmbeddingBag

Call = Callable[[], Any]


def ids_of(n: int, rows: int, skew: float, generator: torch.Generator) -> Tensor:
    """Skewed ids: a power of a uniform number; ``skew`` 1 is uniform."""
    return (torch.rand(n, generator=generator, dtype=torch.float64).pow(skew) * rows).long().clamp(max=rows - 1)


class Keyed:
    """Ids of several features in one tensor, like a KeyedJaggedTensor."""

    def __init__(self, keys: list[str], values: Tensor, offsets: Tensor) -> None:
        self._keys, self._values, self._offsets = keys, values, offsets

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def offsets(self) -> Tensor:
        return self._offsets


def medians(calls: Sequence[Call], repeats: int, inner: int, device: str) -> list[float]:
    """Milliseconds of each call, in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for round_ in range(repeats + 1):
        for call, series in zip(calls, times, strict=True):
            _wait(device)
            time.sleep(0.3 if device == "cpu" else 0)  # threads that the rival left spinning go to sleep
            begin = time.perf_counter()
            for _ in range(inner):
                call()
            _wait(device)
            if round_:
                series.append((time.perf_counter() - begin) * 1e3 / inner)
    return [statistics.median(series) for series in times]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def line(what: str, names: Sequence[str], times: Sequence[float], rival: int, goal: str = "") -> None:
    parts = [f"{name} {ms:.3f} ms" for name, ms in zip(names, times, strict=True)]
    ratios = [
        f"{name} {ms / times[rival]:.2f}x" for i, (name, ms) in enumerate(zip(names, times, strict=True)) if i != rival
    ]
    print(f"{what:44s} {'; '.join(parts)}  ->  {', '.join(ratios)} of {names[rival]} {goal}", flush=True)


def optimizers(kind: str, rival: nn.Module) -> tuple[Any, Any]:
    if kind == "sgd":
        return shoal.Sgd(lr=0.05), torch.optim.SGD(rival.parameters(), lr=0.05)
    return shoal.Adagrad(lr=0.05), torch.optim.Adagrad(rival.parameters(), lr=0.05)


class RowsOfBags(nn.Module):
    """The rival of `max` and `firstn`: pools bags of ``length`` ids in torch, with sparse gradients."""

    def __init__(self, rows: int, dim: int, length: int, combiner: Any) -> None:
        super().__init__()
        self.rows, self.length, self.combiner = nn.Embedding(rows, dim, sparse=True), length, combiner

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        bags = ids.view(-1, self.length)
        return self.rows(bags).amax(1) if self.combiner == "max" else self.rows(bags[:, : self.combiner.max_seq_length])


class Setup:
    """One table, a table per feature and the rival, with the same rows."""

    def __init__(
        self, args: Any, kind: str, bags: int, length: int, features: int, rows: int, dim: int, skew: float,
        combiner: Any = "sum",
    ):  # fmt: skip
        self.device, self.features = args.device, features
        total = features * rows
        make = torch.Generator().manual_seed(0)
        with torch.device(self.device):
            if combiner == "sum":
                self.rival = nn.EmbeddingBag(total, dim, mode="sum", include_last_offset=True, sparse=True)
            else:
                self.rival = RowsOfBags(total, dim, length, combiner)
        ours, self.optimizer = optimizers(kind, self.rival)
        options = {"optimizer": ours, "device": self.device, "seed": 0}
        self.one = shoal.HashTable(dim, **options)
        self.many = {f"f{f:02d}": shoal.HashTable(dim, **options) for f in range(features)}
        for begin in range(0, total, 1 << 20):
            self.one.lookup(torch.arange(begin, min(begin + (1 << 20), total), device=self.device), insert_missing=True)
        for table in self.many.values():
            table.lookup(torch.arange(rows, device=self.device), insert_missing=True)
        self.bag = HashEmbeddingBag(self.one, combiner=combiner).to(self.device)
        self.collection = EmbeddingBagCollection(self.many, combiner=combiner).to(self.device)
        n = bags * length
        offsets = torch.arange(0, features * n + 1, length, device=self.device)
        starts = torch.arange(features)[:, None] * rows
        self.joint, self.keyed = [], []
        for _ in range(args.batches):
            own = ids_of(features * n, rows, skew, make).view(features, n)
            self.joint.append(((own + starts).view(-1).to(self.device), offsets))
            self.keyed.append(Keyed(list(self.many), own.reshape(-1).to(self.device), offsets))
        with torch.no_grad():
            self.grad = torch.randn_like(self.rival(*self.joint[0]))
            self.wide = torch.randn_like(self.collection(self.keyed[0]))
        self._at = 0

    def _next(self, batches: list[Any]) -> Any:
        self._at = (self._at + 1) % len(batches)
        return batches[self._at]

    def forwards(self) -> list[Call]:
        def run(module: nn.Module, batches: list[Any], joint: bool) -> Call:
            def call() -> None:
                with torch.no_grad():
                    batch = self._next(batches)
                    module(*batch) if joint else module(batch)

            return call

        self.bag.eval(), self.collection.eval()
        return [
            run(self.bag, self.joint, True),
            run(self.collection, self.keyed, False),
            run(self.rival, self.joint, True),
        ]

    def steps(self) -> list[Call]:
        self.bag.train(), self.collection.train()

        def ours() -> None:
            self.bag(*self._next(self.joint)).backward(self.grad)

        def many() -> None:
            self.collection(self._next(self.keyed)).backward(self.wide)

        def theirs() -> None:
            self.optimizer.zero_grad()
            self.rival(*self._next(self.joint)).backward(self.grad)
            self.optimizer.step()

        return [ours, many, theirs]

    def graphs(self) -> list[Call]:
        """Complete steps as captured graphs; ids are copied in before each replay."""
        made = []
        for module, grad, batches in ((self.bag, self.grad, self.joint), (self.collection, self.wide, self.keyed)):
            values = (batches[0][0] if isinstance(batches[0], tuple) else batches[0].values()).clone()
            offsets = batches[0][1] if isinstance(batches[0], tuple) else batches[0].offsets()
            ids = (values, offsets) if isinstance(batches[0], tuple) else (Keyed(list(self.many), values, offsets),)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    module(*ids).backward(grad)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                module(*ids).backward(grad)

            def call(values: Tensor = values, graph: Any = graph, batches: list[Any] = batches) -> None:
                batch = self._next(batches)
                values.copy_(batch[0] if isinstance(batch, tuple) else batch.values())
                graph.replay()

            made.append(call)
        return made


NAMES = ("one table", "26 tables", "nn.EmbeddingBag")


def gpu(args: Any) -> None:
    rows = args.rows or 1_000_000
    for bags, length in ((8192, 1), (8192, 10), (65536, 1)):
        if args.only not in ("", f"{bags}x{length}"):
            continue
        for kind in ("sgd", "adagrad"):
            setup = Setup(args, kind, bags, length, 26, rows, 64, 3.0)
            title = f"{bags:,} x {length}, {kind}"
            if kind == "sgd":
                line(f"{title}: forward", NAMES, medians(setup.forwards(), args.repeats, 10, "cuda"), 2, "(goal 1.3x)")
            times = medians(setup.steps(), args.repeats, 10, "cuda")
            line(f"{title}: step", NAMES, times, 2, f"(goal {'1.0' if kind == 'sgd' else '0.9'}x)")
            try:
                graphs = medians(setup.graphs(), args.repeats, 10, "cuda")
                line(f"{title}: step as a graph", NAMES, [*graphs, times[2]], 2, "(goal 0.6x)")
            except Exception as error:  # printed; the rest is still measured
                print(f"{title}: no graph: {type(error).__name__}: {error}")
            del setup
            torch.cuda.empty_cache()
    for combiner in ("max", FirstN(3)):
        if args.only in ("", "combiners"):
            setup = Setup(args, "adagrad", 8192, 10, 26, rows // 4, 64, 3.0, combiner)
            names = (*NAMES[:2], "nn.Embedding")
            line(f"8,192 x 10, {combiner}: forward", names, medians(setup.forwards(), args.repeats, 10, "cuda"), 2)
            line(f"8,192 x 10, {combiner}: step", names, medians(setup.steps(), args.repeats, 10, "cuda"), 2)
            del setup
            torch.cuda.empty_cache()
    if args.only in ("", "dlrm"):
        dlrm(args, rows)


class Dlrm(nn.Module):
    """26 features and 13 numbers, a bottom and a top net, and dot products between them."""

    def __init__(self, bag: nn.Module, features: int, dim: int) -> None:
        super().__init__()
        self.bag, self.features, self.dim = bag, features, dim
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, dim), nn.ReLU()
        )
        pairs = (features + 1) * features // 2
        self.top = nn.Sequential(
            nn.Linear(dim + pairs, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        )
        self.register_buffer("upper", torch.triu_indices(features + 1, features + 1, 1))

    def dense(self, numbers: Tensor, embedded: Tensor) -> Tensor:
        with torch.autocast(numbers.device.type, torch.bfloat16):
            bottom = self.bottom(numbers)
            every = torch.cat([bottom.unsqueeze(1), embedded.to(torch.bfloat16)], 1)
            dots = (every @ every.mT)[:, self.upper[0], self.upper[1]]
            return self.top(torch.cat([bottom, dots], 1)).squeeze(1).float()


def dlrm(args: Any, rows: int, bags: int = 32_768, dim: int = 64) -> None:
    setup = Setup(args, "adagrad", bags, 1, 26, rows, dim, 3.0)
    setup.bag.train(), setup.collection.train()
    numbers, labels = torch.randn(bags, 13, device=args.device), torch.rand(bags, device=args.device).round()
    calls = []
    for bag, batches, keyed in ((setup.collection, setup.keyed, True), (setup.rival, setup.joint, False)):
        net = Dlrm(bag, 26, dim).to(args.device)
        dense = torch.optim.Adam(
            [p for n, p in net.named_parameters() if not n.startswith("bag.")], fused=args.device == "cuda"
        )

        def step(net: Dlrm = net, dense: Any = dense, batches: list[Any] = batches, keyed: bool = keyed) -> None:
            batch = setup._next(batches)
            if keyed:
                embedded = net.bag(batch).view(bags, 26, dim)
            else:
                setup.optimizer.zero_grad()
                embedded = net.bag(*batch).view(26, bags, dim).transpose(0, 1)
            dense.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(net.dense(numbers, embedded), labels)
            loss.backward()
            dense.step()
            if not keyed:
                setup.optimizer.step()

        calls.append(step)
    whole = medians(calls, args.repeats, 5, args.device)
    line("DLRM, whole step", ("26 tables", "nn.EmbeddingBag"), whole, 1, "(goal < 1x)")
    parts = medians(setup.steps()[1:], args.repeats, 5, args.device)
    line("DLRM, embedding part", ("26 tables", "nn.EmbeddingBag"), parts, 1, "(goal 0.5x)")


def cpu(args: Any) -> None:
    print(f"{torch.get_num_threads()} threads")
    for rows, title in ((50_000, "in the cache"), (args.rows or 20_000_000, "beyond it")):
        if args.only not in ("", "forward"):
            break
        setup = Setup(args, "sgd", 53_248, 10, 1, rows, 16, 1.0)
        calls = setup.forwards()
        times = medians([calls[0], calls[2]], args.repeats, 20, "cpu")
        goal = 0.4 if rows == 50_000 else 0.8
        line(
            f"forward, bags of 10, {rows:,} rows, {title}",
            ("ours", "nn.EmbeddingBag"),
            times,
            1,
            f"(goal {1 / goal:.2f}x)",
        )
        threads = torch.get_num_threads()
        shoal.set_num_threads(1)
        (alone,) = medians(calls[:1], args.repeats, 20, "cpu")
        shoal.set_num_threads(threads)
        time.sleep(0.3)
        print(f"{'':44s} 1 -> {threads} threads: {alone / times[0]:.2f}x (goal 1.8x for 2)")
        del setup
    for length in (1, 10):
        if args.only not in ("", "tables"):
            break
        setup = Setup(args, "adagrad", 2048, length, 26, 200_000, 16, 3.0)
        names = ("one table", "26 tables", "nn.EmbeddingBag")
        line(f"26 features, 2,048 x {length}: forward", names, medians(setup.forwards(), args.repeats, 20, "cpu"), 2)
        times = medians(setup.steps(), args.repeats, 10, "cpu")
        line(f"26 features, 2,048 x {length}: step", names, times, 2, "(goal 0.25x)")
        print(f"{'':44s} 26 tables against one: {times[1] / times[0]:.2f}x (goal 1.1x)")
        del setup
    if args.only in ("", "new"):
        new_rows(args)
    if args.only in ("", "few"):
        few(args)


def new_rows(args: Any, dim: int = 16, batch: int = 65_536) -> None:
    """Steps on new ids, starting with an empty table, against steps on known ids."""
    total = args.new_rows
    if args.touch:
        torch.empty(int(args.touch * (1 << 30)), dtype=torch.uint8).fill_(1)
    table = shoal.HashTable(dim, optimizer=shoal.Adagrad(lr=0.05), seed=0)
    bag = HashEmbeddingBag(table)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
    offsets, grad = torch.arange(batch + 1), torch.randn(batch, dim)
    HashEmbeddingBag(shoal.HashTable(dim))(order[:batch], offsets).backward(
        grad
    )  # torch imports modules the first time

    def run() -> list[float]:
        times = []
        for begin in range(0, total - batch + 1, batch):
            start = time.perf_counter()
            bag(order[begin : begin + batch], offsets).backward(grad)
            times.append(time.perf_counter() - start)
        return times

    new, known = run(), run()
    print(
        f"{f'new rows, 0 to {total:,}, step of {batch:,}':44s} "
        f"new {batch / statistics.median(new) / 1e6:.1f} M rows/s; "
        f"known {batch / statistics.median(known) / 1e6:.1f}  ->  {sum(known) / sum(new):.2f}x (goal 0.5x); slowest "
        f"{max(new) / statistics.median(new):.1f}x the median (goal 4x)"
    )


def few(args: Any) -> None:
    table = shoal.HashTable(16, optimizer=shoal.Adagrad(lr=0.05), seed=0)
    bag = HashEmbeddingBag(table)
    rival = nn.EmbeddingBag(100_000, 16, mode="sum", include_last_offset=True, sparse=True)
    optimizer = torch.optim.Adagrad(rival.parameters(), lr=0.05)
    ids, offsets, grad = torch.randint(0, 100_000, (64,)), torch.arange(65), torch.randn(64, 16)

    def ours() -> None:
        bag(ids, offsets).backward(grad)

    def theirs() -> None:
        optimizer.zero_grad()
        rival(ids, offsets).backward(grad)
        optimizer.step()

    line(
        "64 ids, forward + backward",
        ("ours", "nn.EmbeddingBag"),
        medians([ours, theirs], args.repeats, 300, "cpu"),
        1,
        "(goal 0.080 ms)",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", type=int, help="rows of a feature (cuda, 1 M), or of the large table (cpu, 20 M)")
    parser.add_argument("--new-rows", type=int, default=20_000_000)
    parser.add_argument(
        "--touch",
        type=float,
        default=0,
        help="GiB of memory to write once and free before rows are made, because in a virtual machine the first use "
        "of memory is slower than later ones",
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--only",
        default="",
        help="cpu: one of forward, tables, new, few; cuda: one of 8192x1, 8192x10, 65536x1, combiners, dlrm",
    )
    parser.add_argument("--batches", type=int, default=8, help="number of different batches, which are used in turn")
    args = parser.parse_args()
    print(machine())
    gpu(args) if args.device == "cuda" else cpu(args)


if __name__ == "__main__":
    main()
