"""Combiners: values, gradients, errors."""

import pytest
import torch

from shoal import Ragged, ops
from shoal.nn import Combiner, FirstN, ReduceMean, ReduceSum

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
        with pytest.raises((ValueError, AssertionError), match=str(bad)):
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
