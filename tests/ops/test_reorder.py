"""`reorder_by_indices` and `fused_reorder_by_indices`: values, environment, errors, threads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.ops import fused_gather_embeddings_by_input, fused_reorder_by_indices, reorder_by_indices
from shoal.ops.reorder import reference

VARIABLE = "MONOLITH_SYNC_EMPTY_RANK0_PS_SHARD"
INT64 = st.integers(-(2**63), 2**63 - 1)


def test_worked_examples_of_reorder():
    output, sizes = reorder_by_indices([10, 11, 12, 10, 14, 13], [0, 1, 0, 0, 0, 1], 2)
    assert output.tolist() == [14, 12, 10, 13, 11]
    assert sizes.tolist() == [3, 2]
    assert (output.dtype, sizes.dtype) == (torch.int64, torch.int32)
    output, sizes = reorder_by_indices([[1, 9], [2, 8], [1, 7]], [0, 0, 0], 1)
    assert output.tolist() == [[2, 8], [1, 9]]
    assert output.dtype == torch.float32
    assert sizes.tolist() == [2]


def test_the_first_occurrence_decides_the_shard():
    output, sizes = reorder_by_indices([7, 7], torch.tensor([1, 0], dtype=torch.int32), 2)
    assert output.tolist() == [7]
    assert sizes.tolist() == [0, 1]


def test_nothing_reorders_to_nothing():
    output, sizes = reorder_by_indices([], [], 3)
    assert (output.tolist(), sizes.tolist(), output.dtype) == ([], [0, 0, 0], torch.int64)
    output, sizes = reorder_by_indices(torch.zeros(0, 4), [], 3)
    assert output.shape == (0, 4)


def test_float_keys_compare_as_numbers():
    nan = float("nan")
    output, _ = reorder_by_indices(torch.tensor([[0.0], [-0.0], [nan], [nan], [1.5]]), [0] * 5, 1)
    assert output.shape == (4, 1)  # one zero, both NaNs


@pytest.mark.parametrize(
    ("input", "shards", "n", "message"),
    [
        ([1, 2], [0], 1, "1"),
        ([1, 2], [0, 2], 2, "got 2"),
        ([1, 2], [0, -1], 2, "got -1"),
        ([1, 2], [0, 0], 0, "num_of_shards"),
        (torch.zeros(2, 2, 2), [0, 0], 1, "1-D or 2-D"),
    ],
)
def test_bad_arguments_of_reorder_are_refused(input, shards, n, message):
    with pytest.raises(ValueError, match=message):
        reorder_by_indices(input, shards, n)


@given(st.data())
def test_reorder_matches_the_reference(data):
    shards = data.draw(st.integers(1, 5))
    ids = torch.tensor(data.draw(st.lists(st.one_of(st.integers(-4, 4), INT64), max_size=50)), dtype=torch.int64)
    shard_ids = torch.tensor(
        data.draw(st.lists(st.integers(0, shards - 1), min_size=len(ids), max_size=len(ids))), dtype=torch.int64
    )
    output, sizes = reorder_by_indices(ids, shard_ids, shards)
    order, want = reference.reorder_by_indices(ids, shard_ids, shards)
    assert torch.equal(output, ids[order])
    assert torch.equal(sizes, want)


def test_fused_worked_examples(monkeypatch):
    got = fused_reorder_by_indices([[9, 4, 9, 7], [], [4, 5, 4]], 2, [2, 5, 3])
    assert [t.tolist() for t in got] == [
        [4, 4, 9, 7, 5], [2, 3], [1, 0, 1, 2, 0, 1], [4, 0, 3], [5, 0, 5, 7, 2, 9, 2],
    ]  # fmt: skip
    assert [t.dtype for t in got] == [torch.int64] + [torch.int32] * 4
    monkeypatch.delenv(VARIABLE, raising=False)
    got = fused_reorder_by_indices([[0, 1, 2, 3, 4, 5]], 5, [2])
    assert got.output.tolist() == [0, 4, 1, 5, 2, 3]
    assert got.shard_sizes.tolist() == [0, 2, 2, 1, 1]
    assert got.fused_embedding_offsets.tolist() == [0, 4, 8, 10, 2, 6]
    monkeypatch.setenv(VARIABLE, "0")
    got = fused_reorder_by_indices([[0, 1, 2, 3, 4, 5]], 5, [2])
    assert got.output.tolist() == [0, 5, 1, 2, 3, 4]
    assert got.shard_sizes.tolist() == [2, 1, 1, 1, 1]
    assert got.fused_embedding_offsets.tolist() == [0, 4, 6, 8, 10, 2]


def test_the_keyword_overrides_the_environment(monkeypatch):
    ids = [[0, 1, 2, 3]]
    for value in ("0", "1"):
        monkeypatch.setenv(VARIABLE, value)
        assert fused_reorder_by_indices(ids, 2, [1], rank0_empty_shard=True).shard_sizes.tolist() == [0, 4]
        assert fused_reorder_by_indices(ids, 5, [1], rank0_empty_shard=False).shard_sizes.tolist() == [1, 1, 1, 1, 0]
    assert fused_reorder_by_indices(ids, 4, [1]).shard_sizes.tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="at least 2"):
        fused_reorder_by_indices(ids, 1, [1], rank0_empty_shard=True)


def test_negative_ids_take_the_floor():
    got = fused_reorder_by_indices([[-1, -3, 2, -(2**63)]], 3, [1])
    for shard, ids in enumerate(got.output.split(got.shard_sizes.tolist())):
        assert all(i % 3 == shard for i in ids.tolist())


def test_all_tables_empty():
    got = fused_reorder_by_indices([[], []], 3, [4, 4])
    assert [t.tolist() for t in got] == [[], [0, 0, 0], [0] * 6, [0, 0], []]


@pytest.mark.parametrize(
    ("inputs", "shards", "dims", "message"),
    [
        ([[1], [2]], 2, [1], "dim_sizes"),
        ([], 2, [], "at least one"),
        ([[[1]]], 2, [1], "1-D"),
        ([[1]], 0, [1], "num_of_shards"),
        ([[1]], 2, [-1], "-1"),
        ([[1, 2, 3]], 2, [2**30], r"2\^31"),
        (torch.tensor([1]), 2, [1], "list"),
    ],
)
def test_bad_arguments_of_fused_reorder_are_refused(inputs, shards, dims, message):
    with pytest.raises(ValueError, match=message):
        fused_reorder_by_indices(inputs, shards, dims)


@given(st.data())
def test_fused_reorder_matches_the_reference(data):
    shards = data.draw(st.integers(1, 7))
    tables = data.draw(st.lists(st.lists(st.one_of(st.integers(-5, 5), INT64), max_size=30), min_size=1, max_size=5))
    dims = data.draw(st.lists(st.integers(0, 5), min_size=len(tables), max_size=len(tables)))
    inputs = [torch.tensor(ids, dtype=torch.int64) for ids in tables]
    empty = data.draw(st.booleans()) and shards > 1
    got = fused_reorder_by_indices(inputs, shards, dims, rank0_empty_shard=empty)
    for out, want in zip(got, reference.fused_reorder_by_indices(inputs, shards, dims, int(empty)), strict=True):
        assert torch.equal(out, want)
        assert out.dtype == want.dtype


@pytest.mark.parametrize("n", [3_000, 150_000, 600_000])
def test_large_tables_are_the_same_for_any_thread_count(n, same_for_any_thread_count):
    torch.manual_seed(0)
    inputs = [
        torch.randint(-(2**62), 2**62, (n // 3,)).repeat(3)[torch.randperm(n // 3 * 3)],
        torch.randint(0, 9, (n,)),
    ]
    inputs.append(inputs[0][::2])
    got = same_for_any_thread_count(lambda: fused_reorder_by_indices(inputs, 7, [2, 1, 3]))
    for out, want in zip(got, reference.fused_reorder_by_indices(inputs, 7, [2, 1, 3], 1), strict=True):
        assert torch.equal(out, want)
    ids, shard_ids = inputs[0], inputs[0].remainder(5)
    output, sizes = same_for_any_thread_count(lambda: reorder_by_indices(ids, shard_ids, 5))
    order, want = reference.reorder_by_indices(ids, shard_ids, 5)
    assert torch.equal(output, ids[order])
    assert torch.equal(sizes, want)


@given(st.data())
def test_gathering_by_the_offsets_is_a_dictionary_lookup(data):
    tables = data.draw(st.lists(st.lists(st.integers(-9, 9), max_size=20), min_size=1, max_size=4))
    dims = data.draw(st.lists(st.integers(1, 4), min_size=len(tables), max_size=len(tables)))
    got = fused_reorder_by_indices(tables, data.draw(st.integers(1, 6)), dims)
    # Each id's vector is computed from its table, its id and the column.
    slots = got.sharded_slot_sizes.view(-1, len(tables)).tolist()
    ids = iter(got.output.tolist())
    flat = [[m, next(ids), c] for sizes in slots for m, size in enumerate(sizes) for _ in range(size) for c in range(1)]
    buffer = [float(1000 * m + 10 * i + c) for m, i, _ in flat for c in range(dims[m])]
    offsets = got.fused_embedding_offsets.split(got.emb_offset_sz.tolist())
    for m, rows in enumerate(fused_gather_embeddings_by_input(torch.tensor(buffer), list(offsets), dims)):
        assert rows.tolist() == [[float(1000 * m + 10 * i + c) for c in range(dims[m])] for i in tables[m]]
