"""The train step, the epoch, and two-level reduction."""

import math
import time

import pytest
import torch
import torch.distributed as dist

from shoal.comm import DistributedConfig, ProcessGroupTransport
from shoal.errors import AggregationError, ConfigError, StepAborted
from shoal.testing import run_ranks, run_threads
from shoal.train import (
    AllReduceAggregator,
    DataParallelConfig,
    EpochMetrics,
    GradientAggregator,
    HierarchicalAggregator,
    LocalAggregator,
    ParameterServer,
    distributed_train_step,
    train_epoch_distributed,
)


def config(t):
    return DistributedConfig(t.world_size, t.rank)


def test_a_step_computes_aggregates_and_applies_once():
    applied = []
    loss = distributed_train_step(lambda: (torch.tensor(2.5), [torch.ones(2)]), applied.append, LocalAggregator())
    assert loss == 2.5
    assert type(loss) is float
    assert [g[0].tolist() for g in applied] == [[1.0, 1.0]]


@pytest.mark.parametrize("kind", ["ring", "ordered", "server"])
def test_one_failing_rank_aborts_all_and_parameters_stay(kind):
    def work(t):
        agg = ParameterServer(config(t), t) if kind == "server" else AllReduceAggregator(config(t), t, algorithm=kind)
        applied = []

        def compute():
            if t.rank in (1, 3):
                raise KeyError("bad batch")
            return 1.0, [torch.ones(2)]

        began = time.monotonic()
        if t.rank in (1, 3):
            with pytest.raises(KeyError):
                distributed_train_step(compute, applied.append, agg)
        else:
            with pytest.raises(StepAborted) as caught:
                distributed_train_step(compute, applied.append, agg)
            assert caught.value.failed_ranks == [1, 3]
        assert time.monotonic() - began < 30  # not the transport's deadline
        assert applied == []
        return distributed_train_step(lambda: (t.rank, [torch.ones(1)]), applied.append, agg, reduce_loss=True)

    assert run_threads(4, work, timeout_s=200) == [1.5] * 4


class Unreliable(AllReduceAggregator):
    """Rank 1 fails, with an error of its own, after it took part in the reduction."""

    def aggregate(self, local_gradients):
        result = super().aggregate(local_gradients)
        if self.config.rank == 1:
            raise OSError("no memory for the result")
        return result


def test_nobody_applies_before_all_ranks_have_their_aggregate():
    def work(t):
        applied = []
        kind = OSError if t.rank == 1 else StepAborted
        with pytest.raises(kind) as caught:
            distributed_train_step(lambda: (1.0, [torch.ones(2)]), applied.append, Unreliable(config(t), t))
        assert applied == []
        return getattr(caught.value, "failed_ranks", None)

    assert run_threads(3, work, timeout_s=200) == [[1], None, [1]]


def test_the_failing_ranks_own_exception_comes_out_whatever_the_others_do():
    def work(t):
        agg = AllReduceAggregator(config(t), t)
        if t.rank == 0:
            t.close()
            return
        with pytest.raises(KeyError):
            distributed_train_step(lambda: {}["no such batch"], print, agg)

    run_threads(2, work, timeout_s=200)


def test_a_rank_that_cannot_apply_does_not_leave_the_others_waiting_for_its_loss():
    def work(t):
        def apply(gradients):
            if t.rank == 1:
                raise KeyError("no room")

        def step():
            agg = AllReduceAggregator(config(t), t)
            return distributed_train_step(lambda: (t.rank, [torch.ones(1)]), apply, agg, reduce_loss=True)

        began = time.monotonic()
        if t.rank == 1:
            with pytest.raises(KeyError, match="no room"):
                step()
        else:
            assert step() == 1.0
        assert time.monotonic() - began < 30  # not the transport's deadline

    run_threads(3, work)


def test_input_that_raises_on_one_rank_ends_the_epoch_on_all():
    def batches(t):
        yield 1.0
        if t.rank == 1:
            raise OSError("the file is gone")
        yield 2.0

    def work(t):
        w = torch.zeros(1, requires_grad=True)

        def step_fn(batch):
            (w * batch).sum().backward()
            return batch

        with pytest.raises(OSError if t.rank == 1 else StepAborted):
            train_epoch_distributed(
                [w], torch.optim.SGD([w], lr=1.0), AllReduceAggregator(config(t), t), batches(t), step_fn
            )
        return w.item()

    assert run_threads(3, work, timeout_s=200) == [-1.0] * 3


@pytest.mark.parametrize("policy", ["apply", "skip", "raise"])
def test_nonfinite_policies_act_on_all_ranks(policy):
    def work(t):
        applied = []
        grad = torch.tensor([math.nan if t.rank == 0 else 1.0])
        agg = AllReduceAggregator(config(t), t)
        try:
            loss = distributed_train_step(lambda: (0.5, [grad]), applied.append, agg, nonfinite=policy)
        except AggregationError:
            loss = "raised"
        return loss, len(applied)

    want = {"apply": (0.5, 1), "skip": (0.5, 0), "raise": ("raised", 0)}[policy]
    assert run_threads(2, work) == [want] * 2
    with pytest.raises(ConfigError):
        distributed_train_step(lambda: (0, []), print, LocalAggregator(), nonfinite="hide")


def test_a_users_aggregator_needs_only_aggregate():
    class Doubling(GradientAggregator):
        def aggregate(self, local_gradients):
            return [g * 2 for g in local_gradients]

    got = []
    distributed_train_step(lambda: (0, [torch.ones(1)]), got.extend, Doubling())
    assert got[0].item() == 2.0


def test_data_parallel_config_forwards():
    pair = DataParallelConfig(DistributedConfig(1, 0), LocalAggregator())
    assert pair.train_step(lambda: (3, [torch.ones(1)]), lambda g: None, reduce_loss=True) == 3.0


X, Y = torch.tensor([-1.0, 0, 2, 3]), torch.tensor([-4.0, -1, 5, 8])


def line(rows, aggregator, epochs=3):
    w, b = torch.zeros((), requires_grad=True), torch.zeros((), requires_grad=True)
    unused = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([w, b, unused], lr=0.05)
    metrics = []

    def step_fn(batch):
        x, y = batch
        loss = ((w * x + b - y) ** 2).mean()
        loss.backward()
        return loss

    for _ in range(epochs):
        metrics.append(train_epoch_distributed([w, b, unused], optimizer, aggregator, [(X[rows], Y[rows])], step_fn))
    assert torch.equal(unused, torch.ones(2))
    return metrics, w.item(), b.item()


def test_the_worked_line():
    metrics, w, b = line(slice(0, 4), LocalAggregator())
    assert [m.mean_loss for m in metrics] == pytest.approx([26.5, 11.22875, 5.30245], rel=1e-5)
    assert metrics[0].steps == 1
    assert (w, b) == (pytest.approx(1.927375), pytest.approx(0.30175))


def test_two_ranks_train_like_one_on_the_joined_batch():
    def work(t):
        return line(slice(2 * t.rank, 2 * t.rank + 2), AllReduceAggregator(config(t), t))[1:]

    a, b = run_threads(2, work)
    assert a == b
    assert a == (pytest.approx(1.927375), pytest.approx(0.30175))


def test_uneven_ranks_stop_together_or_fail_together():
    def work(t, on_uneven):
        w = torch.zeros(1, requires_grad=True)
        agg = AllReduceAggregator(config(t), t)
        calls = []

        def step_fn(batch):
            calls.append(batch)
            (w * batch).sum().backward()
            return float(batch)

        try:
            got = train_epoch_distributed(
                [w], torch.optim.SGD([w], lr=1.0), agg, range(2 + t.rank), step_fn, on_uneven=on_uneven
            )
        except AggregationError:
            got = "error"
        return got, calls

    assert run_threads(3, work, "stop", timeout_s=200) == [(EpochMetrics(0.5, 2), [0, 1])] * 3
    assert run_threads(3, work, "error", timeout_s=200) == [("error", [0, 1])] * 3


def test_an_epoch_needs_a_batch():
    w = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0)
    with pytest.raises(ConfigError):
        train_epoch_distributed([w], optimizer, LocalAggregator(), [], lambda b: 0)
    with pytest.raises(ConfigError):
        train_epoch_distributed([w], optimizer, LocalAggregator(), [1], lambda b: 0, on_uneven="wait")


def processes(rank, world):
    t = ProcessGroupTransport(default_timeout_s=60)
    agg = AllReduceAggregator(config(t), t)

    def compute():
        if rank == 0:
            raise KeyError("bad batch")
        return 1.0, [torch.ones(2)]

    with pytest.raises(KeyError if rank == 0 else StepAborted) as caught:
        distributed_train_step(compute, pytest.fail, agg)
    if rank:
        assert caught.value.failed_ranks == [0]
    rows = slice(2 * rank, 2 * rank + 2)
    return line(rows, agg)[1:]


def test_processes_abort_together_and_train_like_one():
    a, b = run_ranks(2, processes, timeout_s=200)
    assert a == b
    assert a == (pytest.approx(1.927375), pytest.approx(0.30175))


def hierarchical(rank, world):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    t = ProcessGroupTransport(default_timeout_s=60)
    for average in (True, False):
        two = HierarchicalAggregator(mesh.get_group("local"), mesh.get_group("node"), average=average)
        flat = AllReduceAggregator(config(t), t, average=average)
        generator = torch.Generator().manual_seed(rank)
        grads = [torch.randn(s, generator=generator) for s in [(7, 3), (), (0,), (1001,)]]
        grads.append(torch.randn(5, generator=generator).bfloat16())
        got = two.aggregate(grads)
        for a, b in zip(got, flat.aggregate(grads), strict=True):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    big = [torch.randn(10_000)]
    two.aggregate(big)
    assert two.last_stats["inter_bytes_sent"] == pytest.approx(2 * (2 - 1) / 2 * 40_000 / 2, rel=0.01)
    with pytest.raises(AggregationError):
        two.aggregate([torch.ones(2 + (rank == 3))])
    with pytest.raises((StepAborted, KeyError)) as caught:
        distributed_train_step(raise_on_two if rank == 2 else lambda: (0, []), pytest.fail, two)
    if rank != 2:
        assert caught.value.failed_ranks == [2]
    dist.barrier()
    return got


def raise_on_two():
    raise KeyError("two")


def test_two_levels_equal_one_on_a_two_by_two_group():
    first, *others = run_ranks(4, hierarchical, timeout_s=200)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
