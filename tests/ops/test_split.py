"""`split_by_indices` and `ragged_split_by_indices`: values, gradients, errors, threads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import Ragged
from shoal.ops import ragged_split_by_indices, split_by_indices
from shoal.ops.split import reference


def test_worked_example_with_gradient():
    tensor = torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]], requires_grad=True)
    outs = split_by_indices([2, 0, 2, 0], tensor, 3)
    assert [o.tolist() for o in outs] == [[[3, 4], [7, 8]], [], [[1, 2], [5, 6]]]
    assert outs[1].shape == (0, 2)
    grads = [torch.tensor([[10.0, 11], [12, 13]]), torch.zeros(0, 2), torch.tensor([[14.0, 15], [16, 17]])]
    torch.autograd.backward(outs, grads)
    assert tensor.grad.tolist() == [[14, 15], [10, 11], [16, 17], [12, 13]]


def test_an_output_without_gradient_counts_as_zero():
    tensor = torch.ones(3, 2, requires_grad=True)
    split_by_indices([0, 1, 0], tensor, 2)[1].sum().backward()
    assert tensor.grad.tolist() == [[0, 0], [1, 1], [0, 0]]


def test_nothing_splits_into_empty_parts():
    tensor = torch.zeros(0, 3, requires_grad=True)
    outs = split_by_indices(torch.zeros(0, dtype=torch.int64), tensor, 4)
    assert [o.shape for o in outs] == [(0, 3)] * 4
    sum(o.sum() for o in outs).backward()
    assert tensor.grad.shape == (0, 3)


def test_one_part_is_a_copy():
    tensor = torch.arange(3.0)
    (out,) = split_by_indices([0, 0, 0], tensor, 1)
    out.zero_()
    assert tensor.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.float64, torch.complex128],
    ids=str,
)
@pytest.mark.parametrize("shape", [(7,), (7, 1), (7, 3, 5), (7, 0)], ids=str)
def test_rows_of_any_dtype_and_shape_are_copied(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    indices = torch.tensor([3, 0, 0, 1, 3, 0, 1])
    for out, want in zip(
        split_by_indices(indices, tensor, 5), reference.split_by_indices(indices, tensor, 5), strict=True
    ):
        assert out.dtype == dtype
        assert torch.equal(out, want)


def test_strided_inputs_are_read_by_value_and_left_alone():
    tensor = torch.arange(24.0).view(4, 6).t()[::2]
    indices = torch.tensor([1, 9, 0, 9, 1])[::2]
    before = tensor.clone()
    outs = split_by_indices(indices, tensor, 2)
    assert torch.equal(outs[0], tensor[1:2])
    assert torch.equal(outs[1], tensor[[0, 2]])
    assert torch.equal(tensor, before)


@pytest.mark.parametrize(
    ("indices", "tensor", "parts", "message"),
    [
        ([0, 1], [1.0, 2.0], 0, "num_splits"),
        ([[0], [1]], [1.0, 2.0], 2, "1-D"),
        ([0, 1, 1], [1.0, 2.0], 2, "3"),
        ([0, 2], [1.0, 2.0], 2, "got 2"),
        ([0, -1], [1.0, 2.0], 2, "got -1"),
        ([0], 5.0, 2, "scalar"),
        ([0.5], [1.0], 2, "float"),
    ],
)
def test_bad_arguments_are_refused_with_the_value(indices, tensor, parts, message):
    with pytest.raises(ValueError, match=message):
        split_by_indices(indices, tensor, parts)


@given(st.data())
def test_split_and_gradient_match_the_reference(data):
    parts = data.draw(st.integers(1, 9))
    indices = torch.tensor(data.draw(st.lists(st.integers(0, parts - 1), max_size=40)), dtype=torch.int64)
    tensor = torch.randn(len(indices), data.draw(st.integers(1, 5)), dtype=torch.float64, requires_grad=True)
    outs = split_by_indices(indices, tensor, parts)
    wants = reference.split_by_indices(indices, tensor, parts)
    for out, want in zip(outs, wants, strict=True):
        assert torch.equal(out, want)
    grads = [torch.randn_like(o) for o in outs]
    (grad,) = torch.autograd.grad(outs, tensor, grads)
    (want,) = torch.autograd.grad(wants, tensor, grads)
    assert torch.equal(grad, want)


def test_gradcheck():
    tensor = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: split_by_indices([0, 2, 2, 0, 3, 0], t, 4), tensor)


def test_large_splits_are_the_same_for_any_thread_count(same_for_any_thread_count):
    indices = torch.randint(0, 37, (200_001,))
    tensor = torch.randn(200_001, 3)
    outs = same_for_any_thread_count(lambda: split_by_indices(indices, tensor, 37))
    for s in range(37):
        assert torch.equal(outs[s], tensor[indices == s])
    ragged = Ragged.from_row_lengths(torch.arange(200_001), [0, 100_000, 0, 1, 99_999, 1, 0])
    same_for_any_thread_count(lambda: ragged_split_by_indices(indices, ragged, 37))


def test_ragged_worked_examples():
    splits, pos = ragged_split_by_indices([1, 0, 1, 2], [[50, 60], [], [70, 80]], 3)
    assert [s.to_list() for s in splits] == [[[60], [], []], [[50], [], [70]], [[], [], [80]]]
    assert [p.to_list() for p in pos] == [[[1], [], []], [[0], [], [2]], [[], [], [3]]]
    splits, pos = ragged_split_by_indices([0, 1, 1, 0, 1], Ragged.from_lists([[9, 8], [], [7, 6, 5]]), 2)
    assert [s.to_list() for s in splits] == [[[9], [], [6]], [[8], [], [7, 5]]]
    assert [p.to_list() for p in pos] == [[[0], [], [3]], [[1], [], [2, 4]]]


def test_ragged_without_values_keeps_its_rows():
    splits, pos = ragged_split_by_indices([], Ragged.from_lists([[], [], []]), 2)
    assert [s.row_splits.tolist() for s in splits + pos] == [[0, 0, 0, 0]] * 4
    assert ragged_split_by_indices([], Ragged.from_lists([]), 1)[0][0].to_list() == []


@given(st.data())
def test_ragged_split_matches_the_reference_and_restores_the_values(data):
    parts = data.draw(st.integers(1, 6))
    rows = data.draw(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6), max_size=8))
    num = Ragged.from_lists(rows)
    n = num.values.shape[0]
    indices = torch.tensor(data.draw(st.lists(st.integers(0, parts - 1), min_size=n, max_size=n)), dtype=torch.int64)
    splits, pos = ragged_split_by_indices(indices, num, parts)
    values, places, row_splits = reference.ragged_split_by_indices(indices, num.values, num.row_splits, parts)
    restored = torch.zeros_like(num.values)
    for s in range(parts):
        assert torch.equal(splits[s].values, values[s])
        assert torch.equal(pos[s].values, places[s])
        assert torch.equal(splits[s].row_splits, row_splits[s])
        assert torch.equal(pos[s].row_splits, row_splits[s])
        restored[pos[s].values] = splits[s].values
    assert torch.equal(restored, num.values)


def test_ragged_errors():
    num = Ragged.from_lists([[1, 2], [3]])
    with pytest.raises(ValueError, match="2"):
        ragged_split_by_indices([0, 0], num, 2)
    with pytest.raises(ValueError, match="got 5"):
        ragged_split_by_indices([0, 5, 0], num, 2)
    with pytest.raises(ValueError, match="num_splits"):
        ragged_split_by_indices([0, 0, 0], num, 0)
    num.row_splits[-1] = 2  # damaged after it was built
    with pytest.raises(ValueError, match="end at"):
        ragged_split_by_indices([0, 0, 0], num, 2)
    with pytest.raises(ValueError, match="Tensor"):
        ragged_split_by_indices([0], torch.tensor([1]), 2)
