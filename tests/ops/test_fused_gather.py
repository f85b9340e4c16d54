"""`fused_gather_embeddings_by_input` and its gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.ops import fused_gather_embeddings_by_input as gather
from shoal.ops import fused_gather_embeddings_by_input_gradient as gather_gradient
from shoal.ops.fused_gather import reference

OFFSETS = [torch.tensor([5, 0, 5, 7], dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.tensor([2, 9, 2])]
DIMS = [2, 5, 3]


def test_worked_example():
    buffer = torch.arange(12.0, requires_grad=True)
    outs = gather(buffer, OFFSETS, DIMS)
    assert [o.tolist() for o in outs] == [
        [[5, 6], [0, 1], [5, 6], [7, 8]], [], [[2, 3, 4], [9, 10, 11], [2, 3, 4]],
    ]  # fmt: skip
    assert outs[1].shape == (0, 5)
    sum(o.sum() for o in outs).backward()
    want = [1, 1, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1]
    assert buffer.grad.tolist() == want
    ones = [torch.ones_like(o) for o in outs]
    assert gather_gradient(12, ones, OFFSETS, DIMS).tolist() == want
    half = gather_gradient(torch.tensor([12], dtype=torch.int32), ones, OFFSETS, DIMS, scale=0.5)
    assert half.tolist() == [x / 2 for x in want]


def test_a_buffer_of_any_shape_is_read_flat():
    buffer = torch.arange(12.0).view(3, 4).t().requires_grad_()
    outs = gather(buffer, [[1], [0]], [2, 3])
    assert outs[0].tolist() == [[4, 8]]
    outs[1].sum().backward()
    assert buffer.grad.shape == (4, 3)
    assert buffer.grad.flatten().tolist() == [1, 1, 1] + [0] * 9


def test_no_tables_and_no_rows():
    assert gather(torch.ones(3), [], []) == []
    assert gather_gradient(3, [], [], []).tolist() == [0, 0, 0]
    assert gather_gradient(0, [torch.ones(0, 2)], [[]], [2]).tolist() == []


@pytest.mark.parametrize("offset", [-1, 11, 2**31 - 1])
def test_an_offset_out_of_the_buffer_is_named(offset):
    with pytest.raises(ValueError, match=str(offset)):
        gather(torch.ones(12), [[0, offset]], [2])
    with pytest.raises(ValueError, match=str(offset)):
        gather_gradient(12, [torch.ones(2, 2)], [[0, offset]], [2])


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="widths"):
        gather(torch.ones(3), [[0]], [1, 2])
    with pytest.raises(ValueError, match="1-D"):
        gather(torch.ones(3), [[[0]]], [1])
    with pytest.raises(ValueError, match=r"grads\[0\]"):
        gather_gradient(3, [torch.ones(1, 2)], [[0]], [1])
    with pytest.raises(ValueError, match="number of grads"):
        gather_gradient(3, [], [[0]], [1])
    with pytest.raises(ValueError, match="-3"):
        gather_gradient(-3, [torch.ones(1, 1)], [[0]], [1])


@given(st.data())
def test_gather_and_gradient_match_the_reference(data):
    size = data.draw(st.integers(1, 40))
    dims = data.draw(st.lists(st.integers(0, min(size, 9)), max_size=4))
    offsets = [torch.tensor(data.draw(st.lists(st.integers(0, size - d), max_size=9)), dtype=torch.int32) for d in dims]
    buffer = torch.randn(size, dtype=torch.float64)
    outs = gather(buffer, offsets, dims)
    for out, want in zip(outs, reference.fused_gather_embeddings_by_input(buffer, offsets, dims), strict=True):
        assert torch.equal(out, want)
    if dims:
        grad = gather_gradient(size, outs, offsets, dims, 0.3)
        want = reference.fused_gather_embeddings_by_input_gradient(size, outs, offsets, dims, 0.3)
        torch.testing.assert_close(grad, want)


def test_gradcheck():
    buffer = torch.randn(12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda b: gather(b, OFFSETS, DIMS), buffer)


def test_heavy_collisions_sum_exactly_enough():
    torch.manual_seed(0)
    offsets = [torch.randint(0, 20, (888,), dtype=torch.int32) for _ in range(13)]
    grads = [torch.randn(888, 2) for _ in offsets]
    out = gather_gradient(22, grads, offsets, [2] * 13)
    wide = reference.fused_gather_embeddings_by_input_gradient(22, [g.double() for g in grads], offsets, [2] * 13, 1.0)
    torch.testing.assert_close(out.double(), wide, rtol=8.88e-5, atol=1e-4)


def test_large_overlapping_tables_are_the_same_for_any_thread_count(same_for_any_thread_count):
    torch.manual_seed(0)
    size, dims = 50_000, [3, 17, 1, 700]
    offsets = [
        torch.randint(0, size - d, (n,), dtype=torch.int32) for n, d in zip([60_000, 20_000, 9, 50], dims, strict=True)
    ]
    grads = [torch.randn(o.numel(), d) for o, d in zip(offsets, dims, strict=True)]
    out = same_for_any_thread_count(lambda: gather_gradient(size, grads, offsets, dims, 2.0))
    want = reference.fused_gather_embeddings_by_input_gradient(size, grads, offsets, dims, 2.0)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-4)
    buffer = torch.randn(size)
    outs = same_for_any_thread_count(lambda: gather(buffer, offsets, dims))
    for rows, want in zip(outs, reference.fused_gather_embeddings_by_input(buffer, offsets, dims), strict=True):
        assert torch.equal(rows, want)
