"""A group of GPU tables updates rows like CPU tables one by one, and reports errors."""

import time

import pytest
import torch
from gpu_tables import assert_same_rows, config
from group_batches import FEATURES, MIXED, STEPS, make_batch, one_by_one, read, train

import shoal
from shoal.errors import ConfigError
from shoal.table import (
    FixedR8Compressor,
    HashTable,
    MultiHashTable,
    RandomUniformInitializer,
    TouchedKeySet,
)
from shoal.table.protocol import FIRSTN, MAX, SUM, Features, Part, Step, groups_of, marks_shape


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
    ("optimizer", "deterministic", "features"),
    [
        *((optimizer, False, FEATURES) for optimizer in OPTIMIZERS),
        *((optimizer, True, FEATURES) for optimizer in OPTIMIZERS[:2]),
        (OPTIMIZERS[1], True, MIXED),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else type(value).__name__,
)
def test_every_optimizer_steps_as_on_the_cpu(optimizer, deterministic, features, device):
    options = {"optimizer": optimizer, "seed": 3}
    cpu = [shoal.HashTable(4, **options) for _ in range(2)]
    gpu = [shoal.HashTable(4, device="cuda", deterministic=deterministic, **options) for _ in range(2)]
    ((group, _),) = groups_of(gpu)
    for seed in range(STEPS):
        batch = make_batch(device, seed=seed, features=features)
        _, marks = train(group, *batch, Step(seed), features)
        one_by_one(cpu, *batch, seed, features, marks)
    for plain, table in zip(cpu, gpu, strict=True):
        assert_same_rows(plain, table, 1e-4)


@pytest.mark.parametrize(("optimizer", "features"), [("sgd", MIXED), ("adagrad", FEATURES)], ids=["sgd", "adagrad"])
def test_rows_of_all_tables_may_have_numbers_beyond_32_bits(optimizer, features, device):
    cpu = [shoal.HashTable(4, optimizer=optimizer, seed=3) for _ in range(2)]
    gpu = [shoal.HashTable(4, optimizer=optimizer, seed=3, device="cuda") for _ in range(2)]
    ((group, _),) = groups_of(gpu)
    for seed in range(STEPS):
        batch = make_batch(device, seed=seed, features=features)
        _, marks = train(group, *batch, features=features)
        one_by_one(cpu, *batch, 0, features, marks)
        group.described.wide = True  # as with billions of rows
    for plain, table in zip(cpu, gpu, strict=True):
        assert_same_rows(plain, table, 1e-5)


@pytest.mark.parametrize("features", [FEATURES, MIXED], ids=["sums", "mixed"])
def test_bad_gradients_are_skipped_where_a_table_says_so(features, device):
    cpu = [shoal.HashTable(4, seed=3, on_bad_gradient="skip") for _ in range(2)]
    gpu = [shoal.HashTable(4, seed=3, on_bad_gradient="skip", device="cuda") for _ in range(2)]
    ((group, _),) = groups_of(gpu)
    ids, counts, offsets, grad = make_batch(device, features=features)
    grad[1, 2], grad[3, 5], grad[4, 11] = float("nan"), float("inf"), float("nan")
    _, marks = train(group, ids, counts, offsets, grad, features=features)
    one_by_one(cpu, ids, counts, offsets, grad, 0, features, marks)
    for plain, table in zip(cpu, gpu, strict=True):
        assert_same_rows(plain, table, 1e-5)
        assert table.skipped_gradients == plain.skipped_gradients > 0


def test_a_bad_gradient_of_a_largest_row_changes_nothing(device):
    tables = [shoal.HashTable(4, device="cuda") for _ in range(2)]
    ((group, _),) = groups_of(tables)
    ids, counts, offsets, grad = make_batch(device, features=MIXED)
    found, _, marks = read(group, ids, counts, offsets, MIXED)
    grad[2, 9] = float("nan")
    group.update([Part(found, MIXED, grad, offsets, None, marks)], step=Step())
    with pytest.raises(ConfigError, match="1 row of the gradients holds NaN"):
        tables[0].as_op()
    assert [table.size() for table in tables] == [0, 0]
    with pytest.raises(ConfigError, match="max needs the marks"):
        group.update([Part(found, MIXED, grad, offsets)], step=Step())
    with pytest.raises(ConfigError, match=r"marks must be contiguous uint8 \[90, 1\]"):
        group.update([Part(found, MIXED, grad, offsets, None, marks[:9])], step=Step())


@pytest.mark.parametrize("dims", [(6, 5, 13), (17,)], ids=str)
def test_largest_and_first_rows_of_any_segments(dims, device):
    layout = config(
        [(dim, RandomUniformInitializer(-1, 1), shoal.Sgd(lr=0.1), None) for dim in dims], [0.1] * len(dims)
    )
    cpu, gpu = (HashTable.from_config(layout, name="rows", seed=3, **at) for at in ({}, {"device": "cuda"}))
    dim = sum(dims)
    features = Features((0, 0), (MAX, FIRSTN), (2 * dim, 0), 3 * dim, None, (1, 2))
    make = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 40, (120,), generator=make)
    for plain, at in ((cpu, "cpu"), (gpu, device)):
        plain.assign(torch.arange(20, device=at), (torch.arange(20)[:, None] % 3 + torch.zeros(20, dim)).to(at))
    offsets, weights = torch.tensor([0, 50, 50, 60, 61, 70, 120]), torch.randint(-2, 3, (120,), generator=make).float()
    grad = torch.randn(3, 3 * dim, generator=make)
    results = []
    for plain, at in ((cpu, torch.device("cpu")), (gpu, device)):
        ((own, _),) = groups_of([plain])
        found = own.find(ids.to(at), torch.tensor([60, 60]), features, missing="initial")
        out = torch.empty(3, 3 * dim, device=at)
        marks = torch.zeros(marks_shape(120, dim), dtype=torch.uint8, device=at)
        for given in (None, weights.to(at)):
            own.pooled(found, features, offsets.to(at), given, out, missing="initial", marks=marks)
            results.append((out.cpu().clone(), marks[:60].cpu().clone()))
            own.update([Part(found, features, grad.to(at), offsets.to(at), given, marks)], step=Step())
    for (ours, ours_marks), (theirs, their_marks) in zip(results[2:], results[:2], strict=True):
        torch.testing.assert_close(ours, theirs)
        assert torch.equal(ours_marks, their_marks)
    assert_same_rows(cpu, gpu, 1e-5)


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
        tables[0].assign(torch.arange(90, 120, device=at), torch.ones(30, 4, device=at))  # reuses the rows
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
    for seconds in (5000, 4000):  # an explicit time is used as it is
        train(group, *batch, Step(time_s=seconds))
        rows = tables[0]._storage.entries(0)[1]
        assert set(tables[0]._storage.arena.row_times(rows).tolist()) == {seconds}
    assert tables[0].max_update_time == 5000


@pytest.mark.parametrize("compressor", [None, FixedR8Compressor(1.0)], ids=["in one launch", "one by one"])
def test_a_time_that_one_table_refuses_changes_none(compressor, device):
    made = config([(4, RandomUniformInitializer(), shoal.Sgd(lr=0.1), compressor)], [0.1])
    tables = [
        HashTable.from_config(made, name=str(clocked), device="cuda", clocked=clocked) for clocked in (False, True)
    ]
    ((group, _),) = groups_of(tables)
    features = Features((0, 1), (SUM, SUM), (0, 4), 8)
    ids = torch.arange(4, device=device)
    found = group.find(ids, torch.tensor([2, 2]), features, missing="zeros")
    with pytest.raises(ConfigError, match=r"'True'.*at most a day ahead"):
        group.update(
            [Part(found, features, torch.ones(4, 4, device=device))], step=Step(time_s=int(time.time()) + 2 * 86400)
        )
    assert [table.size() for table in tables] == [0, 0]
    assert [table.max_update_time for table in tables] == [0, 0]


def test_wrong_arguments_are_refused_and_nothing_changes(device):
    table = shoal.HashTable(4, device="cuda")
    ((group, _),) = groups_of([table])
    features = Features((0,), (SUM,), (0,), 4)
    ids = torch.arange(3, device=device)
    with pytest.raises(ConfigError, match="ids must be contiguous int64"):
        group.find(ids.int(), torch.tensor([3]), features, missing="zeros")
    with pytest.raises(ConfigError, match=r"features.tables must be 0\.\.0, got"):
        group.find(ids, torch.tensor([3]), Features((1,)), missing="zeros")
    with pytest.raises(ConfigError, match="so that 4 columns fit"):
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
