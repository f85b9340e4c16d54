"""Combiners against their reference, and sums of gradients by id."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.nn.read.combine import combine
from shoal.nn.read.plan import Feature
from shoal.nn.update.gradients import Gradients, sum_by_id
from shoal.table.pooling import pool, pool_equal, pool_reference
from shoal.table.protocol import FIRSTN, MAX, MEAN, SQRTN, SUM

KINDS = [SUM, MEAN, SQRTN, MAX, FIRSTN]


def compare(lengths, dim, kind, length, weighted, seed=0, padding=None):
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    ids = torch.randint(0, 3, (n,), generator=generator)
    rows = torch.randn(n, dim, generator=generator)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    weights = torch.randn(n, generator=generator) if weighted else None
    keep = torch.ones(n, dtype=torch.bool) if padding is None else ids != padding
    rows[~keep] = 0  # as in padding from groups
    ours, theirs = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    our_weights, their_weights = (None if weights is None else weights.clone().requires_grad_() for _ in range(2))
    out = combine(Feature(0, kind, length), ours, ids, offsets, our_weights, padding)
    left = torch.cat([torch.zeros(1, dtype=torch.int64), keep.cumsum(0)])[offsets]
    kept = None if their_weights is None else their_weights[keep]
    expected = pool_reference(theirs[keep], left, kept, kind, length)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():  # the native implementation
        native = combine(Feature(0, kind, length), ours, ids, offsets, our_weights, padding)
    torch.testing.assert_close(native, expected.detach(), rtol=1e-5, atol=1e-5)
    if kind in (MAX, FIRSTN):
        assert torch.equal(native, out.detach())
    grad = torch.randn(out.shape, generator=generator)
    out.backward(grad)
    if expected.requires_grad:
        expected.backward(grad)
    want = torch.zeros_like(rows) if theirs.grad is None else theirs.grad
    torch.testing.assert_close(ours.grad[keep], want[keep])
    if weighted:
        want = torch.zeros(n) if their_weights.grad is None else their_weights.grad
        torch.testing.assert_close(our_weights.grad, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [1, 7])
@pytest.mark.parametrize("lengths", [[], [0], [3], [0, 2, 0, 5], [1] * 40], ids=str)
def test_matches_the_reference(lengths, dim, kind, weighted, padding):
    compare(lengths, dim, kind, 3 if kind == FIRSTN else 0, weighted, padding=padding)


@given(
    st.lists(st.integers(0, 9), max_size=30),
    st.integers(1, 20),
    st.sampled_from(KINDS),
    st.integers(1, 6),
    st.booleans(),
    st.integers(0, 2**31),
    st.sampled_from([None, 0, 2]),
)
def test_matches_the_reference_on_drawn_sizes(lengths, dim, kind, length, weighted, seed, padding):
    compare(lengths, dim, kind, length, weighted, seed, padding)


def test_rows_that_share_a_maximum_share_its_gradient():
    rows = torch.tensor([[2.0], [2.0], [1.0]], requires_grad=True)
    combine(Feature(0, MAX), rows, torch.arange(3), torch.tensor([0, 3]), None, None).backward(torch.ones(1, 1))
    assert rows.grad.tolist() == [[0.5], [0.5], [0.0]]


@given(st.lists(st.integers(-3, 3), max_size=40), st.integers(1, 20))
def test_sums_by_id_match_index_add(ids, dim):
    ids = torch.tensor(ids, dtype=torch.int64)
    rows = torch.randn(len(ids), dim)
    distinct, sums = sum_by_id(ids, rows)
    assert distinct.tolist() == list(dict.fromkeys(ids.tolist()))
    for one, total in zip(distinct.tolist(), sums, strict=True):
        torch.testing.assert_close(total, rows[ids == one].sum(0), rtol=1e-5, atol=1e-5)


def test_a_long_accumulation_takes_the_memory_of_its_distinct_ids(monkeypatch):
    monkeypatch.setattr("shoal.nn.update.gradients._SUM_ROWS", 100)
    gradients = Gradients(2)
    for _ in range(50):
        gradients.add(torch.arange(10), torch.ones(10, 2))
    assert len(gradients) <= 200 + 10
    ids, sums = gradients.sums()
    assert ids.tolist() == list(range(10))
    assert bool((sums == 50).all())


def test_bags_of_one_length_are_pooled_as_others_and_nan_is_the_largest():
    ids = torch.tensor([[1, 2, 0], [0, 0, 0], [3, 1, 2]])
    rows = torch.arange(18.0).view(9, 2)
    rows[6, 0] = torch.nan
    for kind in (SUM, MEAN, SQRTN, MAX):
        for padding in (None, 0):
            found = pool_equal(rows, ids, kind, padding=padding)
            watched = pool_equal(rows.clone().requires_grad_(), ids, kind, padding=padding).detach()
            torch.testing.assert_close(found, watched, equal_nan=True)
    assert pool_equal(rows[:0], ids[:0], MAX).shape == (0, 2)
    assert pool_equal(rows[:3], ids[:, :1], MEAN) is not None


def test_native_pooling_refuses_offsets_that_fall():
    with pytest.raises(ValueError, match="offsets must never fall, but do at bag 1"):
        pool(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64), torch.tensor([0, 2, 1, 3]), MAX)
