"""Fixtures of the op tests, and where they run.

They always test the CPU kernels. With a GPU they run a second time with tensors on it (``-m gpu`` runs only these).
With ``TRITON_INTERPRET=1`` in the environment they test the CUDA kernels in Triton's interpreter, on CPU tensors;
`test_cuda_kernels.py` starts such a run.
"""

import os

import pytest
import torch
from hypothesis import settings

import shoal
from shoal.ops._op import Op

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SLOW_INTERPRETED = (
    "thread_count",
    "2-threads",
    "5-threads",
    "large_",
    "compile",
    "export",
    "opcheck",
    "heavy_c",
    "gradcheck_of_random",
)  # words in names of tests that are too slow there

HOST_ONLY = ("test_docs", "test_feature_configs", "test_sharding")  # tests of code that always runs on the CPU

if INTERPRETED or torch.cuda.is_available():
    settings.register_profile("device", parent=settings.get_profile("shoal"), max_examples=5 if INTERPRETED else 12)
    settings.load_profile("device")

if INTERPRETED:
    from shoal.ops.cuda.unique import fill_with_offset_map
    from shoal.ops.unique import fill as fill_op

    for op in Op.all.values():
        op._cpu = op.run_kernel

    def _interpreted_fill(fill, buffer, disjoint):
        fill_op._check_fill(fill.pos, fill.pos_splits, fill.value, fill.offset_splits, fill.dims)
        fill_with_offset_map(
            fill.pos, fill.pos_splits, fill.value, fill.offset_splits, fill.offsets, buffer, fill.dims, disjoint
        )

    fill_op._fill_native = _interpreted_fill


def pytest_generate_tests(metafunc):
    """Every test of this folder runs on each device; `device` is made by an autouse fixture below."""
    if "device" in metafunc.fixturenames:
        devices = ["cpu"]
        if (
            torch.cuda.is_available()
            and not INTERPRETED
            and metafunc.module.__name__.rpartition(".")[2] not in HOST_ONLY
        ):
            devices.append(pytest.param("cuda", marks=pytest.mark.gpu))
        metafunc.parametrize("device", devices, indirect=True)


def pytest_collection_modifyitems(items):
    if INTERPRETED:
        slow = [item for item in items if any(word in item.nodeid.lower() for word in SLOW_INTERPRETED)]
        for item in slow:
            item.add_marker(pytest.mark.skip(reason="too slow in Triton's interpreter"))


@pytest.fixture(autouse=True)
def device(request):
    """Where tensors are made during the test."""
    torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)


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
                if a.is_cuda:  # sums by atomics have no fixed order
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
                else:
                    assert torch.equal(a, b)
        return results[0]

    yield check
    shoal.set_num_threads(before)
