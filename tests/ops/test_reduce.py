"""Reductions by index and by row splits: values, gradients, errors, threads."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import Ragged
from shoal.ops import (
    fused_reduce_and_split_gpu,
    fused_reduce_sum_and_split,
    fused_sorted_segment_sum,
    fused_value_rowids,
    reduce_mean,
    reduce_sqrtn,
    reduce_sum,
)
from shoal.ops.reduce import reference

HOW = {reduce_sum: reference.SUM, reduce_mean: reference.MEAN, reduce_sqrtn: reference.SQRTN}
each = pytest.mark.parametrize("reduce", HOW, ids=lambda f: f.__name__)


@pytest.mark.parametrize(
    ("reduce", "out", "grad"),
    [
        (reduce_sum, [[3, 4], [0, 0], [6, 0]], [[4, 8], [1, 1], [4, 8]]),
        (reduce_mean, [[3, 4], [0, 0], [3, 0]], [[2, 4], [1, 1], [2, 4]]),
        (
            reduce_sqrtn,
            [[3, 4], [0, 0], [5.0990195, 2.8284271]],
            [[0.7844645, 5.6568542], [1, 1], [3.9223227, -5.6568542]],
        ),
    ],
)
def test_worked_example(reduce, out, grad):
    values = torch.tensor([[1.0, 2], [3, 4], [5, -2]], requires_grad=True)
    got = reduce([[2], [0], [2]], values, torch.tensor([3]))
    torch.testing.assert_close(got, torch.tensor(out, dtype=torch.float32), rtol=1e-5, atol=1e-6)
    got.backward(torch.tensor([[1.0, 1], [10, 10], [4, 8]]))
    torch.testing.assert_close(values.grad, torch.tensor(grad, dtype=torch.float32), rtol=1e-5, atol=1e-6)


@each
def test_only_column_0_and_length_0_count(reduce):
    values = torch.randn(3, 2)
    indices = torch.tensor([[1, 99], [0, -5], [1, 7]])
    assert torch.equal(reduce(indices, values, [2, 77]), reduce(indices[:, :1], values, [2]))


@each
def test_nothing_reduces_to_zeros(reduce):
    for rows in (0, 3):
        values = torch.zeros(0, 2, requires_grad=True)
        out = reduce(torch.zeros(0, 1, dtype=torch.int64), values, [rows])
        assert out.tolist() == [[0, 0]] * rows
        out.sum().backward()
        assert values.grad.shape == (0, 2)
    assert reduce([], torch.zeros(0, 2), [1]).tolist() == [[0, 0]]


def test_the_gradient_of_a_zero_norm_is_zero():
    values = torch.tensor([[0.0], [0.0]], requires_grad=True)
    reduce_sqrtn([[0], [0]], values, [1]).sum().backward()
    assert values.grad.tolist() == [[0], [0]]


@each
@pytest.mark.parametrize("index", [3, -1])
def test_an_index_out_of_range_is_named(reduce, index):
    with pytest.raises(ValueError, match=f"got {index}"):
        reduce([[0], [index]], [[1.0], [2]], [3])


@each
def test_bad_arguments_are_refused(reduce):
    with pytest.raises(ValueError, match="one index per row"):
        reduce([[0]], [[1.0], [2]], [3])
    with pytest.raises(ValueError, match="k >= 1"):
        reduce([0, 1], [[1.0], [2]], [3])
    with pytest.raises(ValueError, match="2-D"):
        reduce([[0]], [1.0], [3])
    with pytest.raises(ValueError, match="-2"):
        reduce([[0]], [[1.0]], [-2])
    with pytest.raises(ValueError, match="id_length"):
        reduce([[0]], [[1.0]], [])


@each
@given(data=st.data())
def test_values_and_gradients_match_the_reference(reduce, data):
    rows = data.draw(st.integers(1, 6))
    ids = data.draw(st.lists(st.integers(0, rows - 1), max_size=25))
    ids = sorted(ids) if data.draw(st.booleans()) else ids
    index = torch.tensor(ids, dtype=torch.int64)
    values = torch.randn(len(ids), data.draw(st.integers(0, 70)), dtype=torch.float64, requires_grad=True)
    out = reduce(index[:, None], values, [rows])
    want = reference.reduce_by_index(index, values, rows, HOW[reduce])
    torch.testing.assert_close(out, want)
    upstream = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, values, upstream)
    plain = reference.reduce_by_index_backward(upstream, index, HOW[reduce], values.detach(), want.detach())
    torch.testing.assert_close(grad, plain)


@each
def test_gradcheck(reduce):
    values = torch.rand(5, 3, dtype=torch.float64).add(0.5).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: reduce([[4], [0], [4], [1], [4]], v, [6]), values)


@each
@pytest.mark.parametrize("dim", [1, 3, 8, 64, 200])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_large_reductions_are_the_same_for_any_thread_count(reduce, dim, is_sorted, same_for_any_thread_count):
    torch.manual_seed(0)
    n, rows = 40_000, 5_000
    index = torch.randint(0, rows - 7, (n,))
    index = index.sort().values if is_sorted else index
    values = torch.randn(n, dim)
    out = same_for_any_thread_count(lambda: reduce(index[:, None], values, [rows]))
    want = reference.reduce_by_index(index, values.double(), rows, HOW[reduce]).float()
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_sums_run_in_input_order():
    values = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    assert reduce_sum([[0]] * 4, values, [1]).item() == 1.0  # (1e8 + 1) rounds to 1e8
    assert reduce_sum([[0], [1], [0], [1]], values[[0, 1, 2, 3]], [2]).tolist() == [[0], [2]]


def test_worked_example_of_segment_sum():
    values = [
        torch.tensor([[1.0], [2]], requires_grad=True),
        torch.tensor([[1.0, 2], [3, 4], [5, 6]], requires_grad=True),
    ]
    outs = fused_sorted_segment_sum(
        [[0, 2], torch.tensor([1, 1, 1], dtype=torch.int32)], values, [[3, 1], torch.tensor([2, 2])]
    )
    assert [o.tolist() for o in outs] == [[[1], [0], [2]], [[0, 0], [9, 12]]]
    (outs[0] * torch.tensor([[5.0], [6], [7]])).sum().backward()
    assert values[0].grad.tolist() == [[5], [7]]
    assert values[1].grad is None or values[1].grad.abs().sum() == 0


def test_segment_sum_takes_any_order_rank_and_no_elements():
    (out,) = fused_sorted_segment_sum([[2, 0, 2]], [torch.tensor([1.0, 2, 3])], [(4,)])
    assert out.tolist() == [2, 0, 4, 0]
    value = torch.randn(3, 2, 2)
    (out,) = fused_sorted_segment_sum([[1, 0, 1]], [value], [[2, 2, 2]])
    torch.testing.assert_close(out, torch.stack([value[1], value[0] + value[2]]))
    (out,) = fused_sorted_segment_sum([[]], [torch.zeros(0, 3)], [[2, 3]])
    assert out.tolist() == [[0] * 3] * 2
    assert fused_sorted_segment_sum([], [], []) == []


@pytest.mark.parametrize(
    ("indices", "values", "shapes", "message"),
    [
        ([[0]], [[[1.0]]], [], "one length"),
        ([[0, 1]], [[[1.0]]], [[2, 1]], "one index per row"),
        ([[2]], [[[1.0]]], [[2, 1]], "got 2"),
        ([[0]], [[[1.0]]], [[2, 2]], "does not fit"),
        ([0], [[[1.0]]], [[2, 1]], "1-D"),
        ([[0]], [1.0], [[]], "does not fit"),
    ],
)
def test_bad_arguments_of_segment_sum_are_refused(indices, values, shapes, message):
    with pytest.raises(ValueError, match=message):
        fused_sorted_segment_sum(indices, values, shapes)


def test_worked_example_of_sum_and_split():
    values = torch.tensor([[1.0, 2, 3, 4], [10, 20, 30, 40], [5, 6, 7, 8]], requires_grad=True)
    outs = fused_reduce_sum_and_split([1, 1, 0], values, torch.tensor(3), [1, 3])
    assert [o.tolist() for o in outs] == [[[5], [11], [0]], [[6, 7, 8], [22, 33, 44], [0, 0, 0]]]
    outs[1].backward(torch.arange(9.0).view(3, 3))
    assert values.grad.tolist() == [[0, 3, 4, 5], [0, 3, 4, 5], [0, 0, 1, 2]]
    assert [o.shape for o in fused_reduce_sum_and_split([], torch.zeros(0, 3), 2, [1, 2])] == [(2, 1), (2, 2)]


def test_bad_arguments_of_sum_and_split_are_refused():
    with pytest.raises(ValueError, match="split_dims"):
        fused_reduce_sum_and_split([0], [[1.0, 2]], 1, [1])
    with pytest.raises(ValueError, match="got 1"):
        fused_reduce_sum_and_split([1], [[1.0, 2]], 1, [1, 1])
    with pytest.raises(ValueError, match="one index per row"):
        fused_reduce_sum_and_split([0, 0], [[1.0, 2]], 1, [2])


def test_worked_example_of_reduce_and_split():
    rows = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]], requires_grad=True)
    outs = fused_reduce_and_split_gpu([[0, 2, 2, 3]], [rows], [[1, 2]])
    assert [o.tolist() for o in outs] == [[[5], [0], [7]], [[7, 9], [0, 0], [8, 9]]]
    grads = [torch.tensor([[1.0], [2], [3]]), torch.tensor([[10.0, 11], [12, 13], [14, 15]])]
    torch.autograd.backward(outs, grads)
    assert rows.grad.tolist() == [[1, 10, 11], [1, 10, 11], [3, 14, 15]]


@pytest.mark.parametrize(
    ("splits", "rows", "slices", "message"),
    [
        ([[0, 1], [0, 1, 1]], [[[1.0]], [[1.0]]], [[1], [1]], "same B"),
        ([[1, 1]], [[[1.0]]], [[1]], "start at 0"),
        ([[0, 2]], [[[1.0]]], [[1]], "end at"),
        ([[0, 2, 1]], [[[1.0]]], [[1]], "never fall"),
        ([[0, 1]], [[[1.0]]], [[2]], "slice_dims"),
        ([[0, 1]], [[[1.0]], [[1.0]]], [[1]], "one length"),
        ([[0, 1]], [[1.0]], [[1]], "2-D"),
    ],
)
def test_bad_arguments_of_reduce_and_split_are_refused(splits, rows, slices, message):
    with pytest.raises(ValueError, match=message):
        fused_reduce_and_split_gpu(splits, rows, slices)


def assert_equal_sums(a, b):
    """Exactly, but for a GPU's kernels, which add in any order."""
    close = 1e-12 if a.is_cuda or os.environ.get("TRITON_INTERPRET") == "1" else 0
    torch.testing.assert_close(a, b, rtol=close, atol=close)


@given(st.data())
def test_the_reductions_agree(data):
    lengths = data.draw(st.lists(st.integers(0, 5), max_size=6))
    cut = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    n, batch = sum(lengths), len(lengths)
    ragged = Ragged.from_row_lengths(torch.zeros(n, dtype=torch.int64), lengths)
    rows = torch.randn(n, sum(cut), dtype=torch.float64, requires_grad=True)
    ids = fused_value_rowids(ragged)
    by_splits = fused_reduce_and_split_gpu([ragged.row_splits, ragged.row_splits], [rows, rows], [cut, [sum(cut)]])
    by_index = fused_reduce_sum_and_split(ids, rows, batch, cut)
    whole = reduce_sum(ids[:, None], rows, [batch])
    for a, b, c in zip(by_splits, by_index, whole.split(cut, 1), strict=False):
        assert_equal_sums(a, b)
        assert_equal_sums(a, c)
    assert_equal_sums(by_splits[-1], whole)
    upstream = torch.randn_like(whole)
    want = upstream.repeat_interleave(torch.tensor(lengths, dtype=torch.int64), 0)
    for outs, grads in (
        (by_splits[:-1], upstream.split(cut, 1)),
        (by_index, upstream.split(cut, 1)),
        ([whole], [upstream]),
    ):
        assert torch.equal(torch.autograd.grad(outs, rows, grads)[0], want)


def test_gradcheck_of_the_fused_forms():
    rows = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: fused_reduce_and_split_gpu([[0, 0, 3, 4]], [r], [[1, 2]]), rows)
    assert torch.autograd.gradcheck(lambda r: fused_reduce_sum_and_split([3, 0, 3, 1], r, 4, [2, 1]), rows)
    assert torch.autograd.gradcheck(lambda r: fused_sorted_segment_sum([[3, 0, 3, 1]], [r], [[4, 3]]), rows)


def test_many_tables_equal_a_scatter_add(same_for_any_thread_count):
    lengths = torch.randperm(64)
    splits = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    widths = range(1, 40, 3)
    rows = [torch.ones(int(splits[-1]), w) for w in widths]
    cuts = [[1] * w if w < 4 else [w // 4] * 3 + [w - 3 * (w // 4)] for w in widths]
    outs = same_for_any_thread_count(lambda: fused_reduce_and_split_gpu([splits] * len(rows), rows, cuts))
    assert len(outs) == sum(len(c) for c in cuts)
    assert all(torch.equal(o, lengths.float()[:, None].expand_as(o)) for o in outs)
