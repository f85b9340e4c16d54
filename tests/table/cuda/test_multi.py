"""Several GPU tables as one object behave like CPU tables: by name, raw, fused, and their checkpoint."""

import pytest
import torch
from gpu_tables import assert_same_rows, config

from shoal.errors import ConfigError
from shoal.ragged import Ragged
from shoal.table import (
    AdagradOptimizer,
    AdamOptimizer,
    MultiHashTable,
    RandomUniformInitializer,
    SgdOptimizer,
    StochasticRoundingFloat16OptimizerWrapper,
    ZerosInitializer,
    fused_apply_gradient,
    reset_registry,
)


@pytest.fixture(autouse=True)
def no_tables_left():
    reset_registry()
    yield
    reset_registry()


def both(rates=(0.1, 0.2, 0.3, 0.4), **options):
    """Tables a and c share their layout; b and d do not."""
    one = [(3, RandomUniformInitializer(), AdagradOptimizer())]
    other = [(2, ZerosInitializer(), SgdOptimizer())]
    rounding = [(3, ZerosInitializer(), StochasticRoundingFloat16OptimizerWrapper(SgdOptimizer()))]
    layouts = {"a": one, "b": other, "c": one, "d": rounding}
    torch.manual_seed(11)
    return [
        MultiHashTable.from_configs(
            {name: config(s, [rate]) for (name, s), rate in zip(layouts.items(), rates, strict=True)},
            name_suffix=device,
            device=device,
            **options,
        )
        for device in ("cpu", "cuda")
    ]


def same(cpu, gpu, tolerance=1e-5):
    for name in cpu.table_names:
        assert_same_rows(cpu.tables[name], gpu.tables[name], tolerance)


def writes(device, names="abcd", n=9):
    dims = {"a": 3, "b": 2, "c": 3, "d": 3}
    torch.manual_seed(len(names) + n)
    made = {name: (torch.randint(0, 12, (n,)), torch.randn(n, dims[name])) for name in names}
    return made, {name: (ids.to(device), values.to(device)) for name, (ids, values) in made.items()}


def test_tables_of_equal_rows_share_a_group(device):
    _, gpu = both()
    a, b, c, d = gpu.tables.values()
    assert a._storage is c._storage
    assert a._storage is not b._storage
    assert d._storage.tables == 1


def test_calls_by_name(device):
    cpu, gpu = both()
    for call in ("assign", "apply_gradients", "assign_add", "apply_gradients"):
        here, there = writes(device, "abcd" if call != "assign" else "ca")
        getattr(cpu, call)(here, req_time=7)
        getattr(gpu, call)(there, req_time=7)
        same(cpu, gpu)
    ids = torch.arange(14)
    mine, theirs = gpu.lookup({n: ids.to(device) for n in "abx"}), cpu.lookup(dict.fromkeys("abx", ids))
    assert set(mine) == set(theirs) == {"a", "b"}
    for name, rows in theirs.items():
        torch.testing.assert_close(mine[name].cpu(), rows, rtol=1e-5, atol=1e-6)
    assert gpu.size() == cpu.size()
    status = gpu.reinitialize("a", torch.tensor([1, 99], device=device))[1]
    assert status.tolist() == cpu.reinitialize("a", torch.tensor([1, 99]))[1].tolist()
    assert gpu.reinitialize("x", ids.to(device))[1].tolist() == [-1] * 14
    assert all(table.max_update_time == 7 for table in gpu.tables.values())
    gpu.tables["c"].clear()
    cpu.tables["c"].clear()
    assert gpu.size() == cpu.size()
    here, there = writes(device, "abcd", 30)
    cpu.apply_gradients(here)
    gpu.apply_gradients(there)
    for name in "bcd":
        assert_same_rows(cpu.tables[name], gpu.tables[name], 1e-5)
    with pytest.raises(KeyError, match="there is no table 'x'"):
        gpu.assign({"x": there["a"]})


def test_raw_calls_glue_requests_together(device):
    cpu, gpu = both()
    here, there = writes(device)
    cpu.assign(here)
    gpu.assign(there)
    values, splits = torch.arange(20), torch.tensor([0, 3, 5, 8, 9, 12, 14, 15, 20])
    mine = gpu.raw_lookup((values.to(device), splits))
    torch.testing.assert_close(mine.cpu(), cpu.raw_lookup((values, splits)))
    ids = Ragged(torch.arange(9).to(device), [0, 2, 4, 7, 9])
    flat = torch.randn(2 * 3 + 2 * 2 + 3 * 3 + 2 * 3)
    gpu.raw_apply_gradients(ids, flat.to(device), 3)
    cpu.raw_apply_gradients(Ragged(torch.arange(9), [0, 2, 4, 7, 9]), flat, 3)
    same(cpu, gpu)


@pytest.mark.parametrize("accumulate", [False, True])
def test_fused_calls(accumulate, device):
    cpu, gpu = both()
    torch.manual_seed(1)
    sizes = torch.tensor([4, 2, 5, 3, 6, 1, 0, 4], dtype=torch.int32)
    ids = torch.randint(0, 6, (25,))
    floats = sum(n * d for n, d in zip(sizes.tolist(), [3, 2, 3, 3] * 2, strict=True))
    for step in range(2):
        grads = torch.randn(floats).round() / 4
        cpu.fused_apply_gradient(ids, None, sizes, grads, None, None, step, 5, 2, accumulate)
        gpu.fused_apply_gradient(ids.to(device), None, sizes, grads.to(device), None, None, step, 5, 2, accumulate)
        same(cpu, gpu)
    for mine, theirs in zip(gpu.fused_lookup(ids.to(device), sizes, 2), cpu.fused_lookup(ids, sizes, 2), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="tables must be on one device"):
        fused_apply_gradient(
            [cpu.tables["a"], gpu.tables["a"]], ids, None, [1, 1], grads, None, None, [0.1, 0.1], None, 0, 1
        )


def test_one_checkpoint_for_both_devices(device, tmp_path):
    cpu, gpu = both()
    here, there = writes(device, "abcd", 40)
    cpu.apply_gradients(here, req_time=9)
    gpu.apply_gradients(there, req_time=9)
    cpu.save(str(tmp_path / "cpu"))
    gpu.save(str(tmp_path / "gpu"))
    assert cpu.feature_stat(str(tmp_path / "gpu")) == cpu.feature_stat(str(tmp_path / "cpu"))
    reset_registry()
    cpu2, gpu2 = both()
    gpu2.apply_gradients({"a": there["a"]})  # will be replaced
    cpu2.restore(str(tmp_path / "gpu"))
    gpu2.restore(str(tmp_path / "cpu"))
    same(cpu, gpu2)
    same(cpu2, gpu)


def test_a_bad_gradient_in_one_table_changes_none(device):
    _, gpu = both()
    _, there = writes(device)
    there["c"][1][2, 1] = float("nan")
    with pytest.raises(ConfigError, match="nothing was applied"):
        gpu.apply_gradients(there).as_op()
    assert gpu.size() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", [SgdOptimizer(), AdamOptimizer()], ids=lambda o: type(o).__name__)
def test_large_batches_for_many_tables_are_those_of_the_cpu(optimizer):
    made, each = [], 20_000
    ids = (torch.exp(torch.rand(10 * each) * 10)).long() * 0x9E3779B97F4A7C1  # a few of them thousands of times
    grads = torch.randint(-4, 5, (ids.numel() * 128,)) / 4096  # sums are exact in any order
    sizes = torch.full((10,), each, dtype=torch.int32)
    for device in ("cpu", "cuda"):
        reset_registry()
        segment = [(128, RandomUniformInitializer(), optimizer)]
        many = MultiHashTable.from_configs({f"t{i}": config(segment, [0.01]) for i in range(10)}, device=device)
        for _ in range(3):
            many.fused_apply_gradient(ids.to(device), None, sizes, grads.to(device), None, None, 1, 0, 1, True)
        made.append(many)
    cpu, gpu = made
    assert cpu.size() == gpu.size()
    want, got = cpu.fused_lookup(ids, sizes, 1), gpu.fused_lookup(ids.cuda(), sizes, 1)
    assert all(torch.equal(a, b) for a, b in zip(want[1:4], got[1:4], strict=True))
    torch.testing.assert_close(got[0].cpu(), want[0], rtol=1e-5, atol=1e-6)
