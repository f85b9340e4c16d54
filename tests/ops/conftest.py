"""Fixtures of the op tests."""

import pytest
import torch

import shoal


@pytest.fixture(params=[1, 2, 5], ids=lambda n: f"{n}-threads")
def threads(request):
    """Runs the test with this many native threads."""
    before = shoal.num_threads()
    shoal.set_num_threads(request.param)
    yield request.param
    shoal.set_num_threads(before)


@pytest.fixture
def same_for_any_thread_count():
    """``check(f)``: ``f()`` gives bit-identical tensors with 1, 2 and 5 threads; returns the result."""
    before = shoal.num_threads()

    def flat(result):
        return [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]

    def check(f):
        results = []
        for n in (1, 2, 5):
            shoal.set_num_threads(n)
            results.append(f())
        shoal.set_num_threads(before)
        for other in results[1:]:
            assert len(flat(other)) == len(flat(results[0]))
            for a, b in zip(flat(results[0]), flat(other), strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)
        return results[0]

    yield check
    shoal.set_num_threads(before)
