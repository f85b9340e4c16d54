"""Checkpoints of GPU tables are those of CPU tables, both ways."""

import pytest
import torch
from gpu_tables import assert_same_rows, pair

import shoal
from shoal.errors import DataError
from shoal.table import EntryDump, iterate_table_and_apply


def filled(device, optimizer, n=300):
    cpu, gpu = pair(4, optimizer, expire_after="2d")
    torch.manual_seed(0)
    ids = torch.randperm(5000)[:n] - 1000
    for step in range(2):
        grads = torch.randn(n, 4).round() / 4
        cpu.apply_gradients(ids, grads, step, req_time=1000 + step)
        gpu.apply_gradients(ids.to(device), grads.to(device), step, req_time=1000 + step, distinct=True)
    return cpu, gpu


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "amsgrad", "rowwise_adagrad"])
def test_saved_on_one_device_and_loaded_on_the_other(optimizer, device, tmp_path):
    cpu, gpu = filled(device, optimizer)
    gpu.save(str(tmp_path / "gpu"))
    cpu.save(str(tmp_path / "cpu"))
    cpu2, gpu2 = pair(4, optimizer, expire_after="2d")
    cpu2.restore(str(tmp_path / "gpu"))
    gpu2.restore(str(tmp_path / "cpu"))
    assert_same_rows(cpu2, gpu)
    assert_same_rows(cpu, gpu2)
    assert gpu2.max_update_time == 1001
    ids = torch.arange(-50, 50)
    grads = torch.randn(100, 4)
    cpu.apply_gradients(ids, grads, 7)
    gpu2.apply_gradients(ids.to(device), grads.to(device), 7)
    assert_same_rows(cpu, gpu2, 3e-6)


def test_stale_rows_are_left_out(device, tmp_path):
    table = shoal.HashTable(1, optimizer="sgd", expire_after="2d", device="cuda")
    for id, time in ((1, 827200), (2, 827201), (3, 1000000)):
        table.assign(torch.tensor([id], device=device), torch.ones(1, 1, device=device), time)
    table.save(str(tmp_path / "t"))
    assert table.size() == 3
    other = shoal.HashTable(1, optimizer="sgd", expire_after="2d", device="cuda")
    other.restore(str(tmp_path / "t"))
    assert other.contains(torch.tensor([1, 2, 3], device=device)).tolist() == [False, True, True]


def test_a_bad_file_leaves_the_table_as_it_was(device, tmp_path):
    _, gpu = filled(device, "sgd", 50)
    gpu.save(str(tmp_path / "t"))
    path = next(tmp_path.glob("t-*"))
    path.write_bytes(path.read_bytes()[:-3])
    before = gpu.lookup(torch.arange(-1000, 4000, 50, device=device))
    with pytest.raises(DataError, match="the table is as it was"):
        gpu.restore(str(tmp_path / "t"))
    assert torch.equal(gpu.lookup(torch.arange(-1000, 4000, 50, device=device)), before)


def test_iteration_sees_every_row_once(device):
    _, gpu = filled(device, "adam", 70)
    seen = []
    iterate_table_and_apply(gpu, lambda entries: seen.extend(EntryDump.FromString(e).id for e in entries), 16, 3)
    assert len(seen) == len(set(seen)) == 70
    ids, _ = gpu._group.entries(0)
    assert set(seen) == set(ids.tolist())


def test_a_table_that_adopted_rows_has_all_that_it_had_before(device, tmp_path):
    table = shoal.HashTable(2, optimizer="sgd", initializer="zeros", lr=1.0, device="cuda", name="adopts")
    ids = torch.arange(50, device=device)
    table.assign(ids, torch.ones(50, 2, device=device))
    before = set(vars(table._group))
    table.adopt(table.staged()._native)
    assert set(vars(table._group)) == before
    table.apply_gradients(ids, torch.ones(50, 2, device=device))
    assert table.lookup(ids).abs().sum() == 0
    assert len(table) == 50
