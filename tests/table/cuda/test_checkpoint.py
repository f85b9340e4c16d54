"""GPU tables and CPU tables can restore each other's checkpoints."""

import pytest
import torch
from gpu_tables import assert_same_rows, config, pair

import shoal
from shoal.errors import CapacityError, ConfigError, DataError
from shoal.table import (
    EntryDump,
    MultiHashTable,
    SgdOptimizer,
    ZerosInitializer,
    iterate_table_and_apply,
    reset_registry,
    restore_incremental,
    save_incremental,
)
from shoal.table.cuda import bridge


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
    with pytest.raises(DataError, match="the table is unchanged"):
        gpu.restore(str(tmp_path / "t"))
    assert torch.equal(gpu.lookup(torch.arange(-1000, 4000, 50, device=device)), before)


def test_iteration_sees_every_row_once(device):
    _, gpu = filled(device, "adam", 70)
    seen = []
    iterate_table_and_apply(gpu, lambda entries: seen.extend(EntryDump.FromString(e).id for e in entries), 16, 3)
    assert len(seen) == len(set(seen)) == 70
    ids, _ = gpu._storage.entries(0)
    assert set(seen) == set(ids.tolist())


def test_a_table_that_adopted_rows_has_all_that_it_had_before(device, tmp_path):
    table = shoal.HashTable(2, optimizer="sgd", initializer="zeros", lr=1.0, device="cuda", name="adopts")
    ids = torch.arange(50, device=device)
    table.assign(ids, torch.ones(50, 2, device=device))
    before = set(vars(table._storage))
    table.adopt(table.staged()._native)
    assert set(vars(table._storage)) == before
    table.apply_gradients(ids, torch.ones(50, 2, device=device))
    assert table.lookup(ids).abs().sum() == 0
    assert len(table) == 50


def test_a_save_takes_few_rows_at_a_time_and_leaves_out_what_is_gone_by_then(device, tmp_path, monkeypatch):
    _, gpu = filled(device, "adam")
    monkeypatch.setattr(bridge, "SAVED_BYTES", 4 * 14 * 2)  # two rows of 14 words
    taken, take = [], bridge.RowSource.take
    ids = gpu._storage.entries(0)[0]
    gone = ids[[0, -1]]

    def watched(self, part):
        if part == 1:
            gpu.erase(gone)
            gpu.assign(torch.arange(9000, 9002, device=device), torch.ones(2, 4, device=device), 1001)  # their rows
        addresses = take(self, part)
        taken.append(addresses[-1])
        return addresses

    monkeypatch.setattr(bridge.RowSource, "take", watched)
    gpu.save(str(tmp_path / "t"))
    assert len(taken) == 150
    assert max(taken) == 2
    other = shoal.HashTable(4, optimizer="adam", expire_after="2d")
    other.restore(str(tmp_path / "t"))
    assert other.contains(gone.cpu()).tolist() == [True, False]
    known = other.contains(ids.cpu())
    assert int(known.sum()) == 299
    assert torch.equal(other.lookup(ids.cpu())[1:-1], gpu.lookup(ids).cpu()[1:-1])
    assert not other.contains(torch.tensor([9000, 9001])).any()


def test_an_error_while_rows_are_taken_leaves_no_file(device, tmp_path, monkeypatch):
    _, gpu = filled(device, "sgd", 50)

    def refuse(self, part):
        raise CapacityError("no host memory left")

    monkeypatch.setattr(bridge.RowSource, "take", refuse)
    with pytest.raises(CapacityError, match="no host memory"):
        gpu.save(str(tmp_path / "t"))
    assert not list(tmp_path.iterdir())


def changed(table, device, step):
    """Writes of every kind, and removals."""
    at = {"device": device}
    if step == 0:
        table.assign(torch.arange(20, **at), torch.ones(20, 2, **at), 100_000)
    elif step == 1:
        table.assign_add(torch.tensor([3, 3, 40], **at), torch.ones(3, 2, **at), 100_001)
        table.erase(torch.tensor([5, 6, 99], **at))
    elif step == 2:
        table.apply_gradients(torch.tensor([3, 4, 4, 50], **at), torch.ones(4, 2, **at), 2, req_time=300_000)
        table.assign(torch.tensor([6], **at), torch.zeros(1, 2, **at), 300_000)
    elif step == 3:
        table.lookup(torch.tensor([3, 60], **at), insert_missing=True, req_time=300_000)
        table.evict()


def test_increments_are_those_of_the_cpu(device, tmp_path):
    cpu, gpu = (
        shoal.HashTable(2, optimizer="adagrad", seed=7, name="items", expire_after="2d", device=d)
        for d in ("cpu", "cuda")
    )
    for step in range(5):  # nothing happens in the last one
        changed(cpu, "cpu", step)
        changed(gpu, device, step)
        here, there = save_incremental(cpu, tmp_path / "cpu"), save_incremental(gpu, tmp_path / "gpu")
        assert (here.kind, here.rows, here.removed) == (there.kind, there.rows, there.removed)
        assert here.kind == ("full" if step == 0 else "delta")
        # Each restores the other's checkpoint.
        cpu2, gpu2 = (
            shoal.HashTable(2, optimizer="adagrad", seed=7, name="items", expire_after="2d", device=d)
            for d in ("cpu", "cuda")
        )
        restore_incremental(cpu2, tmp_path / "gpu")
        restore_incremental(gpu2, tmp_path / "cpu")
        assert_same_rows(cpu2, gpu2)
        assert cpu2.max_update_time == gpu2.max_update_time == cpu.max_update_time
    # A restored table continues from there.
    gpu2.assign(torch.tensor([7], device=device), torch.zeros(1, 2, device=device), 300_000)
    delta = save_incremental(gpu2, tmp_path / "cpu")
    assert (delta.kind, delta.rows, delta.parent) == ("delta", 1, here.name)


@pytest.mark.parametrize("removal", ["clear", "restore", "graph"])
def test_a_delta_is_refused_when_what_changed_is_not_known(removal, device, tmp_path):
    _, gpu = filled(device, "sgd", 20)
    first = save_incremental(gpu, tmp_path / "c")
    if removal == "clear":
        gpu.clear()
    elif removal == "restore":
        gpu.save(str(tmp_path / "t"))
        gpu.restore(str(tmp_path / "t"))
    else:
        gpu._storage.untracked_graph = True
    with pytest.raises(ConfigError, match=r"changes since .* are not known"):
        save_incremental(gpu, tmp_path / "c", first)
    assert save_incremental(gpu, tmp_path / "c").kind == "full"


def test_increments_of_tables_that_share_a_group(device, tmp_path):
    multis = []
    for d in ("cpu", "cuda"):
        reset_registry()
        configs = {name: config([(2, ZerosInitializer(), SgdOptimizer())], [1.0]) for name in "abc"}
        multis.append(MultiHashTable.from_configs(configs, device=d))
    for step in range(3):
        found = []
        for multi, d in zip(multis, ("cpu", device), strict=True):
            ids = torch.arange(step, step + 5, device=d)
            multi.assign({"a": (ids, torch.ones(5, 2, device=d)), "c": (ids[:2], torch.ones(2, 2, device=d))})
            if step == 2:
                multi.tables["a"].erase(ids[:1])
            found.append(save_incremental(multi, tmp_path / str(multi.device) / ("g" if multi.on_gpu else "c")))
        assert found[0].rows == found[1].rows
        assert found[0].removed == found[1].removed
    reset_registry()
    other = MultiHashTable.from_configs(configs, device="cuda")
    other.tables["b"].assign(torch.arange(4, device=device), torch.ones(4, 2, device=device))
    restore_incremental(other, tmp_path / "cpu" / "c")
    for name in "abc":
        assert_same_rows(multis[0].tables[name], other.tables[name])
    reset_registry()
