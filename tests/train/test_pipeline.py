"""The pipeline runner: one process first, then ranks."""

import itertools
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.errors import ConfigError, PipelineError
from shoal.testing import run_ranks
from shoal.train import PipelineParallelConfig, PipelineRunner, schedule_actions, split_by_cost

mse = nn.MSELoss()


def make_layers():
    torch.manual_seed(0)
    return [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 7), nn.Linear(7, 2)]


def batch(rows=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 2, generator=generator)


def full_batch(x, y, weights=None, parts=1):
    """Gradients of one pass whose loss is the mean over micro-batches."""
    layers = make_layers()
    out = nn.Sequential(*layers)(x)
    sizes = [len(x) // parts + (i < len(x) % parts) for i in range(parts)]
    losses = [mse(o, t) for o, t in zip(out.split(sizes), y.split(sizes), strict=True)]
    loss = sum(one * n for one, n in zip(losses, sizes, strict=True)) / len(x)
    loss.backward()
    return layers, loss.detach(), out.detach()


def check_gradients(layers, want, only=None):
    for i, (a, b) in enumerate(zip(layers, want, strict=True)):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            if only is None or i in only:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)
            else:
                assert p.grad is None


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_local_runner_equals_the_full_batch(kind, stages, parts):
    layers = make_layers()
    x, y = batch()
    runner = PipelineRunner(layers, PipelineParallelConfig(stages, parts, kind), loss_fn=mse)
    got = runner.step(x, y)
    want, loss, out = full_batch(x, y)
    check_gradients(layers, want)
    torch.testing.assert_close(got.loss, loss)
    torch.testing.assert_close(got.outputs, out)
    assert len(got.losses) == parts
    assert not got.loss.requires_grad
    assert not got.outputs.requires_grad
    for s in range(stages):
        assert [a for stage, a, _, _ in runner.last_trace if stage == s] == schedule_actions(kind, stages, parts, s)
    assert all(begin <= end for _, _, begin, end in runner.last_trace)
    again = make_layers()
    PipelineRunner(again, PipelineParallelConfig(stages, parts, kind), loss_fn=mse).step(x, y)
    for a, b in zip(nn.Sequential(*layers).parameters(), nn.Sequential(*again).parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_uneven_batches_are_refused_or_weighted():
    x, y = batch(7)
    config = PipelineParallelConfig(2, 3)
    with pytest.raises(PipelineError, match="divisible"):
        PipelineRunner(make_layers(), config, loss_fn=mse).step(x, y)
    layers = make_layers()
    got = PipelineRunner(layers, config, loss_fn=mse, allow_uneven=True).step(x, y)
    want, loss, _ = full_batch(x, y)
    check_gradients(layers, want)
    torch.testing.assert_close(got.loss, loss)
    assert len(got.losses) == 3
    with pytest.raises(PipelineError):
        PipelineRunner(make_layers(), config, loss_fn=mse, allow_uneven=True).step(x[:2], y[:2])
    with pytest.raises(PipelineError):
        PipelineRunner(make_layers(), config, loss_fn=mse).step(x[:6], y[:3])
    with pytest.raises(PipelineError):
        PipelineRunner(make_layers(), config, loss_fn=mse).step(x)


def test_splits_are_the_users_choice():
    layers = make_layers()
    x, y = batch()
    runner = PipelineRunner(
        layers,
        PipelineParallelConfig(2, 2),
        loss_fn=mse,
        splits=split_by_cost([9, 0, 1, 0, 1, 1], 2),
        devices=["cpu", "cpu"],
    )
    assert [len(runner.stage_layers(s)) for s in range(2)] == [1, 5]
    runner.step(x, y)
    check_gradients(layers, full_batch(x, y)[0])
    for bad in (
        {"splits": split_by_cost([1] * 5, 2)},
        {"devices": ["cpu"]},
        {"return_loss": "none"},
        {"schedule_class": object},
    ):
        with pytest.raises(ConfigError):
            PipelineRunner(layers, PipelineParallelConfig(2, 2), loss_fn=mse, **bad)


def in_place_layers():
    layers = make_layers()
    layers[3] = nn.ReLU(inplace=True)  # the first layer of stage 1 of 2
    return layers


def in_place_gradients(x, y):
    want = in_place_layers()
    mse(nn.Sequential(*want)(x), y).backward()
    return want


def test_a_stage_may_begin_with_a_layer_that_works_in_place():
    layers, (x, y) = in_place_layers(), batch()
    PipelineRunner(layers, PipelineParallelConfig(2, 4), loss_fn=mse).step(x, y)
    check_gradients(layers, in_place_gradients(x, y))


def test_a_batch_without_rows_is_refused():
    runner = PipelineRunner(make_layers(), PipelineParallelConfig(2, 1), loss_fn=mse)
    with pytest.raises(PipelineError, match="dim 0"):
        runner.step(torch.tensor(1.0), torch.tensor(1.0))


class Breaks(nn.Module):
    def __init__(self, when):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.when, self.calls = when, 0

    def forward(self, x):
        self.calls += 1
        if self.when == "forward" and self.calls == 3:
            raise ArithmeticError("broken forward")
        return BadBackward.apply(x * self.w) if self.when == "backward" else x * self.w


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ArithmeticError("broken backward")


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_stage_that_raises_is_named(when):
    layers = make_layers()
    layers[1] = Breaks(when)
    runner = PipelineRunner(layers, PipelineParallelConfig(3, 4), loss_fn=mse)
    with pytest.raises(PipelineError, match=f"stage 0.*broken {when}") as caught:
        runner.step(*batch())
    assert isinstance(caught.value.__cause__, ArithmeticError)


# Ranks


def stage_rows(runner, stage):
    cut = runner.stages[stage]
    return set(range(cut.start_layer, cut.end_layer))


def ranks_case(rank, world):
    from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

    x, y = batch()
    want, loss, out = full_batch(x, y)
    last = world - 1
    for kind in ("gpipe", "1f1b"):
        for parts in (1, 2, 4):
            layers = make_layers()
            runner = PipelineRunner(
                layers,
                PipelineParallelConfig(world, parts, kind),
                loss_fn=mse,
                group=dist.group.WORLD,
                return_loss="all",
            )
            for _ in range(2):
                for layer in layers:
                    layer.zero_grad()
                got = runner.step(x if rank == 0 else None, y if rank == last else None)
                check_gradients(layers, want, stage_rows(runner, rank))
                torch.testing.assert_close(got.loss, loss)
                if rank == last:
                    torch.testing.assert_close(got.outputs, out)
                    assert len(got.losses) == parts
                else:
                    assert got.outputs is None
                    assert got.losses == []
            if kind == "gpipe" or parts >= world:
                actions = [(s, a) for s, a, _, _ in runner.last_trace]
                assert actions == [(rank, a) for a in schedule_actions(kind, world, parts, rank)]
    if world == 2:
        layers = in_place_layers()
        runner = PipelineRunner(layers, PipelineParallelConfig(2, 4), loss_fn=mse, group=dist.group.WORLD)
        runner.step(x if rank == 0 else None, y if rank == last else None)
        check_gradients(layers, in_place_gradients(x, y), stage_rows(runner, rank))
    # another batch size through the same runner, and uneven micro-batches
    layers = make_layers()
    uneven = PipelineRunner(
        layers, PipelineParallelConfig(world, 3), loss_fn=mse, group=dist.group.WORLD, allow_uneven=True
    )
    for rows in (7, 8, 9, 7):
        x2, y2 = batch(rows)
        for layer in layers:
            layer.zero_grad()
        got = uneven.step(x2 if rank == 0 else None, y2 if rank == last else None)
        want2, loss2, out2 = full_batch(x2, y2)
        check_gradients(layers, want2, stage_rows(uneven, rank))
        if rank == last:
            torch.testing.assert_close(got.loss, loss2)
            torch.testing.assert_close(got.outputs, out2)
        else:
            assert got.loss is None
    # torch's multi-stage schedules
    for schedule_class in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        layers = make_layers()
        stages = 2 * world if world < 3 else world
        runner = PipelineRunner(
            layers,
            PipelineParallelConfig(stages, 4),
            loss_fn=mse,
            group=dist.group.WORLD,
            schedule_class=schedule_class,
            return_loss="all",
        )
        got = runner.step(x if rank == 0 else None, y if rank == last else None)
        rows = set().union(*(stage_rows(runner, s) for s in range(stages) if s % world == rank))
        check_gradients(layers, want, rows)
        torch.testing.assert_close(got.loss, loss)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_equal_the_full_batch(world):
    run_ranks(world, ranks_case, timeout_s=200)


def nothing_pickled(rank, world):
    from torch.distributed import distributed_c10d

    def refuse(*args, **kwargs):
        raise AssertionError("a rank unpickled what another one sent")

    distributed_c10d._tensor_to_object = refuse
    x, y = batch()
    config = PipelineParallelConfig(world, 4)
    runner = PipelineRunner(make_layers(), config, loss_fn=mse, group=dist.group.WORLD, return_loss="all")
    got = runner.step(x if rank == 0 else None, y if rank == world - 1 else None)
    with pytest.raises(PipelineError, match="must pass inputs"):
        runner.step(None, y)
    return got.loss.item(), str(got.loss.dtype)


def test_a_step_exchanges_no_pickles_and_the_loss_to_the_bit():
    first, second = run_ranks(2, nothing_pickled, timeout_s=200)
    assert first == second
    assert first[1] == "torch.float32"


def broken_case(rank, world):
    x, y = batch()
    last = world - 1
    for when in ("forward", "backward", "loss", "shape", "missing", "scalar", "indivisible"):
        layers = make_layers()
        loss_fn = mse
        if when in ("forward", "backward"):
            layers[2 if world == 3 else 0].register_forward_hook(hook_of(when))
        if when == "loss":
            loss_fn = broken_loss
        if when == "shape":
            layers[4] = nn.Linear(99, 7)
        runner = PipelineRunner(layers, PipelineParallelConfig(world, 4), loss_fn=loss_fn, group=dist.group.WORLD)
        began = time.monotonic()
        rows = 7 if when == "indivisible" else 8
        target = torch.tensor(1.0) if when == "scalar" else y[:rows]
        with pytest.raises(PipelineError) as caught:
            runner.step(x[:rows] if rank == 0 and when != "missing" else None, target if rank == last else None)
        assert time.monotonic() - began < 60  # not the group's deadline
        named = {"forward": "stage 0" if world == 2 else "stage 1", "loss": f"stage {last}", "missing": "stage 0"}
        assert named.get(when, "") in str(caught.value), (when, str(caught.value))
    # the group still works
    layers = make_layers()
    runner = PipelineRunner(layers, PipelineParallelConfig(world, 4), loss_fn=mse, group=dist.group.WORLD)
    runner.step(x if rank == 0 else None, y if rank == last else None)
    check_gradients(layers, full_batch(x, y)[0], stage_rows(runner, rank))


def broken_loss(output, target):
    raise ArithmeticError("broken loss")


def hook_of(when):
    calls = []

    def hook(module, args, output):
        if output.device.type == "meta":
            return output
        calls.append(1)
        if when == "forward" and len(calls) == 3:
            raise ArithmeticError("broken forward")
        return BadBackward.apply(output) if when == "backward" and len(calls) == 2 else output

    return hook


@pytest.mark.parametrize("world", [2, 3])
def test_a_stage_that_raises_stops_all_ranks_quickly(world):
    run_ranks(world, broken_case, timeout_s=200)


def test_a_group_of_another_size_is_refused():
    run_ranks(2, wrong_size, timeout_s=200)


def wrong_size(rank, world):
    with pytest.raises(ConfigError):
        PipelineRunner(make_layers(), PipelineParallelConfig(3, 2), loss_fn=mse, group=dist.group.WORLD)


def ideal_slots(kind, stages, parts):
    """When each stage does what if every action takes one slot and waits for nothing but its input."""
    waiting = [schedule_actions(kind, stages, parts, stage)[::-1] for stage in range(stages)]
    when, slot = {}, 0
    while any(waiting):
        ready = []
        for stage, actions in enumerate(waiting):
            source = stage - 1 if actions and actions[-1][0] == "F" else stage + 1
            if actions and (not 0 <= source < stages or when.get((source, actions[-1]), slot) < slot):
                ready.append(stage)
        when.update({(stage, waiting[stage].pop()): slot for stage in ready})
        slot += 1
    return when, slot


class Meets(nn.Module):
    """A layer that waits, forward and backward, until all stages with the same ideal slot are in it."""

    def __init__(self, kind, stage, slots):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.kind, self.stage, self.slots = kind, stage, slots
        self.counts = {"F": itertools.count(), "B": itertools.count()}

    def forward(self, x):
        return x * self.w if x.device.type == "meta" else Meeting.apply(x, self.w, self)

    def arrive(self, letter):
        mine = self.stage, f"{letter}{next(self.counts[letter])}"
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{self.kind} {mine}", "here")
        everyone = [f"{self.kind} {other}" for other, slot in self.slots.items() if slot == self.slots[mine]]
        store.wait(everyone, timedelta(seconds=60))


class Meeting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, layer):
        layer.arrive("F")
        ctx.layer = layer
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        ctx.layer.arrive("B")
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(), None


def ideal_case(rank, world, parts):
    x = torch.ones(parts, 4)
    for kind in ("gpipe", "1f1b"):
        slots, count = ideal_slots(kind, world, parts)
        assert count == 2 * (parts + world - 1)
        layers = [Meets(kind, stage, slots) for stage in range(world)]
        config = PipelineParallelConfig(world, parts, kind)
        runner = PipelineRunner(layers, config, loss_fn=mse, group=dist.group.WORLD)
        runner.step(x if rank == 0 else None, x if rank == world - 1 else None)
        assert [action for _, action, _, _ in runner.last_trace] == schedule_actions(kind, world, parts, rank)


def test_stages_work_at_the_same_time_as_in_the_schedules_ideal():
    run_ranks(3, ideal_case, 8, timeout_s=200)
