"""Pipelines with batches, rows and the dense part on a GPU: bit-identical to a plain loop, and what overlaps."""

import threading

import pytest
import torch
from torch import nn

import shoal
from shoal.nn import EmbeddingBagCollection, HashEmbedding
from shoal.table.cuda.cache import CachedHashTable
from shoal.train import Pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEADLINE_S = 60
IDS = 400


def in_gpu_memory(dim, **options):
    return shoal.HashTable(dim, device="cuda", deterministic=True, **options)


def cached(dim, **options):
    """Fewer rows in GPU memory than there are ids: most batches fetch some, and others leave."""
    return CachedHashTable(shoal.HashTable(dim, **options), cache_rows=300, deterministic=True)


TABLES = {"in GPU memory": in_gpu_memory, "cached": cached, "in host memory": shoal.HashTable}


class Clicks(nn.Module):
    def __init__(self, make):
        super().__init__()
        options = {"optimizer": "adagrad", "seed": 3}
        self.bags = EmbeddingBagCollection(
            {"user": make(4, name="user", **options), "item": make(4, name="item", **options)},
            {"user": "user", "clicked": "item", "shown": "item"},
        )
        self.words = HashEmbedding(make(2, name="words", **options))
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(14, 8), nn.ReLU(), nn.Linear(8, 1))
        self.to("cuda")

    def forward(self, batch):
        rows = torch.cat([self.bags(batch["bags"]), self.words(batch["words"])], 1)
        logits = self.net(rows).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch["label"]), logits

    def state(self):
        tables = {**self.bags.tables, "words": self.words.table}
        found = {}
        for name, table in tables.items():
            device = getattr(table, "device", torch.device("cpu"))
            found[name] = torch.cat([table.lookup(ids.to(device)).cpu() for ids in torch.arange(IDS).split(100)])
        return found | {name: value.cpu() for name, value in self.net.state_dict().items()}


def make_batches(n=14, size=32):
    g = torch.Generator().manual_seed(1)

    def ids(*shape):
        return torch.randint(IDS, shape, generator=g)

    return [
        {
            "bags": {"user": ids(size, 1), "clicked": ids(size, 3), "shown": ids(size, 2)},
            "words": ids(size),
            "label": torch.rand(size, generator=g).round(),
        }
        for _ in range(n)
    ]


def on_gpu(batch):
    if isinstance(batch, dict):
        return {name: on_gpu(one) for name, one in batch.items()}
    return batch.to("cuda")


def plain_loop(make):
    model = Clicks(make)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    outs = []
    for batch in make_batches():
        optimizer.zero_grad()
        loss, out = model(on_gpu(batch))
        loss.backward()
        optimizer.step()
        outs.append(out.detach().cpu())
    return model.state(), outs


def piped(make, **options):
    model = Clicks(make)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Pipeline(model, optimizer, "cuda", **options) as pipeline:
        outs = [out.cpu() for out in pipeline(make_batches())]
        report = pipeline.report()
    return model.state(), outs, report


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_without_staleness_results_are_those_of_a_plain_loop_to_the_last_bit(kind, ahead):
    expected, outs = plain_loop(TABLES[kind])
    state, got, report = piped(TABLES[kind], ahead=ahead)
    assert_equal(state, expected)
    assert all(map(torch.equal, got, outs))
    assert report["located"] + report["not_located"] == 2 * 13
    assert report["located"] >= 2 * (13 - ahead - 2)  # batches read before the first forward are not located


@pytest.mark.parametrize("kind", TABLES)
def test_with_staleness_runs_are_equal_to_each_other(kind):
    first, outs, _ = piped(TABLES[kind], staleness=1)
    second, again, _ = piped(TABLES[kind], staleness=1)
    assert_equal(first, second)
    assert all(map(torch.equal, outs, again))
    exact, _ = plain_loop(TABLES[kind])
    assert not torch.equal(first["item"], exact["item"])


def test_the_next_batch_is_on_the_gpu_while_a_step_runs():
    """A step ends only when the next batch has been read, and finds its own on the device."""
    model = Clicks(in_gpu_memory)
    read = [threading.Event() for _ in range(6)]

    def source():
        for number, batch in enumerate(make_batches(5)):
            read[number].set()
            yield batch
        read[5].set()

    numbers = iter(range(1, 6))

    def step(batch):
        assert batch["label"].is_cuda
        model(batch)[0].backward()
        assert read[next(numbers)].wait(DEADLINE_S)

    assert len(list(Pipeline(model, None, "cuda", step=step)(source()))) == 5


def test_work_of_a_step_that_is_slow_on_the_device_does_not_reach_the_batches_that_follow():
    """Batches are copied on another stream, into memory that the step may still be working on if it were given back."""
    layer = nn.Linear(1, 1, device="cuda")
    big = torch.randn(2048, 2048, device="cuda")
    sums = []

    def step(batch):
        for _ in range(20):
            big @ big
        sums.append(batch.sum(dtype=torch.int64))

    list(Pipeline(layer, None, "cuda", step=step)(torch.full((500_000,), n) for n in range(12)))
    assert [int(one) for one in sums] == [500_000 * n for n in range(12)]
