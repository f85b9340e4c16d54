"""The model of the demo, and the two tables that are compared."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shoal
from shoal.demo.stream import FIELDS
from shoal.nn import HashEmbeddingBag, SparseOptimizer

Ids = dict[str, tuple[Tensor, Tensor]]

DIM = 16
LEARNING_RATE = 0.05
INITIAL_ACCUMULATOR = 0.1


class DeepFm(nn.Module):
    """Linear weights, products of pairs of factors, and a small perceptron over the same embeddings.

    The first column of an embedding is its linear weight, the others are its factors.
    """

    def __init__(self, bag: nn.Module) -> None:
        super().__init__()
        self.bag = bag
        self.deep = nn.Sequential(
            nn.Linear(len(FIELDS) * DIM, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, ids: Ids) -> Tensor:
        return logits_of(self.bag(ids), self.deep)


def logits_of(pooled: Tensor, deep: nn.Module) -> Tensor:
    """Logits ``[B]`` from the pooled rows of all fields, ``[B, len(FIELDS) * DIM]``."""
    fields = pooled.view(-1, len(FIELDS), DIM)
    linear, factors = fields[..., 0].sum(1), fields[..., 1:]
    pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
    return linear + pairs + deep(pooled).squeeze(1)


class Collisionless:
    """A `shoal.HashTable`: every id has its own row until it expires."""

    name = "shoal.HashTable"

    def __init__(self, expire_days: int, seed: int) -> None:
        self.now_s = 0
        self.table = shoal.HashTable(
            DIM,
            optimizer=shoal.Adagrad(lr=LEARNING_RATE, initial_accumulator=INITIAL_ACCUMULATOR),
            expire_after=f"{expire_days}d",
            seed=seed,
            name="demo",
        )
        self.bag = HashEmbeddingBag(self.table, combiner="sum")
        self.bag.clock = lambda: self.now_s
        self.optimizer = SparseOptimizer(self.bag)

    def rows(self) -> int:
        return len(self.table)

    def memory_bytes(self) -> int:
        return self.table.memory_bytes()

    def end_day(self) -> None:
        self.table.evict()


class Hashed:
    """`torch.nn.EmbeddingBag` with a fixed number of rows that ids share by hash, as is common practice."""

    name = "nn.EmbeddingBag, hashed"

    def __init__(self, memory_bytes: int, seed: int) -> None:
        # Each column of a row has a weight and an accumulator of 4 bytes each.
        self.bag = HashedBag(max(1, memory_bytes // (8 * DIM)), seed)
        self.optimizer = torch.optim.Adagrad(
            self.bag.parameters(), lr=LEARNING_RATE, initial_accumulator_value=INITIAL_ACCUMULATOR
        )
        self.now_s = 0

    def rows(self) -> int:
        return self.bag.embedding.num_embeddings

    def memory_bytes(self) -> int:
        return self.rows() * 8 * DIM

    def end_day(self) -> None:
        pass


class HashedBag(nn.Module):
    """Takes the same input from the demo's stream as `HashEmbeddingBag`."""

    def __init__(self, rows: int, seed: int) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(rows, DIM, mode="sum", include_last_offset=True, sparse=True)
        with torch.no_grad():  # the same distribution as a new row of the table
            self.embedding.weight.uniform_(-0.05, 0.05, generator=torch.Generator().manual_seed(seed))

    def forward(self, ids: Ids) -> Tensor:
        rows = self.embedding.num_embeddings
        start, values, offsets = 0, [], [torch.zeros(1, dtype=torch.int64, device="cpu")]
        for one, ends in ids.values():
            mixed = one * -0x61C8864680B583EB
            values.append((mixed ^ (mixed >> 32)) % rows)
            offsets.append(ends[1:] + start)
            start += len(one)
        out = self.embedding(torch.cat(values), torch.cat(offsets))
        return out.view(len(ids), -1, DIM).transpose(0, 1).reshape(-1, len(ids) * DIM)
