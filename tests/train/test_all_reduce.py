"""All-reduce and parameter-server aggregation: threads first, then processes."""

import struct
import threading
import time

import numpy as np
import pytest
import torch

from shoal.comm import (
    DistributedConfig,
    InProcessRanks,
    InProcessTransport,
    MpiTransport,
    ProcessGroupTransport,
    Transport,
)
from shoal.errors import AggregationError, ConfigError, ShapeError, TransportError
from shoal.testing import faults, mpi_unavailable, run_mpi, run_ranks, run_threads
from shoal.train import (
    AllReduceAggregator,
    CompressedAggregator,
    LocalAggregator,
    ParameterServer,
    TopKCompressor,
)

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SHAPES = [(3, 5), (), (0, 4), (17,), (1,), (2, 3, 4), (257,)]


def config(t):
    return DistributedConfig(t.world_size, t.rank)


def gradients(rank, *, seed=0, dtypes=DTYPES):
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    return [torch.randn(s, generator=generator).to(dtypes[i % len(dtypes)]) for i, s in enumerate(SHAPES * 2)]


def expected(world, *, average=True, **kw):
    lists = [gradients(r, **kw) for r in range(world)]
    result = []
    for parts in zip(*lists, strict=True):
        acc = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
        total = parts[0].to(acc)
        for p in parts[1:]:
            total = total + p.to(acc)
        result.append((total / world if average else total).to(parts[0].dtype))
    return result


def check_all(transport, algorithm, average, bucket_bytes):
    mine = gradients(transport.rank)
    before = [g.clone() for g in mine]
    agg = AllReduceAggregator(
        config(transport), transport, algorithm=algorithm, average=average, bucket_bytes=bucket_bytes
    )
    got = agg.aggregate(mine)
    for g, b in zip(mine, before, strict=True):
        assert torch.equal(g, b)
    storages = {g.untyped_storage().data_ptr() for g in mine if g.numel()}
    for g, e in zip(got, expected(transport.world_size, average=average), strict=True):
        assert g.dtype == e.dtype
        assert g.shape == e.shape
        assert g.untyped_storage().data_ptr() not in storages or not g.numel()
        if algorithm == "ordered":
            assert torch.equal(g, e)
        torch.testing.assert_close(g.float(), e.float(), rtol=1e-2 if g.dtype.itemsize == 2 else 1e-5, atol=1e-6)
    return got


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("algorithm", ["auto", "ring", "ordered"])
@pytest.mark.parametrize(("average", "bucket_bytes"), [(True, 25 << 20), (False, 100)])
def test_every_algorithm_is_the_mean_and_the_same_on_all_ranks(world, algorithm, average, bucket_bytes):
    first, *others = run_threads(world, check_all, algorithm, average, bucket_bytes)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    again = run_threads(world, check_all, algorithm, average, bucket_bytes)
    assert all(torch.equal(a, b) for a, b in zip(first, again[0], strict=True))


@pytest.mark.parametrize("algorithm", ["ring", "ordered"])
@pytest.mark.parametrize(
    ("values", "mean"), [([2, 4], 3), ([3, 6, 9], 6), ([1, 2, 3, 4], 2.5), ([1, 0, 0, 0, 0], 0.2)], ids=str
)
def test_the_four_rows_that_a_summing_ring_gets_wrong(algorithm, values, mean):
    def work(t):
        agg = AllReduceAggregator(config(t), t, algorithm=algorithm)
        return agg.aggregate([torch.tensor([float(values[t.rank])])])[0].item()

    assert run_threads(len(values), work) == [pytest.approx(mean)] * len(values)


def test_the_worked_ring_of_three():
    rows = [[1.0, 2, 3, 4], [10.0, 20, 30, 40], [100.0, 200, 300, 400]]

    def work(t):
        return AllReduceAggregator(config(t), t).aggregate([torch.tensor(rows[t.rank])])[0].tolist()

    assert run_threads(3, work) == [[37.0, 74, 111, 148]] * 3


def test_the_order_of_addition_is_each_algorithms_own():
    values = [1e8, 1.0, -1e8]

    def work(t, algorithm):
        agg = AllReduceAggregator(config(t), t, algorithm=algorithm)
        return agg.aggregate([torch.full((3,), values[t.rank])])[0].tolist()

    assert run_threads(3, work, "ordered") == [[0.0, 0, 0]] * 3
    assert run_threads(3, work, "ring") == [[0.0, 0.0, float(np.float32(1) / np.float32(3))]] * 3


class Recording(Transport):
    """Keeps the size and the bytes of everything sent."""

    def __init__(self, inner):
        self.inner, self.rank, self.world_size, self.sent = inner, inner.rank, inner.world_size, []
        self.lengths = []

    def send(self, dest, data):
        self.sent.append((dest, bytes(memoryview(data))))
        self.lengths.append(len(data))
        self.inner.send(dest, data)

    def recv(self, src, timeout=None):
        return self.inner.recv(src, timeout)

    def barrier(self, timeout=None):
        self.inner.barrier(timeout)

    def close(self):
        self.inner.close()


@pytest.mark.parametrize("kind", ["ring", "ordered", "server", "compressed"])
def test_the_length_of_a_message_is_its_number_of_bytes(kind):
    def work(t):
        t = Recording(t)
        aggregator = {
            "server": lambda: ParameterServer(config(t), t),
            "compressed": lambda: CompressedAggregator(config(t), t, TopKCompressor(0.5)),
        }.get(kind, lambda: AllReduceAggregator(config(t), t, algorithm=kind))()
        aggregator.aggregate([torch.arange(4.0), torch.ones(2, dtype=torch.float64), torch.empty(0)])
        return [(n, len(data)) for n, (_, data) in zip(t.lengths, t.sent, strict=True)]

    for lengths in run_threads(3, work):
        assert lengths
        assert all(told == sent for told, sent in lengths)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ring_traffic_is_what_a_ring_moves_and_nothing_else(world):
    n = 100_003
    transports = [Recording(t) for t in InProcessTransport.create_group(world)]

    def work(t):
        agg = AllReduceAggregator(config(t), t, bucket_bytes=80_000)
        agg.aggregate([torch.ones(n // 3), torch.ones(n - n // 3), torch.ones(5).half()])
        return agg.last_stats

    for t, stats in zip(transports, run_threads(world, work, transports=transports), strict=True):
        data = [d for _, d in t.sent if len(d) > 64]
        small = [d for _, d in t.sent if len(d) <= 64]
        want = 2 * (world - 1) / world * (n * 4 + 5 * 4)  # halves are sent as float32
        assert sum(map(len, data)) == pytest.approx(want, rel=0.01)
        assert {dest for dest, _ in t.sent} == {(t.rank + 1) % world}
        assert stats["buckets"] == 3
        assert stats["messages"] == 2 * (world - 1) * 3
        assert stats["bytes_sent"] == pytest.approx(want, rel=0.01)
        assert stats["algorithm"] == "ring"
        assert len(small) + len(data) == stats["messages"] + world - 1
        assert set(stats) >= {"bytes_sent", "bytes_received", "messages", "buckets", "wait_s", "reduce_s", "algorithm"}


def test_the_wire_carries_raw_little_endian_chunks():
    transports = [Recording(t) for t in InProcessTransport.create_group(2)]

    def work(t):
        AllReduceAggregator(config(t), t, check="never").aggregate([torch.tensor([1.0, 2.0, 3.0]) * (t.rank + 1)])

    run_threads(2, work, transports=transports)
    assert transports[0].sent == [(1, struct.pack("<2f", 1, 2)), (1, struct.pack("<f", 9))]
    assert transports[1].sent == [(0, struct.pack("<f", 6)), (0, struct.pack("<2f", 3, 6))]


class Rendezvous(Transport):
    """A transport whose send waits until the message was received."""

    def __init__(self, inner):
        self.inner, self.rank, self.world_size = inner, inner.rank, inner.world_size

    def send(self, dest, data):
        taken = threading.Event()
        RENDEZVOUS[self.rank, dest].append(taken)
        self.inner.send(dest, data)
        assert taken.wait(60), "deadlock"

    def recv(self, src, timeout=None):
        data = self.inner.recv(src, timeout)
        RENDEZVOUS[src, self.rank].pop(0).set()
        return data

    def barrier(self, timeout=None):
        self.inner.barrier(timeout)

    def close(self):
        self.inner.close()


RENDEZVOUS = {}


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_blocking_sends_do_not_deadlock(world):
    RENDEZVOUS.clear()
    RENDEZVOUS.update({(a, b): [] for a in range(world) for b in range(world)})

    def work(t):
        for make in (
            lambda: AllReduceAggregator(config(t), t, algorithm="ring"),
            lambda: AllReduceAggregator(config(t), t, algorithm="ordered"),
            lambda: ParameterServer(config(t), t, servers=2),
        ):
            assert make().aggregate([torch.full((10,), float(t.rank)), torch.ones(3)])[0][0] == (world - 1) / 2
        ParameterServer(config(t), t).broadcast_params([torch.ones(2)] if t.rank == 0 else None)

    run_threads(world, work, transports=[Rendezvous(t) for t in InProcessTransport.create_group(world)])


BAD = {
    "length": [torch.ones(3)],
    "shape": [torch.ones(3), torch.ones(4, 2)],
    "dtype": [torch.ones(3), torch.ones(2, 4).double()],
    "none": [torch.ones(3), None],
    "sparse": [torch.ones(3), torch.ones(2, 4).to_sparse()],
}


def mismatched(t, what, algorithm):
    mine = BAD[what] if t.rank == 1 else [torch.ones(3), torch.ones(2, 4)]
    make = {
        "server": lambda: ParameterServer(config(t), t),
        "compressed": lambda: compressed_aggregator(t),
    }.get(algorithm, lambda: AllReduceAggregator(config(t), t, algorithm=algorithm))
    agg = make()
    t.barrier()
    began = time.monotonic()
    with pytest.raises(AggregationError):
        agg.aggregate(mine)
    assert time.monotonic() - began < 30  # not the transport's deadline
    assert agg.aggregate([torch.ones(2)])[0].tolist() == [1.0, 1.0]  # the transport still works


def compressed_aggregator(t):
    from shoal.train import CompressedAggregator, TopKCompressor

    return CompressedAggregator(config(t), t, TopKCompressor(1.0))


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("algorithm", ["ring", "ordered", "server", "compressed"])
def test_a_mismatch_is_reported_on_all_ranks_before_data_moves(what, algorithm):
    run_threads(3, mismatched, what, algorithm, timeout_s=200)


@pytest.mark.parametrize(
    "other", [{"average": False}, {"algorithm": "ordered"}, {"accumulate": "float64"}, {"bucket_bytes": 8}], ids=str
)
def test_ranks_with_other_settings_are_told(other):
    def work(t):
        settings = {"algorithm": "ring"} | (other if t.rank == 1 else {})
        with pytest.raises(AggregationError, match="settings"):
            AllReduceAggregator(config(t), t, **settings).aggregate([torch.ones(3), torch.ones(4)])

    run_threads(3, work)


def test_a_mismatch_shows_what_this_rank_passed():
    def work(t):
        mine = [torch.ones(3)] if t.rank else []
        text = r"the gradients of this rank \(1\): \(3,\) float32\. " if t.rank else r"of this rank \(0\): none\. "
        with pytest.raises(AggregationError, match=text):
            AllReduceAggregator(config(t), t).aggregate(mine)

    run_threads(2, work)


def test_integers_are_summed_and_have_no_mean():
    def work(t):
        agg = AllReduceAggregator(config(t), t, average=False)
        got = agg.aggregate([torch.tensor([2**40 + t.rank]), torch.tensor([t.rank], dtype=torch.int8)])
        assert got[0].item() == 3 * 2**40 + 3
        assert (got[1].item(), got[1].dtype) == (3, torch.int8)
        with pytest.raises(AggregationError, match="must be floating point to be averaged"):
            AllReduceAggregator(config(t), t).aggregate([torch.tensor([1])])

    run_threads(3, work)


def test_half_gradients_are_summed_in_float32_and_rounded_once():
    def work(t):
        agg = AllReduceAggregator(config(t), t, average=False)
        return agg.aggregate([torch.tensor([2048.0, 1.0][t.rank]).half()])[0]

    # 2048 + 1 is not a float16: it rounds to even once
    assert run_threads(2, work)[0].item() == 2048.0

    def many(t):
        return AllReduceAggregator(config(t), t).aggregate([torch.tensor([2048.0 if t.rank == 0 else 1.0]).half()])[0]

    assert run_threads(4, many)[0].item() == float(torch.tensor((2048 + 3) / 4).half())


@pytest.mark.parametrize("algorithm", ["ring", "ordered"])
def test_nan_infinity_and_overflow_pass_through_to_all_ranks(algorithm):
    inf = float("inf")
    by_rank = [[1.0, inf, 1.0, inf, 3e38], [float("nan"), 1.0, 1.0, -inf, 3e38], [1.0, 1.0, 1.0, 1.0, 3e38]]

    def work(t):
        return AllReduceAggregator(config(t), t, algorithm=algorithm).aggregate([torch.tensor(by_rank[t.rank])])[0]

    for got in run_threads(3, work):
        assert got.isnan().tolist() == [True, False, False, True, False]
        assert got.isinf().tolist() == [False, True, False, False, True]
        assert got[2] == 1


def test_check_first_looks_once_and_never_not_at_all():
    transports = [Recording(t) for t in InProcessTransport.create_group(2)]

    def work(t, check):
        agg = AllReduceAggregator(config(t), t, check=check)
        agg.aggregate([torch.ones(2)])
        first = len(t.sent)
        agg.aggregate([torch.ones(2)])
        return first, len(t.sent) - first

    assert run_threads(2, work, "first", transports=transports)[0] == (3, 2)
    for t in transports:
        t.sent.clear()
    assert run_threads(2, work, "never", transports=transports)[0] == (2, 2)


def test_empty_lists_and_world_of_one():
    assert run_threads(3, lambda t: AllReduceAggregator(config(t), t).aggregate([])) == [[], [], []]
    one = DistributedConfig(1, 0)
    g = torch.tensor([1, 2])
    for agg in (LocalAggregator(), AllReduceAggregator(one, None), ParameterServer(one, None)):
        (got,) = agg.aggregate([g])
        assert torch.equal(got, g)
        assert got.data_ptr() != g.data_ptr()


def test_wrong_settings_say_what_is_allowed():
    (a, _) = InProcessTransport.create_group(2)
    for bad in (
        lambda: AllReduceAggregator(config(a), a, algorithm="native"),
        lambda: AllReduceAggregator(config(a), a, algorithm="star"),
        lambda: AllReduceAggregator(config(a), a, check="maybe"),
        lambda: AllReduceAggregator(config(a), a, bucket_bytes=0),
        lambda: AllReduceAggregator(config(a), None),
        lambda: AllReduceAggregator(DistributedConfig(3, 0), a),
        lambda: ParameterServer(config(a), a, servers=3),
    ):
        with pytest.raises(ConfigError):
            bad()


# Parameter server


def test_parameter_server_adds_in_rank_order_with_and_without_weights():
    grads = [[1.0, 2], [4.0, 8], [7.0, -4]]

    def work(t):
        ps = ParameterServer(config(t), t)
        mean = ps.reduce_gradients([torch.tensor(grads[t.rank])])[0]
        weighted = ps.reduce_gradients([torch.tensor(grads[t.rank])], weights=[1, 1, 2][t.rank])[0]
        return mean.tolist(), weighted.tolist()

    assert run_threads(3, work) == [([4.0, 2.0], [4.75, 0.5])] * 3


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_more_servers_give_the_same_bits(servers):
    def work(t):
        return ParameterServer(config(t), t, servers=servers).aggregate(gradients(t.rank))

    for got in run_threads(3, work):
        assert all(torch.equal(a, b) for a, b in zip(got, expected(3), strict=True))


def test_a_bad_weight_stops_every_rank():
    def work(t, weight):
        ps = ParameterServer(config(t), t)
        with pytest.raises((ConfigError, AggregationError)):
            ps.reduce_gradients([torch.ones(1)], weights=weight if t.rank == 1 else 1.0)
        with pytest.raises(AggregationError):
            ps.reduce_gradients([torch.ones(1)], weights=0.0)

    for weight in (float("nan"), -1.0, "heavy"):
        run_threads(2, work, weight, timeout_s=200)


def test_parameters_are_broadcast_and_templates_checked():
    params = [torch.randn(3, 4), torch.arange(5), torch.tensor(True), torch.randn(2).bfloat16(), torch.empty(0, 3)]

    def work(t):
        ps = ParameterServer(config(t), t)
        for template in (None, [], [torch.zeros_like(p) for p in params]):
            got = ps.broadcast_params(params if t.rank == 0 else template)
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, params, strict=True))
        if t.rank == 2:
            with pytest.raises(ShapeError):
                ps.broadcast_params([torch.zeros(4, 3), *params[1:]])
        else:
            ps.broadcast_params(params if t.rank == 0 else None)
        with pytest.raises(AggregationError):
            ps.broadcast_params(None)

    run_threads(3, work, timeout_s=200)


@pytest.mark.parametrize("params", [["text"], [torch.ones(2, dtype=torch.complex64)], [torch.ones(2).to_sparse()]])
def test_parameters_that_cannot_be_broadcast_stop_every_rank(params):
    def work(t):
        with pytest.raises(AggregationError):
            ParameterServer(config(t), t).broadcast_params(params if t.rank == 0 else None)

    run_threads(3, work, timeout_s=200)


def test_sixty_four_ranks_finish_and_are_right():
    def work(t):
        t.barrier()
        g = [torch.full((130,), float(t.rank)), torch.ones(3)]
        ring = AllReduceAggregator(config(t), t).aggregate(g)
        server = ParameterServer(config(t), t, servers=3).aggregate(g)
        t.barrier()
        return ring[0][0].item(), server[0][-1].item(), ring[1][0].item()

    assert run_threads(64, work, timeout_s=200) == [(31.5, 31.5, 1.0)] * 64


def test_a_truncated_message_is_a_protocol_error():
    transports = list(InProcessTransport.create_group(2, default_timeout_s=60))
    transports[0] = faults.wrap(transports[0], faults.truncate(rank=0, step=2))

    def work(t):
        try:
            AllReduceAggregator(config(t), t).aggregate([torch.ones(100)])
        finally:
            t.close()  # otherwise the other rank waits for the rest

    results = run_threads(2, work, transports=transports, return_errors=True)
    assert isinstance(results[1], TransportError)
    assert results[1].kind == "protocol"


# Processes


def process_case(rank, world):
    return aggregate_everything(ProcessGroupTransport(default_timeout_s=60))


def mpi_case(rank, world):
    return aggregate_everything(MpiTransport(default_timeout_s=60))


def aggregate_everything(t):
    for algorithm in ("native", "ordered", "ring"):
        total = AllReduceAggregator(config(t), t, algorithm=algorithm, average=False)
        for dtype in (torch.int64, torch.int16, torch.int8, torch.uint8):
            (got,) = total.aggregate([torch.arange(3).to(dtype) + t.rank])
            assert got.dtype == dtype
            assert got.tolist() == [i * t.world_size + sum(range(t.world_size)) for i in range(3)]
    rank, world = t.rank, t.world_size
    results = {}
    for algorithm in ("auto", "native", "ring", "ordered"):
        results[algorithm] = check_all(t, algorithm, True, 200)
        check_all(t, algorithm, False, 25 << 20)
    for what in BAD:
        for algorithm in ("native", "ring", "ordered", "server", "compressed"):
            mismatched(t, what, algorithm)
    ps = ParameterServer(config(t), t, servers=min(2, world))
    assert all(torch.equal(a, b) for a, b in zip(ps.aggregate(gradients(rank)), expected(world), strict=True))
    params = [torch.full((2, 3), 7.0), torch.arange(4), torch.tensor([True, False])]
    got = ps.broadcast_params(params if rank == 0 else None)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, params, strict=True))
    with pytest.raises(AggregationError):
        ps.broadcast_params(None)
    assert ps.reduce_gradients([torch.tensor([float(rank)])], weights=rank)[0].item() == pytest.approx(
        sum(r * r for r in range(world)) / sum(range(world))
    )
    native = AllReduceAggregator(config(t), t)
    native.aggregate([torch.ones(1000)])
    assert native.last_stats["bytes_sent"] == pytest.approx(2 * (world - 1) / world * 4000, rel=0.01)
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_processes_agree_with_the_plain_mean(world):
    first, *others = run_ranks(world, process_case, timeout_s=200)
    for other in others:
        for algorithm, tensors in first.items():
            assert all(torch.equal(a, b) for a, b in zip(tensors, other[algorithm], strict=True))


@pytest.mark.skipif(mpi_unavailable() is not None, reason=str(mpi_unavailable()))
def test_mpi_ranks_agree_with_the_plain_mean():
    first, *others = run_mpi(3, mpi_case, timeout_s=200)
    for other in others:
        for algorithm, tensors in first.items():
            assert all(torch.equal(a, b) for a, b in zip(tensors, other[algorithm], strict=True))


def killed(rank, world, algorithm):
    import os
    import signal

    t = ProcessGroupTransport(default_timeout_s=60)
    agg = AllReduceAggregator(config(t), t, algorithm=algorithm)
    agg.aggregate([torch.ones(10)])
    if rank == 1:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(TransportError) as caught:
        aggregate_for_ever(agg)
    return caught.value.kind in ("peer_lost", "timeout"), time.monotonic() - began < 150


def aggregate_for_ever(agg):
    while True:
        agg.aggregate([torch.ones(300_000)])


@pytest.mark.parametrize("algorithm", ["native", "ring"])
def test_killing_a_rank_during_aggregate_raises_on_the_others(algorithm):
    results = run_ranks(3, killed, algorithm, timeout_s=200, group_timeout_s=60, lost=(1,))
    assert results[0] == results[2] == (True, True)


@pytest.mark.parametrize("algorithm", ["native", "ordered"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_agree_with_the_plain_mean(algorithm, world):
    ranks = InProcessRanks.create_group(world)
    results = run_threads(world, check_all, algorithm, True, 64, transports=ranks)
    for got in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, results[0], strict=True))


def reduce_other_shapes(ranks):
    with pytest.raises(AggregationError, match="same count, shapes and dtypes"):
        AllReduceAggregator(config(ranks), ranks).aggregate([torch.ones(2 + ranks.rank)])
    return ParameterServer(config(ranks), ranks).broadcast_params([torch.full((3,), 5.0 + ranks.rank)])


def test_ranks_that_reduce_other_shapes_are_told():
    for (got,) in run_threads(2, reduce_other_shapes, transports=InProcessRanks.create_group(2)):
        assert got.tolist() == [5.0] * 3
