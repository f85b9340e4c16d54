"""A step through a group of GPU tables (find, pooled, update) against `nn.EmbeddingBag(sparse=True)` with an optimizer.

    python -m benchmarks.gpu groups

26 features of dim 64 with 1 M rows each and skewed ids. We measure one table with all rows, and one table per feature;
the rival is one joint module. Times are medians of turns; ratios are ours over the rival's. "Host" is Python's time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import shoal
from shoal.table.protocol import SUM, Features, Found, Part, Step, groups_of

FEATURES, DIM, SKEW, BATCHES = 26, 64, 3.0, 4


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hook: Tensor, ours: Ours, ids: Tensor, offsets: Tensor) -> Tensor:
        found, out = ours.read(ids, offsets, "initial")
        ctx.ours = ours
        ctx.save_for_backward(offsets, *found.tensors())
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        offsets, *found = ctx.saved_tensors
        ctx.ours.group.update([Part(Found(*found), ctx.ours.features, grad, offsets)], step=ctx.ours.step)
        return None, None, None, None


class Ours:
    """The tables of one group, with the features that a module would pass to it."""

    def __init__(self, tables: list[Any], bags: int, length: int) -> None:
        ((self.group, _),) = groups_of(tables)
        count = len(tables)
        self.bags = bags * (FEATURES // count)
        columns = tuple(DIM * k for k in range(count))
        self.features = Features(tuple(range(count)), (SUM,) * count, columns, DIM * count)
        self.counts = torch.full((count,), self.bags * length)
        self.hook = torch.zeros((), requires_grad=True, device="cuda")
        self.grad = torch.randn(self.bags, DIM * count, device="cuda")
        self.step = Step(1)

    def read(self, ids: Tensor, offsets: Tensor, missing: Any) -> tuple[Found, Tensor]:
        found = self.group.find(ids, self.counts, self.features, missing=missing)
        out = torch.empty(self.bags, self.features.width, device=ids.device)
        self.group.pooled(found, self.features, offsets, None, out, missing=missing)
        return found, out

    def train(self, ids: Tensor, offsets: Tensor) -> None:
        _Pooled.apply(self.hook, self, ids, offsets).backward(self.grad)


def medians(calls: Sequence[Callable[[int], Any]], repeats: int = 7, inner: int = 10) -> list[tuple[float, float]]:
    """Milliseconds of each call, in turn: until the device has finished, and until Python has."""
    times: list[list[tuple[float, float]]] = [[] for _ in calls]
    for round_ in range(repeats + 1):
        for call, series in zip(calls, times, strict=True):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for i in range(inner):
                call(i)
            host = time.perf_counter() - begin
            torch.cuda.synchronize()
            if round_:
                series.append(((time.perf_counter() - begin) * 1e3 / inner, host * 1e3 / inner))
    return [tuple(statistics.median(x) for x in zip(*series, strict=True)) for series in times]  # type: ignore[misc]


def captured(ours: Ours, batch: Tensor, offsets: Tensor) -> Callable[[Tensor], None]:
    ids = batch.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            ours.train(ids, offsets)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.train(ids, offsets)

    def replay(batch: Tensor) -> None:
        ids.copy_(batch)
        graph.replay()

    return replay


def made(kind: str, rows: int) -> tuple[Any, list[Any]]:
    optimizer = {"sgd": shoal.Sgd, "adagrad": shoal.Adagrad}[kind]
    one, *many = (shoal.HashTable(DIM, optimizer=optimizer(lr=0.01), device="cuda") for _ in range(FEATURES + 1))
    one.reserve(rows * FEATURES + (32 << 20))
    for k, table in enumerate(many):
        table.reserve(rows + (2 << 20))
        ids = torch.arange(k * rows, (k + 1) * rows, device="cuda")
        table.lookup(ids - k * rows, insert_missing=True)
        one.lookup(ids, insert_missing=True)
    return one, many


def run(kind: str, rows: int, profile: bool) -> list[dict[str, Any]]:
    one, many = made(kind, rows)
    rival = torch.nn.EmbeddingBag(
        rows * FEATURES, DIM, mode="sum", include_last_offset=True, sparse=True, device="cuda"
    )
    optimizer = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[kind](rival.parameters(), lr=0.01)
    results = []
    for bags, length in ((8192, 1), (8192, 10), (65536, 1)):
        n = bags * length
        own = [(torch.rand(FEATURES, n, device="cuda", dtype=torch.float64).pow(SKEW) * rows).long().clamp(max=rows - 1)
               for _ in range(BATCHES)]  # fmt: skip
        joint = [(ids + torch.arange(FEATURES, device="cuda")[:, None] * rows).view(-1) for ids in own]
        each = [ids.view(-1) for ids in own]
        offsets = torch.arange(0, FEATURES * n + 1, length, device="cuda")
        single, several = Ours([one], bags, length), Ours(many, bags, length)
        grad = torch.randn(FEATURES * bags, DIM, device="cuda")

        def step(i: int, joint: Any = joint, offsets: Any = offsets, grad: Any = grad) -> None:
            optimizer.zero_grad()
            rival(joint[i % BATCHES], offsets).backward(grad)
            optimizer.step()

        def forward(i: int, joint: Any = joint, offsets: Any = offsets) -> None:
            with torch.no_grad():
                rival(joint[i % BATCHES], offsets)

        mine = [(single, joint), (several, each)]
        forwards = [lambda i, o=o, b=b, f=offsets: o.read(b[i % BATCHES], f, "zeros") for o, b in mine]
        steps = [lambda i, o=o, b=b, f=offsets: o.train(b[i % BATCHES], f) for o, b in mine]
        title = f"{kind} {bags} x {length}"
        for what, ours, goal in (("forward", forwards, 1.3), ("step", steps, 1.0 if kind == "sgd" else 0.9),
                                 ("graph", [], 0.6)):  # fmt: skip
            if what == "graph":  # captured only after the eager steps were measured
                replays = [captured(o, b[0], offsets) for o, b in mine]
                ours = [lambda i, r=r, b=b: r(b[i % BATCHES]) for r, (_, b) in zip(replays, mine, strict=True)]
            calls = [*ours, forward if what == "forward" else step]
            (a, ha), (b, hb), (r, hr) = medians(calls)
            print(
                f"{title:20s} {what:8s} one {a:7.3f} ms ({a / r:5.2f}x, goal {goal}x; host {ha:6.3f})   26 {b:7.3f} ms "
                f"({b / a:5.2f}x of one, goal 1.2x; host {hb:6.3f})   rival {r:7.3f} ms (host {hr:6.3f})", flush=True,
            )  # fmt: skip
            results.append({"what": f"{title} {what}", "one_ms": a, "many_ms": b, "rival_ms": r, "host_ms": [ha, hb]})
        if profile:
            for name, call in (("one", steps[0]), ("26", steps[1])):
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                    for i in range(4):
                        call(i)
                    torch.cuda.synchronize()
                print(f"--- {title}, {name}: microseconds on the device per step")
                for event in sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)[:14]:
                    print(f"    {event.self_device_time_total / 4:9.1f} {event.count / 4:5.1f}x {event.key[:90]}")
    return results


def groups(rows: int = 1_000_000, profile: bool = False) -> list[dict[str, Any]]:
    """Runs the comparison with both optimizers."""
    results = []
    for kind in ("sgd", "adagrad"):
        results += run(kind, rows, profile)
        torch.cuda.empty_cache()
    return results
