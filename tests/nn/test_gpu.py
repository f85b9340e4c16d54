"""Modules on a GPU: over a table in host memory, and over one whose ``device`` is the GPU."""

import pytest
import torch

import shoal
from shoal.nn import HashEmbedding, HashEmbeddingBag

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


class DenseTable:
    """A table of few rows in GPU memory, updated by plain SGD: all that the modules ask of a table."""

    name, dim_size = "dense", 4

    def __init__(self):
        self.device = torch.device("cuda")
        self.rows = torch.zeros(100, 4, device="cuda")

    def lookup(self, ids):
        return self.rows[ids]

    def apply_gradients(self, ids, grads, global_step=0):
        assert ids.unique().numel() == ids.numel()  # it does not accept enable_dedup, so ids are distinct
        self.rows[ids] -= 0.5 * grads


def steps(module, device):
    torch.manual_seed(0)
    seen = []
    for _ in range(4):
        lengths = torch.randint(0, 5, (8,))
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        ids, weights = torch.randint(0, 100, (int(offsets[-1]),)), torch.rand(int(offsets[-1]))
        out = module(ids.to(device), offsets.to(device), weights.to(device))
        (out * torch.randn(out.shape).to(device)).sum().backward()
        seen.append(out.detach().cpu())
    return seen


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("combiner", ["sum", "mean", "max", "firstn"])
def test_a_bag_is_the_same_wherever_its_table_is(combiner, padding_idx):
    def bag(table):
        length = 3 if combiner == "firstn" else None
        return HashEmbeddingBag(table, combiner=combiner, max_length=length, padding_idx=padding_idx)

    def host():
        return shoal.HashTable(4, optimizer=shoal.Sgd(lr=0.5), initializer="zeros")

    want = steps(bag(host()), "cpu")
    on_gpu = shoal.HashTable(4, optimizer=shoal.Sgd(lr=0.5), initializer="zeros", device="cuda")
    for got in (steps(bag(table).to("cuda"), "cuda") for table in (host(), DenseTable(), on_gpu)):
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    assert want[-1].abs().sum() > 0


def test_an_embedding_over_a_table_on_the_gpu():
    table = DenseTable()
    embedding = HashEmbedding(table, padding_idx=0).to("cuda")
    out = embedding(torch.tensor([[1, 2], [1, 0]], device="cuda"))
    assert out.is_cuda
    out.sum().backward()
    assert table.rows[:3, 0].tolist() == [0, -1, -0.5]
