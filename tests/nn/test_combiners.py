"""Combiners: values, gradients, errors."""

import pytest
import torch

import shoal
from shoal import Ragged, ops
from shoal.nn import Combiner, FirstN, HashEmbeddingBag, ReduceMean, ReduceSum

KEY = Ragged.from_row_lengths([9, 9, 9, 9], [0, 3, 1])
ROWS = [[1, 2], [3, 4], [5, 6], [7, 8]]


@pytest.mark.parametrize(
    ("combiner", "out", "grad"),
    [
        (ReduceSum(), [[0, 0], [9, 12], [7, 8]], [[1, 1]] * 4),
        (ReduceMean(), [[0, 0], [3, 4], [7, 8]], [[1 / 3] * 2] * 3 + [[1, 1]]),
        (FirstN(2), [[[0, 0], [0, 0]], [[1, 2], [3, 4]], [[7, 8], [0, 0]]], [[1, 1], [1, 1], [0, 0], [1, 1]]),
    ],
    ids=repr,
)
def test_worked_example(combiner, out, grad):
    torch.testing.assert_close(combiner.combine(KEY, ROWS), torch.tensor(out, dtype=torch.float32))
    rows = torch.tensor(ROWS, dtype=torch.float32, requires_grad=True)
    combiner.combine(KEY, rows, name="ignored").sum().backward()
    torch.testing.assert_close(rows.grad, torch.tensor(grad, dtype=torch.float32))
    wide = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: combiner.combine(KEY, r), wide)


def test_the_shape_of_first_n_is_fixed():
    assert FirstN(5).combine(KEY, ROWS).shape == (3, 5, 2)
    assert FirstN(5).combine(Ragged.from_lists([]), torch.zeros(0, 2)).shape == (0, 5, 2)
    assert FirstN(5).combine(Ragged.from_lists([[], []]), torch.zeros(0, 2)).abs().sum() == 0


def test_max_seq_length():
    assert [c.max_seq_length for c in (ReduceSum(), ReduceMean(), FirstN(3))] == [0, 0, 3]
    for bad in (0, -1, 2.5):
        with pytest.raises(AssertionError, match=str(bad)):
            FirstN(bad)
        with pytest.raises(ValueError, match=str(bad)):
            FirstN(bad)
    with pytest.raises(TypeError):
        Combiner(1)


@pytest.mark.parametrize("combiner", [ReduceSum(), ReduceMean(), FirstN(2)], ids=repr)
def test_another_number_of_rows_is_refused(combiner):
    with pytest.raises(ValueError, match="3"):
        combiner.combine(KEY, ROWS[:3])
    with pytest.raises(ValueError, match="2-D"):
        combiner.combine(KEY, [1.0, 2, 3, 4])


def test_ops_exports_the_same_classes():
    assert ops.ReduceSum is ReduceSum
    assert ops.FirstN is FirstN


class Named(ReduceMean):
    """Another name for the same."""


class Largest(Combiner):
    """The largest of each column."""

    def __init__(self):
        super().__init__(0)

    def combine(self, key, embedding, name=None):
        rows = [
            part.amax(0) if len(part) else part.new_zeros(2) for part in embedding.split(key.row_lengths().tolist())
        ]
        return torch.stack(rows)


class Last(FirstN):
    """The last rows in place of the first."""

    def combine(self, key, embedding, name=None):
        parts = [part[-self.max_seq_length :] for part in embedding.split(key.row_lengths().tolist())]
        return super().combine(
            Ragged.from_row_lengths(torch.zeros(sum(map(len, parts))), [len(p) for p in parts]), torch.cat(parts)
        )


@pytest.mark.parametrize(
    ("combiner", "out", "moved"),
    [
        (Named(), [[0, 0], [3, 4], [7, 8]], [[1 / 3] * 2] * 3 + [[1, 1]]),
        (Largest(), [[0, 0], [5, 6], [7, 8]], [[0, 0], [0, 0], [1, 1], [1, 1]]),
        (Last(2), [[[0, 0], [0, 0]], [[3, 4], [5, 6]], [[7, 8], [0, 0]]], [[0, 0], [1, 1], [1, 1], [1, 1]]),
    ],
    ids=repr,
)
def test_a_bag_takes_a_combiner_that_is_derived_from_ours(combiner, out, moved):
    table = shoal.HashTable(dim=2, optimizer=shoal.Sgd(lr=1.0))
    ids, rows = torch.tensor([1, 2, 3, 4]), torch.tensor(ROWS, dtype=torch.float32)
    table.assign(ids, rows)
    pooled = HashEmbeddingBag(table, combiner=combiner)((ids, torch.tensor([0, 0, 3, 4])))
    torch.testing.assert_close(pooled, torch.tensor(out, dtype=torch.float32))
    pooled.sum().backward()
    torch.testing.assert_close(rows - table.lookup(ids), torch.tensor(moved, dtype=torch.float32))


def test_what_is_no_combiner_is_refused():
    class ReduceSum:
        pass

    with pytest.raises(ValueError, match="combiner must be one of"):
        HashEmbeddingBag(shoal.HashTable(dim=2), combiner=ReduceSum())
