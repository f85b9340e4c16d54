"""Ids that get rows: by lookups, updates and assignments, more than once in a batch, and again after an erase."""

import torch
from gpu_tables import MIN, assert_same_rows, config, pair

import shoal
from shoal.table import AdamOptimizer, MultiHashTable, RandomUniformInitializer, SgdOptimizer, reset_registry


def test_lookups_that_insert_and_updates_are_those_of_the_cpu(device):
    cpu, gpu = pair(5, shoal.Adam(lr=0.1))
    torch.manual_seed(0)
    for round_ in range(3):
        ids = torch.randint(0, 60 * (round_ + 1), (200,))
        ids[::7] = MIN
        rows = gpu.lookup(ids.to(device), insert_missing=True, req_time=round_)
        torch.testing.assert_close(rows.cpu(), cpu.lookup(ids, insert_missing=True, req_time=round_))
        more, grads = torch.randint(0, 300, (100,)), torch.randn(100, 5)
        for table, to in ((cpu, "cpu"), (gpu, device)):
            table.apply_gradients(more.to(to), grads.to(to), 1, enable_dedup=True, req_time=10 + round_)
            table.assign_add(more.to(to) + 200, grads.to(to), req_time=3)
            table.erase(ids[:20].to(to))  # rows are reused
    assert_same_rows(cpu, gpu, 1e-5)


def test_what_a_filter_or_a_bad_gradient_keeps_out_gets_no_row(device):
    cpu, gpu = pair(2, "sgd", on_bad_gradient="skip")
    ids, grads = torch.tensor([1, 2, 3, 2]), torch.ones(4, 2)
    grads[1] = float("nan")
    for table, to in ((cpu, "cpu"), (gpu, device)):
        table.apply_gradients(ids.to(to), grads.to(to))
        table.apply_gradients(ids[:3].to(to), grads[:3].to(to) * float("inf"))
    assert gpu.size() == cpu.size() == 3
    assert gpu.skipped_gradients == cpu.skipped_gradients == 4


def test_changes_are_tracked(device):
    _, gpu = pair(2, "sgd")
    ids = torch.arange(10, device=device)
    gpu.lookup(ids, insert_missing=True)
    epoch = gpu.changes.begin_epoch()
    gpu.lookup(ids + 5, insert_missing=True)
    gpu.apply_gradients(ids[:2], torch.ones(2, 2, device=device))
    found, rows = gpu._storage.entries(0)
    written = found[gpu._storage.arena.written_since(rows, epoch)]
    assert sorted(written.tolist()) == [0, 1, *range(10, 15)]


def test_ids_beyond_two_buckets_go_to_the_stash(device):
    table = shoal.HashTable(1, optimizer="sgd", device="cuda")
    table._storage.max_load = 2.0
    count = table._storage._buckets[0] * 8 + 40
    ids = torch.randperm(count, device=device)
    for part in ids.split(count // 3):
        batch = torch.cat([part, part[:9]])
        assert torch.equal(table.lookup(batch, insert_missing=True), table.lookup(batch))
    rows = table._storage.find(ids, 0, "rows")
    assert table.size() == rows.unique().numel() == count
    assert int(rows.min()) > 0


def test_tables_that_share_memory(device):
    made = []
    for where in ("cpu", "cuda"):
        reset_registry()
        both = [(2, RandomUniformInitializer(), SgdOptimizer()), (1, RandomUniformInitializer(), AdamOptimizer())]
        configs = {"a": config(both, [0.1, 0.2]), "b": config(both, [0.3, 0.4])}
        made.append(MultiHashTable.from_configs(configs, device=where))
    ids, sizes, grads = torch.arange(40) // 3, torch.tensor([15, 25]), torch.randn(120)
    for many, to in zip(made, ("cpu", device), strict=True):
        for _ in range(2):
            many.fused_apply_gradient(ids.to(to), None, sizes, grads.to(to), None, None, 1, 0, 1, True)
    want, got = (many.fused_lookup(ids.to(to), sizes, 1)[0] for many, to in zip(made, ("cpu", device), strict=True))
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-6)
    assert made[0].size() == made[1].size()
