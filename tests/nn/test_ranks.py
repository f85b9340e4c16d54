"""Modules over tables that span ranks: every rank takes part in every call, also one without ids."""

import pytest
import torch

import shoal
from shoal.nn import EmbeddingBagCollection, HashEmbedding, HashEmbeddingBag, SparseOptimizer
from shoal.sharded import AllToAllHashTable
from shoal.testing import run_ranks

pytestmark = pytest.mark.timeout(300)

OPTIONS = {"optimizer": shoal.Sgd(lr=1.0), "initializer": "uniform", "seed": 5}
IDS = torch.arange(12)


def batch(rank, step):
    """Rank 1 has nothing at first, then empty bags, then padding alone."""
    if rank == 1:
        return [[[], []], [[0, 0], [0]], [[1], [2, 3]]][step]
    return [[1, 2, 2], [4 + step, 0, 7]]


def rows_of(tables):
    return torch.stack([table.lookup(IDS) for table in tables.values()])


def spread(rank, world, held, clip):
    tables = {name: AllToAllHashTable(2, name=name, **OPTIONS) for name in "ab"}
    both = EmbeddingBagCollection(tables, {"x": "a", "y": "b", "z": "a"}, padding_idx=0)
    alone = HashEmbeddingBag(tables["a"], combiner="max", padding_idx=0)
    optimizer = SparseOptimizer([both, alone]) if held else None
    for step in range(3):
        ids = batch(rank, step)
        (both({"x": ids, "y": ids, "z": ids}).sum() + alone(ids).sum()).backward()
        if clip:
            optimizer.gradients()
        if optimizer:
            optimizer.step()
    HashEmbedding(tables)({name: torch.tensor([3] if rank == 0 else [], dtype=torch.int64) for name in "ab"})
    return rows_of(tables)


@pytest.mark.parametrize(("held", "clip"), [(False, False), (True, False), (True, True)])
def test_ranks_without_ids_take_part_and_rows_are_those_of_one_process(held, clip):
    tables = {name: shoal.HashTable(2, **OPTIONS) for name in "ab"}
    for step in range(3):
        parts = []
        for rank in range(2):
            ids = batch(rank, step)
            both = EmbeddingBagCollection(tables, {"x": "a", "y": "b", "z": "a"}, padding_idx=0)
            alone = HashEmbeddingBag(tables["a"], combiner="max", padding_idx=0)
            parts.append(both({"x": ids, "y": ids, "z": ids}).sum() + alone(ids).sum())
        sum(parts).backward()
    for rows in run_ranks(2, spread, held=held, clip=clip):
        torch.testing.assert_close(rows, rows_of(tables))
