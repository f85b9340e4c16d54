"""Communication hooks under DistributedDataParallel, in processes."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.errors import ConfigError, ShapeError
from shoal.testing import run_ranks
from shoal.train import TopKState, make_hook, topk_hook


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 30), nn.ReLU(), nn.Linear(30, 1))


def train(rank, register, steps=6):
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.005)
    register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(16, 20, generator=generator)
        optimizer.zero_grad()
        ((model(x) - x.sum(1, keepdim=True)) ** 2).mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], model


def ratio_one(rank, world):
    plain, _ = train(rank, lambda m: None)
    for start_step, min_numel in ((0, 1), (2, 100)):
        state = TopKState(1.0, start_step=start_step, min_numel=min_numel)
        hooked, _model = train(rank, lambda m, s=state: m.register_comm_hook(s, topk_hook))
        for a, b in zip(plain, hooked, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert state.step == 6
        assert len(state.memory) == sum(p.numel() >= min_numel for p in make_model().parameters())
    return hooked


def test_keeping_everything_equals_plain_ddp():
    a, b = run_ranks(2, ratio_one, timeout_s=200)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Variables(nn.Module):
    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(8))

    def forward(self, sign):
        return sign * 10 * self.x[0] + 0.5 * ((self.x[1:] - 1) ** 2).sum()


def quadratic(rank, world, feedback, steps):
    model = DistributedDataParallel(Variables())
    state = TopKState(0.125, error_feedback=feedback, start_step=0, min_numel=1)
    model.register_comm_hook(state, topk_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(1.0 if rank == 0 else -1.0).backward()
        optimizer.step()
    return 0.5 * ((model.module.x[1:] - 1) ** 2).sum().item()


def test_feedback_is_what_lets_the_small_components_arrive():
    assert run_ranks(2, quadratic, True, 600, timeout_s=200)[0] < 0.02
    assert run_ranks(2, quadratic, False, 60, timeout_s=200) == [3.5, 3.5]


def overflow(rank, world):
    model = DistributedDataParallel(nn.Linear(64, 32, bias=False))
    state = TopKState(0.1, start_step=0, min_numel=1)
    model.register_comm_hook(state, topk_hook)
    parameter = model.module.weight
    remembered = []
    for step in range(3):
        model.zero_grad()
        scale = float("inf") if step == 1 and rank == 1 else 1.0
        (model(torch.ones(1, 64)).sum() * scale).backward()
        assert bool(torch.isfinite(parameter.grad).all()) is (step != 1)
        remembered.append(state.memory[parameter].clone())
    assert all(bool(torch.isfinite(m).all()) for m in remembered)
    assert torch.equal(remembered[0], remembered[1]) is (rank == 1)


def test_infinity_reaches_all_ranks_and_stays_out_of_the_memory():
    run_ranks(2, overflow, timeout_s=200)


def test_memory_is_saved_by_name_and_comes_back(tmp_path):
    model, other = make_model(), make_model()
    state = TopKState(0.1)
    state.step = 7
    for parameter in model.parameters():
        state.compress(parameter, torch.randn_like(parameter))
    torch.save(state.state_dict(model), tmp_path / "state")
    again = TopKState(0.1)
    again.load_state_dict(torch.load(tmp_path / "state", weights_only=True), other)
    assert again.step == 7
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(state.memory[a], again.memory[b])
    with pytest.raises(ShapeError, match=r"0\.weight"):
        again.load_state_dict(state.state_dict(model), nn.Sequential(nn.Linear(3, 3)))
    assert again.step == 7


def by_name(rank, world):
    for name, kw in (("powersgd", {"matrix_approximation_rank": 1}), ("fp16", {}), ("allreduce", {})):
        state, hook = make_hook(name, **kw)
        train(rank, lambda m, s=state, h=hook: m.register_comm_hook(s, h), steps=2)


def test_hooks_by_name():
    state, hook = make_hook("topk", ratio=0.5)
    assert (state.ratio, hook) == (0.5, topk_hook)
    with pytest.raises(ConfigError, match="topk"):
        make_hook("top")
    with pytest.raises(ConfigError):
        make_hook("fp16", ratio=0.5)
    with pytest.raises(ConfigError):
        TopKState(0.5, start_step=-1)
    assert make_hook("bf16")[1].__name__ == "bf16_compress_hook"  # DDP supports it only on CUDA
    run_ranks(2, by_name, timeout_s=200)
