"""Reduction during backward: buckets and a single rank in this process, the rest in processes."""

import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.errors import ConfigError, DistributedError
from shoal.testing import run_ranks
from shoal.train import OverlappedReducer


class Bag(nn.Module):
    def __init__(self, sizes, dtypes=None):
        super().__init__()
        self.p = nn.ParameterList(
            [torch.zeros(n, dtype=(dtypes or [torch.float32] * len(sizes))[i]) for i, n in enumerate(sizes)]
        )


def test_buckets_follow_reverse_registration_order():
    mib = (1 << 20) // 4
    module = Bag([10 * mib, 4 * mib, 20 * mib, 6 * mib])
    assert OverlappedReducer(module).buckets == [[3], [2, 1], [0]]
    assert OverlappedReducer(module, bucket_bytes=1).buckets == [[3], [2], [1], [0]]
    module.p[2].requires_grad_(False)
    assert OverlappedReducer(module).buckets == [[2, 1, 0]]
    mixed = Bag([4, 4, 4, 4], [torch.float32, torch.float64, torch.float32, torch.float64])
    assert OverlappedReducer(mixed).buckets == [[3, 1], [2, 0]]
    with pytest.raises(ConfigError):
        OverlappedReducer(module, bucket_bytes=0)


def test_one_rank_alone_keeps_its_gradients():
    layer = nn.Linear(3, 2)
    reducer = OverlappedReducer(layer)
    layer(torch.ones(1, 3)).sum().backward()
    want = layer.weight.grad.clone()
    reducer.finish()
    assert torch.equal(layer.weight.grad, want)
    assert reducer.last_stats["exposed_s"] >= 0
    reducer.finish()  # no new gradients: the result is unchanged


def test_sparse_gradients_become_dense():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    reducer = OverlappedReducer(model)
    for _ in range(2):  # the second backward adds to a dense gradient
        model(torch.tensor([1, 3, 1])).sum().backward()
        reducer.finish()
    row = 2 * model[1].weight.detach()[0]
    want = torch.zeros(5, 3)
    want[1], want[3] = 2 * row, row
    assert torch.equal(model[0].weight.grad, want)


def test_a_second_backward_before_finish_is_refused_instead_of_lost():
    layer = nn.Linear(3, 2)
    reducer = OverlappedReducer(layer)
    layer(torch.ones(1, 3)).sum().backward()
    with pytest.raises(DistributedError, match="no_sync"):
        layer(torch.ones(1, 3)).sum().backward()
    reducer.finish()
    layer.zero_grad()
    layer(torch.ones(1, 3)).sum().backward()
    reducer.finish()
    assert torch.equal(layer.bias.grad, torch.ones(2))


class Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, on_backward):
        ctx.on_backward = on_backward
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        ctx.on_backward()
        return g * w, g * x, None


class WatchedLayer(nn.Module):
    def __init__(self, on_backward):
        super().__init__()
        self.w = nn.Parameter(torch.ones(64))
        self.on_backward = on_backward

    def forward(self, x):
        return Watched.apply(x, self.w, self.on_backward)


LAYERS, REDUCTION_S = 8, 0.02


def watched(overlap):
    """Backward of a layer waits for the reduction of the layer behind it: only a reduction that goes on meanwhile ends.

    Returns which of these waits ended well, seconds in ``finish()``, and its share by the reducer's own account.
    """
    reduced = [threading.Event() for _ in range(LAYERS + 1)]
    reduced[LAYERS].set()
    came = []

    def on_backward(layer):
        if overlap:
            came.append(reduced[layer + 1].wait(60))
        else:
            came.append(layer == LAYERS - 1 or not reduced[layer + 1].is_set())

    model = nn.Sequential(*(WatchedLayer(partial(on_backward, layer)) for layer in range(LAYERS)))
    lock = threading.Lock()

    def reduce_slowly(index, flat):
        future = torch.futures.Future()

        def work():
            with lock:
                time.sleep(REDUCTION_S)
            reduced[LAYERS - 1 - index].set()
            future.set_result(flat)

        threading.Thread(target=work).start()
        return future

    reducer = OverlappedReducer(model, bucket_bytes=1, hook=reduce_slowly)
    assert reducer.buckets == [[layer] for layer in reversed(range(LAYERS))]
    out = model(torch.ones(64)).sum()
    if overlap:
        out.backward()
    else:
        with reducer.no_sync():
            out.backward()
    began = time.perf_counter()
    reducer.finish()
    took = time.perf_counter() - began
    reducer.close()
    return came, took, reducer.last_stats["exposed_s"]


def test_reduction_hides_behind_backward():
    came, took, exposed = watched(True)
    assert came == [True] * LAYERS
    assert 0 <= exposed <= took
    came, took, exposed = watched(False)
    assert came == [True] * LAYERS
    assert LAYERS * REDUCTION_S <= exposed <= took


def make_model():
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "a": nn.Linear(4, 8),
            "b": nn.Linear(8, 8),
            "unused": nn.Linear(2, 2),
            "sometimes": nn.Linear(8, 1),
            "c": nn.Linear(8, 1),
        }
    )


def run_model(model, x, use):
    h = torch.relu(model["a"](x))
    h = torch.relu(model["b"](h))
    out = model["c"](h)
    return (out + model["sometimes"](h) if use else out).sum()


def equals_blocking(rank, world):
    results = []
    for bucket_bytes in (1, 150, 25 << 20):
        model, other = make_model(), make_model()
        reducer = OverlappedReducer(model, bucket_bytes=bucket_bytes)
        for step in range(3):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank * 10 + step))
            use = rank == 0 and step == 1
            model.zero_grad()
            other.zero_grad()
            run_model(model, x, use).backward()
            reducer.finish()
            run_model(other, x, use).backward()
            parameters = list(other.parameters())
            for bucket in reducer.buckets:
                grads = [
                    parameters[i].grad if parameters[i].grad is not None else torch.zeros_like(parameters[i])
                    for i in bucket
                ]
                flat = torch.cat([g.reshape(-1) for g in grads])
                dist.all_reduce(flat)
                flat /= world
                for i, part in zip(bucket, flat.split([parameters[i].numel() for i in bucket]), strict=True):
                    got = list(model.parameters())[i].grad
                    name = [n for n, _ in model.named_parameters()][i]
                    if name.startswith("unused") or (name.startswith("sometimes") and step != 1):
                        assert got is None
                    else:
                        assert torch.equal(got.reshape(-1), part), (name, step)
        results.append(reducer.last_stats["buckets"])
        reducer.close()
    return results


def test_equals_the_blocking_reduction_bit_for_bit_with_unused_parameters():
    results = run_ranks(2, equals_blocking, timeout_s=200)
    assert results[0] == results[1]
    assert results[0][0] == 10


class Shuffled(nn.Module):
    """Branches whose backward order is each rank's own."""

    def __init__(self, order):
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(6)])
        self.order = order

    def forward(self, x):
        return sum(self.branches[i](x).sum() for i in self.order)


def random_arrival(rank, world):
    order = torch.randperm(6, generator=torch.Generator().manual_seed(rank)).tolist()
    torch.manual_seed(1)
    model = Shuffled(order)
    reducer = OverlappedReducer(model, bucket_bytes=1)
    for step in range(5):
        model.zero_grad()
        with reducer.no_sync():
            model(torch.full((1, 3), float(rank))).backward()
        model(torch.full((1, 3), float(step))).backward()
        reducer.finish()
        want = step + sum(range(world)) / world
        for branch in model.branches:
            assert torch.allclose(branch.weight.grad, torch.full((3, 3), want))


def test_any_order_of_hooks_and_accumulation_without_sync():
    run_ranks(3, random_arrival, timeout_s=200)
