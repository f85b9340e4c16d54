"""What a group of GPU tables does to rows is what CPU tables do one by one; what is wrong is told of."""

import pytest
import torch
from gpu_tables import assert_same_rows, config
from group_batches import FEATURES, make_batch, one_by_one, train

import shoal
from shoal.errors import ConfigError
from shoal.table import (
    HashTable,
    MultiHashTable,
    RandomUniformInitializer,
    TouchedKeySet,
)
from shoal.table.protocol import SUM, Features, Part, Step, groups_of


def test_sync_clients_are_told_what_was_written(device):
    keys = TouchedKeySet(1000)
    tables = [shoal.HashTable(4, seed=3, device="cuda") for _ in range(2)]
    tables[1]._set_touched(keys, 0)
    ((group, _),) = groups_of(tables)
    ids, counts, offsets, grad = make_batch(device)
    train(group, ids, counts, offsets, grad)
    assert keys.steal().sort()[0].tolist() == ids.view(3, -1)[1:].unique().tolist()


OPTIMIZERS = [
    shoal.Sgd(lr=0.5), shoal.Adagrad(lr=0.5), shoal.Adam(lr=0.1), shoal.Momentum(lr=0.1), shoal.Ftrl(lr=0.1),
    shoal.RowwiseAdagrad(lr=0.1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "deterministic"),
    [*((optimizer, False) for optimizer in OPTIMIZERS), (OPTIMIZERS[0], True), (OPTIMIZERS[1], True)],
    ids=lambda value: str(value) if isinstance(value, bool) else type(value).__name__,
)
def test_every_optimizer_steps_as_on_the_cpu(optimizer, deterministic, device):
    options = {"optimizer": optimizer, "seed": 3}
    cpu = [shoal.HashTable(4, **options) for _ in range(2)]
    gpu = [shoal.HashTable(4, device="cuda", deterministic=deterministic, **options) for _ in range(2)]
    ((group, _),) = groups_of(gpu)
    for seed in range(3):
        batch = make_batch(device, seed=seed)
        train(group, *batch, Step(seed))
        one_by_one(cpu, *batch, step=seed)
    for plain, table in zip(cpu, gpu, strict=True):
        assert_same_rows(plain, table, 1e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_rows_of_all_tables_may_have_numbers_beyond_32_bits(optimizer, device):
    cpu = [shoal.HashTable(4, optimizer=optimizer, seed=3) for _ in range(2)]
    gpu = [shoal.HashTable(4, optimizer=optimizer, seed=3, device="cuda") for _ in range(2)]
    ((group, _),) = groups_of(gpu)
    for seed in range(3):
        batch = make_batch(device, seed=seed)
        train(group, *batch)
        one_by_one(cpu, *batch)
        group.described.wide = True  # as they become with billions of rows
    for plain, table in zip(cpu, gpu, strict=True):
        assert_same_rows(plain, table, 1e-5)


def test_bad_gradients_are_skipped_where_a_table_says_so(device):
    cpu = [shoal.HashTable(4, seed=3, on_bad_gradient="skip") for _ in range(2)]
    gpu = [shoal.HashTable(4, seed=3, on_bad_gradient="skip", device="cuda") for _ in range(2)]
    ((group, _),) = groups_of(gpu)
    ids, counts, offsets, grad = make_batch(device)
    grad[1, 2], grad[3, 5] = float("nan"), float("inf")
    train(group, ids, counts, offsets, grad)
    one_by_one(cpu, ids, counts, offsets, grad)
    for plain, table in zip(cpu, gpu, strict=True):
        assert_same_rows(plain, table, 1e-5)
        assert table.skipped_gradients == plain.skipped_gradients > 0


def test_a_weight_may_make_a_gradient_bad(device):
    table = shoal.HashTable(4, device="cuda")
    ((group, _),) = groups_of([table])
    features = Features((0,), (SUM,), (0,), 4)
    found = group.find(torch.arange(3, device=device), torch.tensor([3]), features, missing="initial")
    weights, offsets = torch.tensor([1.0, float("inf"), 1.0], device=device), torch.tensor([0, 1, 3], device=device)
    group.update([Part(found, features, torch.ones(2, 4, device=device), offsets, weights)], step=Step())
    with pytest.raises(ConfigError, match="1 row of the gradients holds NaN"):
        table.as_op()
    assert table.size() == 0


def test_tables_of_one_arena_are_a_group_too(device):
    configs = {name: config([(4, RandomUniformInitializer(), shoal.Adagrad(lr=0.1), None)], [0.1]) for name in "ab"}
    multi = MultiHashTable.from_configs(configs, device="cuda")
    assert multi.tables["a"]._storage is multi.tables["b"]._storage
    ((group, _),) = groups_of(list(multi.tables.values()))
    cpu = [HashTable.from_config(one, name=name, seed=multi.tables[name].seed) for name, one in configs.items()]
    for seed in range(3):
        batch = make_batch(device, seed=seed)
        train(group, *batch)
        one_by_one(cpu, *batch)
        if seed == 1:
            for table, plain in zip(multi.tables.values(), cpu, strict=True):
                table.erase(torch.arange(10, device=device))
                plain.erase(torch.arange(10))
    for plain, table in zip(cpu, multi.tables.values(), strict=True):
        assert_same_rows(plain, table, 1e-5)


def test_evicted_and_restored_rows_are_found_again(tmp_path, device):
    cpu = [shoal.HashTable(4, seed=3, expire_after="1d") for _ in range(2)]
    gpu = [shoal.HashTable(4, seed=3, expire_after="1d", device="cuda") for _ in range(2)]
    ((group, _),) = groups_of(gpu)
    ids, counts, offsets, grad = make_batch(device)
    for tables, at in ((cpu, "cpu"), (gpu, device)):
        for number, table in enumerate(tables):
            table.assign(torch.arange(30, device=at), torch.ones(30, 4, device=at), req_time=1000)
            table.assign(torch.arange(30, 50, device=at), torch.ones(20, 4, device=at), req_time=200_000)
            table.save(str(tmp_path / f"{at}-{number}"))
    found = group.find(ids, counts, FEATURES, missing="initial")
    for tables, at in ((cpu, "cpu"), (gpu, device)):
        assert tables[0].evict(200_000) == 30
        tables[0].assign(torch.arange(90, 120, device=at), torch.ones(30, 4, device=at))  # takes the rows
        tables[1].clear()
        tables[1].restore(str(tmp_path / f"{at}-1"))
    group.update([Part(found, FEATURES, grad, offsets)], step=Step())
    one_by_one(cpu, ids, counts, offsets, grad)
    for plain, table in zip(cpu, gpu, strict=True):
        assert_same_rows(plain, table, 1e-5)


def test_times_are_those_of_the_step(device):
    tables = [shoal.HashTable(4, seed=3, device="cuda") for _ in range(2)]
    ((group, _),) = groups_of(tables)
    batch = make_batch(device)
    for seconds in (5000, 4000):  # a time that was given is believed
        train(group, *batch, Step(time_s=seconds))
        rows = tables[0]._storage.entries(0)[1]
        assert set(tables[0]._storage.arena.row_times(rows).tolist()) == {seconds}
    assert tables[0].max_update_time == 5000


def test_wrong_arguments_are_refused_and_nothing_changes(device):
    table = shoal.HashTable(4, device="cuda")
    ((group, _),) = groups_of([table])
    features = Features((0,), (SUM,), (0,), 4)
    ids = torch.arange(3, device=device)
    with pytest.raises(ConfigError, match="ids must be contiguous int64"):
        group.find(ids.int(), torch.tensor([3]), features, missing="zeros")
    with pytest.raises(ConfigError, match="numbers of 1 tables"):
        group.find(ids, torch.tensor([3]), Features((1,)), missing="zeros")
    with pytest.raises(ConfigError, match="leave 4 columns"):
        group.find(ids, torch.tensor([3]), Features((0,), (SUM,), (1,), 4), missing="zeros")
    found = group.find(ids, torch.tensor([3]), features, missing="zeros")
    with pytest.raises(ConfigError, match=r"gradients must be float32 \[1, 4\]"):
        group.update([Part(found, features, torch.ones(2, 4, device=device), torch.tensor([0, 3], device=device))],
                     step=Step())  # fmt: skip
    assert table.size() == 0


@pytest.mark.parametrize("offsets", [[0, 9, 3], [1, 2, 3], [0, 2, 2], [0, -5, 3], [0, 2, 1 << 40]])
def test_wrong_offsets_are_told_of_later(offsets, device):
    table = shoal.HashTable(4, device="cuda")
    ((group, _),) = groups_of([table])
    features = Features((0,), (SUM,), (0,), 4)
    found = group.find(torch.arange(3, device=device), torch.tensor([3]), features, missing="initial")
    out, wrong = torch.empty(2, 4, device=device), torch.tensor(offsets, device=device)
    group.pooled(found, features, wrong, None, out, missing="initial")
    with pytest.raises(ConfigError, match="offsets must rise from 0"):
        table.as_op()
    table.as_op()


def test_counts_that_do_not_fit_the_offsets_read_no_other_rows(device):
    tables = [shoal.HashTable(4, device="cuda", initializer="zeros") for _ in range(2)]
    ((group, _),) = groups_of(tables)
    tables[1].assign(torch.arange(5000, device=device), torch.ones(5000, 4, device=device))
    features = Features((0, 1), (SUM, SUM), (0, 4), 8)
    ids, offsets = torch.arange(4000, 4004, device=device), torch.tensor([0, 4, 4], device=device)
    found = group.find(ids, torch.tensor([0, 4]), features, missing="zeros")
    out = torch.empty(1, 8, device=device)
    group.pooled(found, features, offsets, None, out, missing="zeros")
    assert not out.any()
