"""Unique keys, the offset map and the shared buffer: values, gradients, errors, threads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import Ragged
from shoal.ops import (
    SharedTensor,
    fill_with_offset_map,
    fill_with_offset_map_gradient,
    finalize_shared_tensor,
    ragged_split_by_indices,
    unique_key_with_value_and_offset,
)
from shoal.ops.unique import reference


def test_worked_examples_of_unique():
    unique, offset, buffer = unique_key_with_value_and_offset(Ragged.from_lists([[8, 5, 8], [5, 5]]), [1, 2])
    assert unique.to_list() == [[8, 5], [5]]
    assert offset.to_list() == [[[0, 2], [1]], [[3, 5]]]
    assert offset.row_splits.tolist() == unique.row_splits.tolist()
    assert buffer.size == 7
    unique, offset, buffer = unique_key_with_value_and_offset([[5, 6, 5, 5], [5]], [1, 2], False)
    assert unique.to_list() == [[5, 6], [5]]
    assert offset.to_list() == [[[0, 2, 3], [1]], [[4]]]
    assert buffer is None


def test_empty_rows_have_no_keys():
    unique, offset, buffer = unique_key_with_value_and_offset([[], []], [3, 4])
    assert unique.to_list() == [[], []]
    assert offset.values.row_splits.tolist() == [0]
    assert buffer.size == 0
    assert finalize_shared_tensor([buffer], torch.float32, [None]).shape == (0,)


@pytest.mark.parametrize(
    ("key", "dims", "message"), [([[1], [2]], [1], "rows"), ([], [], "at least one"), ([[1]], [-1], "-1")]
)
def test_bad_arguments_of_unique_are_refused(key, dims, message):
    with pytest.raises(ValueError, match=message):
        unique_key_with_value_and_offset(key, dims)


@given(st.data())
def test_unique_matches_the_reference(data):
    rows = data.draw(st.lists(st.lists(st.integers(-6, 6), max_size=15), min_size=1, max_size=6))
    dims = data.draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
    key = Ragged.from_lists(rows)
    unique, offset, buffer = unique_key_with_value_and_offset(key, dims)
    ids, id_splits, offset_splits, offsets, zeros = reference.unique_key_with_value_and_offset(
        key.values, key.row_splits, dims, True
    )
    assert torch.equal(unique.values, ids)
    assert torch.equal(unique.row_splits, id_splits)
    assert torch.equal(offset.values.row_splits, offset_splits)
    assert torch.equal(offset.values.values, offsets)
    assert buffer.size == zeros.shape[0]


def chain(key, dims, shards, vector):
    """Looks every distinct key up once per shard; ``vector(row, key)`` is its value. Returns buffer and leaves."""
    unique, offset, buffer = unique_key_with_value_and_offset(key, dims)
    splits, pos = ragged_split_by_indices(unique.values.remainder(shards), unique, shards)
    handles, values = [], []
    for s in range(shards):
        flat = [x for row, keys in enumerate(splits[s].to_list()) for k in keys for x in vector(row, k)]
        values.append(torch.tensor(flat, dtype=torch.float32, requires_grad=True))
        handles.append(fill_with_offset_map(pos[s], values[s], offset, buffer, dims))
    return finalize_shared_tensor(handles, torch.float32, [None]), values, pos, offset


def test_worked_example_of_fill_and_finalize():
    table = {(0, 8): [10], (0, 5): [20], (1, 5): [30, 31]}
    out, values, _, _ = chain(Ragged.from_lists([[8, 5, 8], [5, 5]]), [1, 2], 2, lambda r, k: table[r, k])
    assert out.tolist() == [10, 20, 10, 30, 31, 30, 31]
    out.backward(torch.arange(1.0, 8))
    assert [v.grad.tolist() for v in values] == [[4], [2, 10, 12]]


@given(st.data())
def test_the_chain_is_a_direct_lookup_for_any_number_of_shards(data):
    rows = data.draw(st.lists(st.lists(st.integers(-6, 6), max_size=12), min_size=1, max_size=4))
    dims = data.draw(st.lists(st.integers(1, 3), min_size=len(rows), max_size=len(rows)))
    shards = data.draw(st.integers(1, 15))

    def vector(row, key):
        return [100 * row + 10 * key + c for c in range(dims[row])]

    out, values, pos, offset = chain(Ragged.from_lists(rows), dims, shards, vector)
    assert out.tolist() == [x for row, keys in enumerate(rows) for k in keys for x in vector(row, k)]
    upstream = torch.randn_like(out)
    out.backward(upstream)
    for s in range(shards):
        want = fill_with_offset_map_gradient(pos[s], upstream, offset, dims)
        if out.is_cpu:
            assert torch.equal(values[s].grad, want)
        torch.testing.assert_close(values[s].grad, want, rtol=1e-5, atol=1e-6)  # a GPU adds in any order
        plain = reference.fill_with_offset_map_gradient(
            pos[s].values, pos[s].row_splits, upstream, offset.values.row_splits, offset.values.values, dims
        )
        torch.testing.assert_close(want, plain, rtol=1e-5, atol=1e-6)


def small():
    return unique_key_with_value_and_offset([[8, 5, 8], [5, 5]], [1, 2])


def test_places_never_filled_are_zero():
    _, offset, buffer = small()
    fill_with_offset_map([[1], []], [3], offset, buffer, [1, 2])
    assert finalize_shared_tensor([buffer], torch.float32, [7]).tolist() == [0, 3, 0, 0, 0, 0, 0]


def test_the_last_writer_wins():
    _, offset, buffer = small()
    fill_with_offset_map([[0, 0], []], [1, 2], offset, buffer, [1, 2])
    assert finalize_shared_tensor([buffer], torch.float32, [None]).tolist()[:3] == [2, 0, 2]
    # Offsets that overlap, made by hand, are written in order too.
    buffer = SharedTensor(torch.zeros(3))
    fill_with_offset_map([[0, 1]], [1, 2, 3, 4], [[[0], [1]]], buffer, [2])
    assert finalize_shared_tensor([buffer], torch.float32, None).tolist() == [1, 3, 4]


def test_a_handle_is_finalized_once():
    _, offset, buffer = small()
    finalize_shared_tensor([buffer, buffer], torch.float32, [None])
    with pytest.raises(ValueError, match="finalized"):
        finalize_shared_tensor([buffer], torch.float32, [None])
    with pytest.raises(ValueError, match="finalized"):
        fill_with_offset_map([[], []], [], offset, buffer, [1, 2])


def test_bad_handles_are_refused():
    _, offset, buffer = small()
    _, _, other = small()
    for handles in ([], [buffer, other], [None]):
        with pytest.raises(ValueError, match="handle"):
            finalize_shared_tensor(handles, torch.float32, [None])
    for shape in ([8], [7, 1], []):
        with pytest.raises(ValueError, match="shape must be"):
            finalize_shared_tensor([buffer], torch.float32, shape)
    with pytest.raises(ValueError, match="float64"):
        finalize_shared_tensor([buffer], torch.float64, [None])
    with pytest.raises(ValueError, match="NoneType"):
        fill_with_offset_map([[], []], [], offset, None, [1, 2])
    assert finalize_shared_tensor([buffer], torch.float32, [7]).shape == (7,)


@pytest.mark.parametrize(
    ("pos", "value", "dims", "message"),
    [
        ([[0]], [1.0], [1, 2], "rows"),
        ([[0], []], [], [1, 2], "1 floats"),
        ([[0], []], [1.0, 2.0], [1, 2], "1 floats"),
        ([[3], []], [1.0], [1, 2], "got 3"),
        ([[-1], []], [1.0], [1, 2], "got -1"),
        ([[], [2]], [1.0, 2.0, 3.0, 4.0], [1, 4], "outside the buffer"),
        ([[0], []], [[1.0]], [1, 2], "1-D"),
    ],
)
def test_a_refused_fill_writes_nothing(pos, value, dims, message):
    _, offset, buffer = small()
    with pytest.raises(ValueError, match=message):
        fill_with_offset_map(Ragged.from_lists(pos), value, offset, buffer, dims)
    assert finalize_shared_tensor([buffer], torch.float32, [None]).tolist() == [0] * 7


def test_bad_arguments_of_the_gradient_are_refused():
    _, offset, _ = small()
    with pytest.raises(ValueError, match="outside the buffer"):
        fill_with_offset_map_gradient([[0], [2]], torch.ones(6), offset, [1, 2])
    with pytest.raises(ValueError, match="got 3"):
        fill_with_offset_map_gradient([[3], []], torch.ones(7), offset, [1, 2])
    with pytest.raises(ValueError, match="two dimensions"):
        fill_with_offset_map_gradient([[0], []], torch.ones(7), Ragged.from_lists([[1]]), [1, 2])


def test_float64_values_fill_a_float32_buffer():
    _, offset, buffer = small()
    value = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    fill_with_offset_map([[0], []], value, offset, buffer, [1, 2])
    out = finalize_shared_tensor([buffer], torch.float32, [None])
    assert out.dtype == torch.float32
    out.sum().backward()
    assert value.grad.tolist() == [2]
    assert value.grad.dtype == torch.float64


def test_large_chains_are_the_same_for_any_thread_count(same_for_any_thread_count):
    torch.manual_seed(0)
    key = Ragged.from_row_lengths(torch.randint(0, 50_000, (300_000,)), [100, 200_000, 0, 99_900])
    dims = [3, 2, 1, 4]

    def run():
        unique, offset, buffer = unique_key_with_value_and_offset(key, dims)
        splits, pos = ragged_split_by_indices(unique.values.remainder(3), unique, 3)
        handles = []
        for s in range(3):
            width = torch.tensor(dims).repeat_interleave(splits[s].row_lengths())
            value = splits[s].values.repeat_interleave(width).float()
            handles.append(fill_with_offset_map(pos[s], value, offset, buffer, dims))
        out = finalize_shared_tensor(handles, torch.float32, [None])
        return out, [fill_with_offset_map_gradient(p, out, offset, dims) for p in pos], unique

    out, _, _ = same_for_any_thread_count(run)
    width = torch.tensor(dims).repeat_interleave(key.row_lengths())
    assert torch.equal(out, key.values.repeat_interleave(width).float())
