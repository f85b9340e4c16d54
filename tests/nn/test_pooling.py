"""The native pooling kernels against their reference in plain torch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import _core
from shoal.nn.gradients import Gradients, sum_by_id
from shoal.nn.pooling import FIRSTN, MEAN, SUM, pool, pool_gradient, pool_reference


def compare(lengths, dim, kind, length, weighted, seed=0):
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    rows = torch.randn(n, dim, generator=generator, requires_grad=True)
    weights = torch.randn(n, generator=generator, requires_grad=True) if weighted else None
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    expected = pool_reference(rows, offsets, weights, kind, length)
    out = pool(rows.detach(), offsets, None if weights is None else weights.detach(), kind, length)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-5)
    grad = torch.randn(out.shape, generator=generator)
    if expected.requires_grad:
        expected.backward(grad)
    grad_rows, grad_weights = pool_gradient(
        grad,
        n,
        dim,
        offsets,
        None if weights is None else weights.detach(),
        rows.detach() if weighted else None,
        kind,
        length,
    )
    want = torch.zeros(n, dim) if rows.grad is None else rows.grad
    torch.testing.assert_close(grad_rows, want, rtol=1e-5, atol=1e-5)
    if weighted:
        want = torch.zeros(n) if weights.grad is None else weights.grad
        torch.testing.assert_close(grad_weights, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", [SUM, MEAN, FIRSTN])
@pytest.mark.parametrize("dim", [1, 7, 16, 64, 131])
@pytest.mark.parametrize("lengths", [[], [0], [3], [0, 2, 0, 5], [1] * 40], ids=str)
def test_matches_the_reference(lengths, dim, kind, weighted):
    compare(lengths, dim, kind, 3 if kind == FIRSTN else 0, weighted)


@given(
    st.lists(st.integers(0, 9), max_size=30),
    st.integers(1, 70),
    st.sampled_from([SUM, MEAN, FIRSTN]),
    st.integers(1, 6),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_matches_the_reference_on_drawn_sizes(lengths, dim, kind, length, weighted, seed):
    compare(lengths, dim, kind, length, weighted, seed)


def test_many_bags_and_one_huge_bag_are_split_over_threads_right():
    compare([5000, 0, *[3] * 3000], 17, SUM, 0, True)
    compare([20000], 8, MEAN, 0, False)


def test_native_code_refuses_offsets_that_would_leave_the_rows():
    rows = torch.zeros(4, 2)
    for offsets in ([0, 5], [0, -1, 4], [0, 9, 4], [1, 4]):
        with pytest.raises(ValueError, match="offsets"):
            pool(rows, torch.tensor(offsets), None, SUM, 0)
    with pytest.raises(ValueError, match="length"):
        pool(rows, torch.tensor([0, 4]), None, FIRSTN, 0)
    offsets = torch.tensor([0, 4])
    with pytest.raises(ValueError, match="pooling"):
        _core.pool(offsets.data_ptr(), 1, rows.data_ptr(), 4, 2, 17, 0, 0, rows.data_ptr())


@given(st.lists(st.integers(-3, 3), max_size=40), st.integers(1, 20))
def test_sums_by_id_match_index_add(ids, dim):
    ids = torch.tensor(ids, dtype=torch.int64)
    rows = torch.randn(len(ids), dim)
    distinct, sums = sum_by_id(ids, rows)
    assert distinct.tolist() == list(dict.fromkeys(ids.tolist()))
    for one, total in zip(distinct.tolist(), sums, strict=True):
        torch.testing.assert_close(total, rows[ids == one].sum(0), rtol=1e-5, atol=1e-5)


def test_a_long_accumulation_takes_the_memory_of_its_distinct_ids(monkeypatch):
    monkeypatch.setattr("shoal.nn.gradients._SUM_ROWS", 100)
    gradients = Gradients(2)
    for _ in range(50):
        gradients.add(torch.arange(10), torch.ones(10, 2))
    assert len(gradients) <= 200 + 10
    ids, sums = gradients.sums()
    assert ids.tolist() == list(range(10))
    assert bool((sums == 50).all())
