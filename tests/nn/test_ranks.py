"""Modules over tables that span ranks: every rank must make every call, even without ids."""

import pytest
import torch

import shoal
from shoal.errors import ConfigError
from shoal.nn import EmbeddingBagCollection, HashEmbedding, HashEmbeddingBag, SparseOptimizer
from shoal.sharded import AllToAllHashTable
from shoal.testing import run_ranks
from tests.sharded.ranks import in_ranks, raised

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


BAD = {
    "a feature is missing": lambda both: both({"x": [[1]]}),
    "a feature of another name": lambda both: both({"x": [[1]], "y": [[1]], "z": [[1]], "w": [[1]]}),
    "not by key": lambda both: both(torch.tensor([[1]])),
    "ids that are no integers": lambda both: both({name: torch.tensor([[1.5]]) for name in "xyz"}),
    "offsets that fall": lambda both: both({name: (torch.tensor([1]), torch.tensor([0, 2, 1])) for name in "xyz"}),
    "text": lambda both: both(dict.fromkeys("xyz", "text")),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_rank_that_refuses_its_batch_tells_the_others(bad):
    def step(ranks):
        tables = {name: AllToAllHashTable(2, name=name, backend=ranks, **OPTIONS) for name in "ab"}
        both = EmbeddingBagCollection(tables, {"x": "a", "y": "b", "z": "a"})
        text = ""
        try:
            bad(both) if ranks.rank == 1 else both({name: [[1, 2]] for name in "xyz"})
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        return text, both({name: [[5]] for name in "xyz"}).shape

    results = raised(in_ranks(3, step))
    for rank, (text, shape) in enumerate(results):
        assert text
        assert (rank == 1) != text.startswith("PeerError"), text
        assert rank == 1 or "rank(s) [1] refused their part" in text
        assert shape == (1, 6)  # the ranks still communicate


def test_a_rank_that_refuses_rows_tells_the_others():
    def step(ranks):
        embedding = HashEmbedding(AllToAllHashTable(2, name="t", backend=ranks, **OPTIONS))
        try:
            embedding(torch.tensor([1.5] if ranks.rank else [1]))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    first, second = raised(in_ranks(2, step))
    assert first.startswith("PeerError: rank 0")
    assert "rank(s) [1]" in first
    assert second


def test_a_table_of_one_process_has_nobody_to_tell():
    bag = HashEmbeddingBag(shoal.HashTable(2, **OPTIONS))
    with pytest.raises(ConfigError):
        bag((torch.tensor([1]), torch.tensor([0, 2])))
