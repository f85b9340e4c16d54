"""Every optimizer on the GPU against the CPU table's: weights and states, for distinct and for repeated ids."""

import pytest
import torch
from gpu_tables import assert_same_rows, config, pair

import shoal
from shoal.table import (
    AdagradOptimizer,
    DynamicWdAdagradOptimizer,
    FtrlOptimizer,
    HashTable,
    OneBitCompressor,
    RandomUniformInitializer,
    SgdOptimizer,
    ZerosInitializer,
)

OPTIMIZERS = [
    shoal.Sgd(lr=0.1),
    shoal.Adagrad(lr=0.1, weight_decay=0.01),
    shoal.Adagrad(lr=0.1, initial_accumulator=0.0),
    shoal.RowwiseAdagrad(lr=0.1, weight_decay=0.01),
    shoal.Adadelta(lr=0.5, weight_decay=0.01, eps=0.01),
    shoal.Adam(lr=0.1, eps=0.01),
    shoal.Adam(lr=0.1, eps=0.01, nesterov=True, weight_decay=0.01),
    shoal.Amsgrad(lr=0.1, eps=0.01),
    shoal.AdamW(lr=0.1, eps=0.01),
    shoal.Lamb(lr=0.1, eps=0.01, weight_decay=0.01),
    shoal.Momentum(lr=0.1, weight_decay=0.01),
    shoal.Momentum(lr=0.1, nesterov=True),
    shoal.MovingAverage(momentum=0.9),
    shoal.RmsProp(lr=0.1, weight_decay=0.01),
    shoal.RmsPropV2(lr=0.1),
    shoal.Ftrl(lr=0.1, l1=0.05, l2=0.1, beta=1.0),
    shoal.GroupFtrl(lr=0.1, l1=0.05, l2=0.1),
    shoal.GroupAdagrad(lr=0.1, l2=0.05, weight_decay=0.01),
    DynamicWdAdagradOptimizer(weight_decay_factor=0.05, enable_dynamic_wd=False),
]


def names(optimizer):
    return repr(optimizer)[:40]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=names)
def test_steps_are_those_of_the_cpu(optimizer, device):
    torch.manual_seed(1)
    lr = 0.1 if isinstance(optimizer, DynamicWdAdagradOptimizer) else None
    cpu, gpu = pair(5, optimizer, lr=lr)
    for step in range(2):
        ids = torch.randint(-4, 9, (16,))
        grads = torch.randn(16, 5)
        dedup = step == 0
        cpu.apply_gradients(ids, grads, step, enable_dedup=dedup)
        gpu.apply_gradients(ids.to(device), grads.to(device), step, enable_dedup=dedup)
    ids = torch.randperm(20)[:14] - 6
    grads = torch.randn(14, 5)
    cpu.apply_gradients(ids, grads, 9)
    gpu.apply_gradients(ids.to(device), grads.to(device), 9, distinct=True)
    # The difference after a few steps with different rounding; one step is within 1e-6.
    assert_same_rows(cpu, gpu, 2e-5 if isinstance(optimizer, shoal.Ftrl | shoal.GroupFtrl) else 3e-6)


def test_batch_softmax_counts_steps(device):
    cpu, gpu = pair(1, shoal.BatchSoftmax(lr=0.25), initializer=RandomUniformInitializer(1.0, 3.0))
    for step in (8, 20, (1 << 40) + 5):
        ids, grads = torch.tensor([1, 2, 1]), torch.zeros(3, 1)
        cpu.apply_gradients(ids, grads, step)
        gpu.apply_gradients(ids.to(device), grads.to(device), step)
    assert_same_rows(cpu, gpu)


@pytest.mark.parametrize("dedup", [False, True])
def test_stochastic_rounding_draws_what_the_cpu_draws(dedup, device):
    cpu, gpu = pair(4, shoal.Sgd(lr=0.1, stochastic_rounding=True))
    torch.manual_seed(2)
    for step in range(3):
        ids, grads = torch.randint(0, 9, (24,)), torch.randn(24, 4)
        if dedup:  # sums are rounded in another order, but integers need no rounding
            grads = grads.round() / 8
        cpu.apply_gradients(ids, grads, step, enable_dedup=dedup)
        gpu.apply_gradients(ids.to(device), grads.to(device), step, enable_dedup=dedup)
    assert_same_rows(cpu, gpu)
    weights = gpu.lookup(torch.arange(9, device=device)).cpu()
    assert torch.equal(weights, weights.half().float())


def test_long_runs_of_equal_ids_are_summed_once(device):
    cpu, gpu = pair(3, shoal.Adagrad(lr=0.1))
    torch.manual_seed(3)
    ids = torch.where(torch.rand(90) < 0.5, 5, torch.randint(0, 40, (90,)))
    grads = torch.randn(90, 3)
    cpu.apply_gradients(ids, grads, enable_dedup=True)
    gpu.apply_gradients(ids.to(device), grads.to(device), enable_dedup=True)
    assert_same_rows(cpu, gpu, 3e-6)


def test_deterministic_sums_do_not_depend_on_where_rows_lie(device):
    torch.manual_seed(4)
    ids, grads = torch.randint(0, 12, (60,)).to(device), torch.randn(60, 3).to(device)
    results = []
    for before in ([], [3, 99, 7], [50, 11, 2, 5]):
        table = shoal.HashTable(3, optimizer="sgd", initializer="zeros", device="cuda", deterministic=True)
        table.assign(torch.tensor(before, dtype=torch.int64, device=device), torch.zeros(len(before), 3, device=device))
        table.apply_gradients(ids, grads, enable_dedup=True)
        results.append(table.lookup(torch.arange(12, device=device)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_segments_have_their_own_optimizer_rate_and_retriever(device):
    segments = [
        (1, ZerosInitializer(), FtrlOptimizer(l1_regularization=0.01), None),
        (3, RandomUniformInitializer(), AdagradOptimizer(), OneBitCompressor(step_size=2, amplitude=0.2)),
        (2, RandomUniformInitializer(-1.0, 1.0), SgdOptimizer(), None),
    ]
    cpu = HashTable.from_config(config(segments, [0.5, 0.05, 0.1]), name="cpu", seed=3)
    gpu = HashTable.from_config(config(segments, [0.5, 0.05, 0.1]), name="gpu", seed=3, device="cuda")
    torch.manual_seed(5)
    for step in range(3):
        ids, grads = torch.randint(0, 9, (12,)), torch.randn(12, 6)
        cpu.apply_gradients(ids, grads, step)
        gpu.apply_gradients(ids.to(device), grads.to(device), step)
    ids = torch.arange(12)
    torch.testing.assert_close(gpu.lookup(ids.to(device)).cpu(), cpu.lookup(ids), rtol=1e-5, atol=1e-6)
    assert_same_rows(cpu, gpu, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [3, 128])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_programs_that_run_at_once_do_not_read_what_they_have_written(optimizer, dim):
    ids = (torch.rand(30_000) ** 2 * 20_000).long()
    grads = torch.randint(-4, 5, (30_000, dim)) / 64  # sums are exact in any order
    distinct = torch.unique(ids)
    for dedup in (True, False):
        cpu, gpu = pair(dim, optimizer)
        for step in range(3):  # ids are new in the first
            for table, to in ((cpu, "cpu"), (gpu, "cuda")):
                table.apply_gradients(ids.to(to), grads.to(to), step, enable_dedup=dedup)
        for table, to in ((cpu, "cpu"), (gpu, "cuda")):
            further = {"distinct": True} if table is gpu else {}
            table.apply_gradients(distinct.to(to), grads[: distinct.numel()].to(to), 4, **further)
        assert_same_rows(cpu, gpu, 1e-3)
