"""`fused_value_rowids`, `normalize_merged_split` and the aligned concat."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import Ragged
from shoal.ops import ALIGN, aligned_flat_concat, aligned_flat_split, fused_value_rowids, normalize_merged_split
from shoal.ops.ragged_ops import normalize_merged_split_reference, row_ids_reference


def test_row_ids_are_made_once():
    ragged = Ragged([7, 8, 9, 10], [0, 0, 3, 3, 4])
    ids = fused_value_rowids(ragged)
    assert ids.tolist() == [1, 1, 1, 3]
    assert fused_value_rowids(ragged) is ids
    assert fused_value_rowids(Ragged.from_lists([[], []])).tolist() == []


def test_row_ids_refuse_what_is_not_ragged():
    with pytest.raises(ValueError, match="Tensor"):
        fused_value_rowids(torch.tensor([0, 1]))
    ragged = Ragged([1, 2], [0, 2])
    ragged.row_splits[0] = 1
    with pytest.raises(ValueError, match="start at 0"):
        fused_value_rowids(ragged)


def test_row_ids_of_a_large_ragged_are_the_same_for_any_thread_count(same_for_any_thread_count):
    lengths = torch.randint(0, 5, (100_000,))
    values = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    ids = same_for_any_thread_count(lambda: fused_value_rowids(Ragged.from_row_lengths(values, lengths)))
    assert torch.equal(ids, row_ids_reference(Ragged.from_row_lengths(values, lengths).row_splits, len(values)))


def test_worked_example_of_merged_splits():
    assert normalize_merged_split([0, 1, 1, 4, 0, 2, 0, 3, 3], [4, 2, 3]).tolist() == [0, 1, 1, 4, 6, 9, 9]
    assert normalize_merged_split([0, 1, 1], torch.tensor([3], dtype=torch.int32)).tolist() == [0, 1, 1]


@given(st.lists(st.lists(st.integers(0, 5), max_size=5), min_size=1, max_size=5))
def test_merged_splits_are_those_of_the_concatenation(lengths):
    splits = [[0, *torch.tensor(l, dtype=torch.int64).cumsum(0).tolist()] for l in lengths]  # noqa: E741
    merged = torch.tensor([x for s in splits for x in s])
    sizes = torch.tensor([len(s) for s in splits])
    want = [0, *torch.tensor([x for l in lengths for x in l], dtype=torch.int64).cumsum(0).tolist()]  # noqa: E741
    assert normalize_merged_split(merged, sizes).tolist() == want
    assert normalize_merged_split_reference(merged, sizes).tolist() == want


@pytest.mark.parametrize(
    "sizes", [[], [2], [4], [0, 3], [-1, 4], [1, 1, 1, 1, 1, 1], [2**62, 2**62], [2**63 - 1, 2**63 - 1, 5]], ids=str
)
@pytest.mark.parametrize("normalize", [normalize_merged_split, normalize_merged_split_reference])
def test_sizes_that_do_not_add_up_are_refused(normalize, sizes):
    with pytest.raises(ValueError, match="row_split_size"):
        normalize(torch.tensor([0, 1, 2]), torch.tensor(sizes, dtype=torch.int64))


def test_worked_example_of_concat():
    a, b = torch.randn(3), torch.randn(17, 1)
    flat = aligned_flat_concat([a, b], 2)
    assert flat.shape == (48,)
    assert torch.equal(flat[:3], 2 * a)
    assert torch.equal(flat[16:33], 2 * b.flatten())
    assert flat[3:16].abs().sum() == 0
    assert flat[33:].abs().sum() == 0
    assert ALIGN == 16


def test_split_is_the_inverse_of_concat_for_many_tensors():
    ranks = torch.randint(1, 5, (1100,), generator=torch.Generator().manual_seed(0), device="cpu").tolist()
    shapes = [torch.randint(1, 6, (rank,)).tolist() for rank in ranks]
    tensors = [torch.randn(s) for s in shapes] + [torch.zeros(0, 3), torch.tensor(5.0), torch.randn(4, 6).t()]
    for out, want in zip(aligned_flat_split(tensors, aligned_flat_concat(tensors)), tensors, strict=True):
        assert torch.equal(out, want)
    assert aligned_flat_concat([]).shape == (0,)


def test_concat_and_split_have_gradients():
    a = torch.randn(3, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, y: aligned_flat_concat([x, y], 3.0), (a, b))
    flat = torch.randn(48, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda f: aligned_flat_split([a.detach(), b.detach()], f), flat)


def test_bad_arguments_of_concat_and_split_are_refused():
    with pytest.raises(ValueError, match="flat has 16"):
        aligned_flat_split([torch.ones(3), torch.ones(1)], torch.ones(16))
    with pytest.raises(ValueError, match="need 32 floats"):
        aligned_flat_split([torch.ones(3), torch.ones(1)], torch.ones(31))
    with pytest.raises(ValueError, match="1-D"):
        aligned_flat_split([torch.ones(3)], torch.ones(4, 4))
    with pytest.raises(ValueError, match="dtype"):
        aligned_flat_concat([torch.ones(3), torch.ones(1).double()])
    with pytest.raises(ValueError, match="int64"):
        aligned_flat_concat([torch.ones(3).long()])
