"""The CUDA kernels in Triton's interpreter, and the tests that only they need.

The interpreter must be chosen before kernels are imported, so this folder's tests run once more in other processes.
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from tests.interpreted import run_tests

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="there is no Triton")
HERE = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FILES = ("test_split", "test_reorder", "test_unique", "test_lookup", "test_fused_gather", "test_reduce",
         "test_ragged_ops", "test_layout", "test_cuda_kernels")  # fmt: skip


@pytest.fixture
def kernels(device):
    """Skips where the kernels cannot run."""
    if device == "cpu" and not INTERPRETED:
        pytest.skip("needs a GPU, or Triton's interpreter")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", FILES)
def test_the_ops_give_the_same_in_tritons_interpreter(file, tmp_path):
    run_tests(tmp_path, HERE / f"{file}.py")


@pytest.mark.parametrize("n", [0, 1, 2, 127, 1000])
def test_distinct_ids_come_in_order_of_first_occurrence(kernels, n):
    from shoal.ops.cuda.dedup import unique_ids

    torch.manual_seed(n)
    ids = torch.randint(-(n // 3) - 1, n // 3 + 1, (n,))
    distinct, inverse = unique_ids(ids)
    assert distinct.tolist() == list(dict.fromkeys(ids.tolist()))
    assert torch.equal(distinct[inverse], ids)


def test_parts_have_nothing_in_common(kernels):
    from shoal.ops.cuda.dedup import dedup

    ids = torch.tensor([7, 7, 8, 7, 8, 8])
    found = dedup(ids, torch.tensor([0, 2, 2, 5, 6]))
    assert found.keys[: int(found.count)].tolist() == [7, 8, 7, 8]
    assert found.inverse.tolist() == [0, 0, 1, 2, 1, 3]


def test_ids_that_hash_alike_stay_apart(kernels):
    from shoal.ops.cuda.dedup import unique_ids

    ids = torch.tensor([-(2**63), 2**63 - 1, 0, -1, 2**32, 2**33, 2**63 - 1, 0])
    distinct, inverse = unique_ids(ids)
    assert distinct.tolist() == [-(2**63), 2**63 - 1, 0, -1, 2**32, 2**33]
    assert inverse.tolist() == [0, 1, 2, 3, 4, 5, 1, 2]


@pytest.mark.parametrize("n", [0, 2, 1002])
def test_packed_indices_and_bins_are_those_of_the_cpu(kernels, device, n):
    from shoal.gather.payload.codec import pack12, quantize, value_table
    from shoal.ops.cuda import codec

    torch.set_default_device("cpu")  # the rest of `shoal.gather` creates its tensors there
    indices = torch.randint(0, 4096, (n,))
    assert torch.equal(codec.unpack12(pack12(indices).to(device), n).cpu(), indices)
    if n:
        q, params = quantize(torch.randn(n), 16)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            table = value_table((*params[:4], dtype))
            assert torch.equal(codec.dequantize(q.to(device), table.to(device), dtype).cpu(), table[q.long()].to(dtype))


@pytest.mark.parametrize("packed", [True, False])
def test_a_peers_chunks_are_added(kernels, device, packed):
    from shoal.gather.payload.codec import pack12
    from shoal.ops.cuda import codec

    indices = torch.stack([torch.randperm(64, device="cpu")[:8] for _ in range(5)])
    vals, factor = torch.randn(5, 8, device="cpu"), torch.tensor([0.3], device="cpu")
    values, counts = torch.randn(5, 64, device="cpu"), torch.zeros(5, 64, dtype=torch.int32, device="cpu")
    want = values.scatter(1, indices, values.gather(1, indices) + vals * factor)
    got, seen = values.to(device), counts.to(device)
    idxs = pack12(indices) if packed else indices.int()
    codec.add_peer(got, seen, idxs.to(device), vals.to(device), None, factor.to(device), 8, packed)
    assert torch.equal(got.cpu(), want)
    assert torch.equal(seen.cpu(), counts.scatter(1, indices, 1))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (50, 7), (3000, 300), (300, 300)])
def test_the_largest_magnitudes_settle_ties_by_index(kernels, n, k):
    from shoal.ops.cuda.topk import largest
    from shoal.train.aggregation.compression import topk_indices_reference

    values = torch.randint(-9, 9, (n,)).float()
    chosen, bad = largest(values, k)
    assert torch.equal(chosen, topk_indices_reference(values, k, order="index"))
    assert not int(bad)
    values[n // 2] = float("nan")
    assert int(largest(values, k)[1])


def test_unchecked_ops_skip_what_is_out_of_range(kernels):
    from shoal import ops
    from shoal.ops.cuda.launch import unchecked

    with unchecked():
        out = ops.reduce_sum(torch.tensor([[0], [9], [-1]]), torch.ones(3, 2), [2])
    assert out.tolist() == [[1, 1], [0, 0]]
    with pytest.raises(ValueError, match="9"):
        ops.reduce_sum(torch.tensor([[0], [9], [-1]]), torch.ones(3, 2), [2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_joined_by_one_launch_are_those_that_torch_joins(kernels, dtype):
    from shoal import ops

    parts = [torch.randn(*shape, dtype=dtype) for shape in ((3, 5), (0,), (2049,), (1,), (16,))]
    parts.append(torch.randn(7, 4, dtype=dtype).t())
    for scale in (1, 0.3):
        leaves = [part.clone().requires_grad_() for part in parts]
        want = ops.aligned_flat_concat(leaves, scale)  # with a gradient, torch computes it
        assert torch.equal(ops.aligned_flat_concat(parts, scale), want)
        want.sum().backward()
        assert all(torch.equal(leaf.grad, torch.full_like(leaf, scale)) for leaf in leaves)
