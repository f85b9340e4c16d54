"""Top-k: counts, ties, damage, error feedback, and the aggregator that uses it."""

import io
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.comm import DistributedConfig, ProcessGroupTransport
from shoal.errors import CompressionError, ConfigError, ShapeError
from shoal.testing import run_ranks, run_threads
from shoal.train import (
    CompressedAggregator,
    CompressedGradient,
    TopKCompressor,
    TopKState,
    compress_gradients,
    decompress_gradients,
    topk_count,
)
from shoal.train.aggregation.compression import topk_indices, topk_indices_reference


@pytest.mark.parametrize(
    ("n", "ratio", "count"),
    [
        (100, 0.07, 7),
        (25, 0.28, 7),
        (25, 0.6, 15),
        (1_000_000, 0.001, 1000),
        (10, 0, 1),
        (10, 0.01, 1),
        (3, 0.5, 2),
        (7, 1, 7),
        (0, 0.5, 0),
        (7, 3.0, 7),
        (7, -1.0, 1),
        (7, math.inf, 7),
    ],
)
def test_counts_are_exact_on_the_decimal_that_was_written(n, ratio, count):
    assert topk_count(n, ratio) == count


@pytest.mark.parametrize(("asked", "ratio"), [(2.0, 1.0), (-1, 0.0), (0.25, 0.25), (1, 1.0)])
def test_a_compressors_ratio_is_kept_within_its_bounds(asked, ratio):
    assert TopKCompressor(asked).ratio == ratio
    assert TopKState(asked).ratio == ratio
    assert TopKCompressor(asked).state_dict()["ratio"] == ratio


def test_nan_ratio_is_refused():
    for call in (
        lambda: topk_count(1, math.nan),
        lambda: TopKCompressor(math.nan),
        lambda: compress_gradients([torch.ones(1)], math.nan),
    ):
        with pytest.raises(CompressionError):
            call()


def stable(flat, k):
    return sorted(range(len(flat)), key=lambda i: (-abs(flat[i]), i))[:k]


def test_the_worked_example():
    (c,) = compress_gradients([torch.tensor([0.4, -0.4, 0.1, 0.9])], 0.5)
    assert c.indices.tolist() == [3, 0]
    assert c.values.tolist() == pytest.approx([0.9, 0.4])
    assert c.original_len == 4
    (back,) = decompress_gradients([c], [(2, 2)])
    torch.testing.assert_close(back, torch.tensor([[0.4, 0], [0, 0.9]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_ties_go_to_the_lower_index_on_a_thousand_tensors(dtype):
    generator = torch.Generator().manual_seed(7)
    for _ in range(250):
        n = int(torch.randint(1, 60, (1,), generator=generator))
        x = torch.randint(-4, 5, (n,), generator=generator).to(dtype) / 4
        k = int(torch.randint(1, n + 1, (1,), generator=generator))
        want = stable(x.tolist(), k)
        for select in (topk_indices, topk_indices_reference):
            assert select(x, k).tolist() == want
            assert select(x, k, order="index").tolist() == sorted(want)


@given(st.lists(st.floats(width=32), min_size=1, max_size=200), st.data())
def test_any_floats_are_ranked_nan_first_then_by_magnitude_then_index(values, data):
    x = torch.tensor(values)
    k = data.draw(st.integers(1, len(values)))
    flat = x.tolist()
    want = sorted(
        range(len(flat)),
        key=lambda i: (0 if math.isnan(flat[i]) else 1, 0 if math.isnan(flat[i]) else -abs(flat[i]), i),
    )[:k]
    for select in (topk_indices, topk_indices_reference):
        assert select(x, k, nonfinite="keep").tolist() == want
        assert select(x, k, nonfinite="keep", order="index").tolist() == sorted(want)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_integers_are_ranked_to_the_ends_of_their_range(dtype):
    least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    x = torch.tensor([1, most, 0, least, 1], dtype=dtype)
    for k in range(1, 6):
        want = stable([int(v) for v in x.tolist()], k)
        (c,) = compress_gradients([x], k / 5)
        assert c.indices.tolist() == want
        assert c.values.tolist() == [x.tolist()[i] for i in want]


def test_large_tensors_agree_with_a_stable_sort():
    x = torch.randn(300_007)
    x[1000:200_000:3] = 0.5
    for k in (1, 17, 3000, 150_000, 300_007):
        want = torch.sort(x.abs(), descending=True, stable=True).indices[:k]
        assert torch.equal(topk_indices(x, k), want)
        assert torch.equal(topk_indices_reference(x, k), want)


def test_nonfinite_values_raise_unless_kept():
    bad = torch.tensor([1.0, float("nan"), float("inf"), -2.0])
    for x in (bad, bad.double(), bad.half()):
        with pytest.raises(CompressionError, match="2 of 4"):
            compress_gradients([x], 0.25)
    (c,) = compress_gradients([bad], 0.5, nonfinite="keep")
    assert c.indices.tolist() == [1, 2]
    for wrong in ({"nonfinite": "drop"}, {"order": "random"}):
        with pytest.raises(ConfigError):
            compress_gradients([bad], 0.5, **wrong)


def test_empty_and_scalar_and_strided_tensors():
    grads = [torch.empty(0, 3), torch.tensor(-5.0), torch.arange(6.0).reshape(2, 3).t()]
    compressed = compress_gradients(grads, 1.0)
    back = decompress_gradients(compressed, [g.shape for g in grads])
    assert all(torch.equal(a, b) for a, b in zip(back, grads, strict=True))
    assert compressed[2].indices.tolist() == [5, 3, 1, 4, 2, 0]  # row-major order of the user's tensor


def test_damage_is_an_error_never_a_small_gradient():
    def make(indices, values, n=4):
        return CompressedGradient(torch.tensor(indices, dtype=torch.int64), torch.tensor(values), n)

    with pytest.raises(CompressionError, match="one shape per gradient, got 0 for 1"):
        decompress_gradients([make([0], [1.0])], [])
    for shape in ((5,), (-2, -2)):
        with pytest.raises(ShapeError):
            decompress_gradients([make([0], [1.0])], [shape])
    for indices in ([4], [-1], [1 << 60]):
        with pytest.raises(CompressionError, match=r"must be in \[0, 4\), got"):
            decompress_gradients([make(indices, [1.0])], [(4,)])
    with pytest.raises(CompressionError):
        decompress_gradients([make([0, 1], [1.0])], [(4,)])
    twice = make([2, 1, 2], [1.0, 5.0, 3.0])
    with pytest.raises(CompressionError, match="more than once"):
        decompress_gradients([twice], [(4,)])
    assert decompress_gradients([twice], [(4,)], duplicates="last")[0].tolist() == [0, 5, 3, 0]
    assert decompress_gradients([twice], [(4,)], duplicates="sum")[0].tolist() == [0, 5, 4, 0]


def test_compressed_gradient_survives_json():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        (c,) = compress_gradients([torch.randn(9).to(dtype)], 0.5)
        again = CompressedGradient.from_dict(json.loads(json.dumps(c.to_dict())))
        assert torch.equal(again.indices, c.indices)
        assert torch.equal(again.values, c.values)
        assert (again.values.dtype, again.original_len) == (dtype, 9)


# Error feedback


def test_the_table_of_error_feedback():
    g = torch.tensor([1, 0.6, -0.5, 0.2])
    topk = TopKCompressor(0.25, error_feedback=True)
    rows = [(0, 1.0, [0, 0.6, -0.5, 0.2]), (1, 1.2, [1.0, 0, -1.0, 0.4]), (0, 2.0, [0, 0.6, -1.5, 0.6])]
    for index, value, rest in rows:
        (c,) = topk.compress([g])
        assert c.indices.tolist() == [index]
        assert c.values.item() == pytest.approx(value)
        torch.testing.assert_close(topk.state_dict()["memory"][0], torch.tensor(rest), atol=1e-6, rtol=0)
    plain = TopKCompressor(0.25)
    assert [plain.compress([g])[0].indices.item() for _ in range(3)] == [0, 0, 0]
    assert plain.state_dict()["memory"] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_lost_over_fifty_steps(dtype):
    torch.manual_seed(0)
    topk = TopKCompressor(0.1, error_feedback=True)
    given, sent = torch.zeros(7, 11, dtype=torch.float64), torch.zeros(7, 11, dtype=torch.float64)
    for _ in range(50):
        g = torch.randn(7, 11).to(dtype)
        given += g.double()
        compressed = topk.compress([g])
        assert compressed[0].values.dtype == dtype
        sent += topk.decompress(compressed, [(7, 11)])[0].double()
    memory = topk.state_dict()["memory"][0]
    assert memory.dtype == torch.float32
    assert memory.shape == (7, 11)
    torch.testing.assert_close(sent + memory.double(), given, rtol=1e-5, atol=1e-5)


def test_float64_gradients_are_sent_whole_under_feedback():
    gradient = torch.randn(20, dtype=torch.float64)
    topk = TopKCompressor(1.0, error_feedback=True)
    assert torch.equal(topk.decompress(topk.compress([gradient]), [(20,)])[0], gradient)


def test_state_survives_saving_and_reset_forgets():
    topk = TopKCompressor(0.2, error_feedback=True, decay=0.9)
    topk.compress([torch.randn(10), torch.randn(3, 3)])
    file = io.BytesIO()
    torch.save(topk.state_dict(), file)
    file.seek(0)
    other = TopKCompressor(1.0)
    other.load_state_dict(torch.load(file, weights_only=True))
    grads = [torch.randn(10), torch.randn(3, 3)]
    for a, b in zip(topk.compress(grads), other.compress(grads), strict=True):
        assert torch.equal(a.indices, b.indices)
        assert torch.equal(a.values, b.values)
    with pytest.raises(ShapeError):
        topk.compress([torch.randn(11)])
    topk.reset()
    assert topk.state_dict()["memory"] == []
    topk.compress([torch.randn(11)])


# The aggregator


def config(t):
    return DistributedConfig(t.world_size, t.rank)


def test_the_worked_aggregate():
    grads = [[4.0, 0, -2, 1], [1.0, -6, 2, 0]]

    def work(t):
        agg = CompressedAggregator(config(t), t, TopKCompressor(0.5))
        got = agg.aggregate([torch.tensor(grads[t.rank])])[0]
        return got.tolist(), agg.last_stats["bytes_sent"], agg.last_stats["bytes_dense"]

    assert run_threads(2, work) == [([2.0, -3, 0, 0], 16, 16.0)] * 2


def loop_over_ranks(world, ratio, grads_of):
    lists = [compress_gradients(grads_of(r), ratio) for r in range(world)]
    result = []
    for i, g in enumerate(grads_of(0)):
        total = torch.zeros(g.shape, dtype=torch.float32)
        for compressed in lists:
            total = total + decompress_gradients([compressed[i]], [g.shape])[0].float()
        result.append((total / world).to(g.dtype))
    return result


def grads_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(1000, generator=generator),
        torch.randn(3, 5, generator=generator).bfloat16(),
        torch.empty(0),
        torch.randn((), generator=generator),
    ]


def aggregate_processes(rank, world):
    t = ProcessGroupTransport(default_timeout_s=60)
    agg = CompressedAggregator(config(t), t, TopKCompressor(0.05))
    return agg.aggregate(grads_of(rank)), agg.last_stats["bytes_sent"]


def test_all_ranks_hold_the_bits_of_a_plain_loop():
    want = loop_over_ranks(3, 0.05, grads_of)
    by_thread = run_threads(
        3, lambda t: CompressedAggregator(config(t), t, TopKCompressor(0.05)).aggregate(grads_of(t.rank))
    )
    for got in by_thread:
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for got, sent in run_ranks(3, aggregate_processes, timeout_s=200):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert sent == 2 * (50 * 8 + 1 * 6 + 8)


def test_compression_at_one_percent_sends_two_percent():
    def work(t):
        agg = CompressedAggregator(config(t), t, TopKCompressor(0.01))
        agg.aggregate([torch.randn(50_000), torch.randn(7, 1000)])
        return agg.last_stats["bytes_sent"] / agg.last_stats["bytes_dense"]

    assert all(share <= 0.03 for share in run_threads(2, work))


def test_a_failed_round_leaves_no_trace_in_the_memory():
    def work(t):
        topk = TopKCompressor(0.5, error_feedback=True)
        agg = CompressedAggregator(config(t), t, topk)
        agg.aggregate([torch.tensor([1.0, 2.0])])
        before = topk.state_dict()["memory"][0]
        bad = torch.tensor([1.0, float("nan") if t.rank == 1 else 0.0])
        with pytest.raises(Exception, match="NaN or infinite" if t.rank == 1 else "but they differ"):
            agg.aggregate([bad])
        assert torch.equal(topk.state_dict()["memory"][0], before)

    run_threads(2, work, timeout_s=200)


def test_one_rank_gets_its_own_compressed_gradient():
    agg = CompressedAggregator(DistributedConfig(1, 0), None, TopKCompressor(0.5))
    assert agg.aggregate([torch.tensor([3.0, 1.0])])[0].tolist() == [3.0, 0.0]
    assert (agg.last_stats["bytes_sent"], agg.last_stats["bytes_dense"]) == (0, 0)
