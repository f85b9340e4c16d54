"""`Ragged`: construction, errors, and passage through torch's containers."""

import pytest
import torch

from shoal import Ragged


def test_rows_come_back_as_they_were_given():
    rows = [[5, 6], [], [7]]
    ragged = Ragged.from_lists(rows)
    assert ragged.to_list() == rows
    assert ragged.nrows() == 3
    assert ragged.row_lengths().tolist() == [2, 0, 1]
    assert ragged.row_splits.tolist() == [0, 2, 2, 3]
    assert Ragged.from_row_lengths([5, 6, 7], [2, 0, 1]).to_list() == rows
    assert Ragged.from_row_splits([5, 6, 7], [0, 2, 2, 3]).to_list() == rows


def test_no_values_are_int64():
    assert Ragged.from_lists([[], []]).values.dtype == torch.int64
    assert Ragged.from_lists([]).row_splits.tolist() == [0]


def test_two_ragged_dimensions_nest():
    rows = [[[0, 2], [1]], [[3, 5]]]
    ragged = Ragged.from_lists(rows)
    assert isinstance(ragged.values, Ragged)
    assert ragged.to_list() == rows


@pytest.mark.parametrize(
    ("splits", "message"),
    [([1, 3], "start at 0"), ([0, 2], "end at"), ([0, 2, 1, 3], "never fall"), ([], "at least one"), ([[0, 3]], "1-D")],
    ids=str,
)
def test_bad_row_splits_are_refused_when_built(splits, message):
    with pytest.raises(ValueError, match=message):
        Ragged([1, 2, 3], torch.tensor(splits, dtype=torch.int64))


def test_bad_lengths_and_dtypes_are_refused():
    with pytest.raises(ValueError, match="-1"):
        Ragged.from_row_lengths([1], [2, -1])
    for lengths in ([1.5, 1.2], torch.tensor([1.5, 1.2])):
        with pytest.raises(ValueError, match="row lengths must be int64"):
            Ragged.from_row_lengths([1, 2], lengths)
    with pytest.raises(ValueError, match="float32"):
        Ragged([1], torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match="scalar"):
        Ragged(torch.tensor(1), [0, 1])


def test_strided_row_splits_are_read_by_value():
    splits = torch.tensor([0, 9, 2, 9, 3])[::2]
    assert Ragged([5, 6, 7], splits).to_list() == [[5, 6], [7]]


def test_it_is_a_container_for_torch():
    ragged = Ragged.from_lists([[1], [2, 3]])
    doubled = torch.utils._pytree.tree_map(lambda t: t * 1, ragged)
    assert doubled.to_list() == [[1], [2, 3]]
