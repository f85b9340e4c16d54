"""GPU tables as groups: what every group promises, and what only fused ones do."""

import gc
import sys
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from gpu_tables import assert_same_rows, config

import shoal
from shoal.errors import ConfigError, UnsupportedError
from shoal.table import (
    EntryConfig,
    FixedR8Compressor,
    Fp32Compressor,
    HashTable,
    MultiHashTable,
    RandomUniformInitializer,
    SlotOccurrenceThresholdConfig,
    TouchedKeySet,
    create_hash_filter,
)
from shoal.table.adapter import row_gradients
from shoal.table.cuda.cache import CachedHashTable
from shoal.table.cuda.groups.fused import FusedGroup
from shoal.table.protocol import MEAN, SQRTN, SUM, Features, Found, Part, Step, groups_of

sys.path.insert(0, str(Path(__file__).parents[1]))  # for group_conformance
from group_conformance import CASES, Kind


def _gpu(count, **options):
    return [shoal.HashTable(4, device="cuda", **options) for _ in range(count)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_group_of_gpu_tables(case, device):
    case(Kind(make=_gpu, exact=False, device=str(device)))


def _cached(count, **options):
    return [CachedHashTable(shoal.HashTable(4, **options), cache_rows=32768) for _ in range(count)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_group_of_caches(case, device):
    case(Kind(make=_cached, exact=False, device=str(device)))


def test_a_filter_decides_which_ids_get_a_row(device):
    def filtered(**options):
        thresholds = SlotOccurrenceThresholdConfig(default_occurrence_threshold=2)
        hash_filter = create_hash_filter(1000, 7, thresholds.SerializeToString())
        return shoal.HashTable(4, hash_filter=hash_filter, optimizer=shoal.Sgd(lr=1.0), seed=3, **options)

    table, plain = filtered(device="cuda"), filtered()
    ((group, _),) = groups_of([table])
    features = Features((0,), (SUM,), (0,), 4)
    ids, offsets = torch.tensor([5, 6, 5], device=device), torch.tensor([0, 1, 2, 3], device=device)
    for _ in range(4):
        found = group.find(ids, torch.tensor([3]), features, missing="initial")
        torch.testing.assert_close(group.rows(found, features, missing="initial").cpu(), plain.lookup(ids.cpu()))
        group.update([Part(found, features, torch.ones(3, 4, device=device), offsets)], step=Step())
        plain.apply_gradients(ids.cpu(), torch.ones(3, 4), enable_dedup=True)
    assert table.size() == plain.size() == 2
    assert_same_rows(plain, table)


def test_rounded_rows_are_a_group_by_their_own_calls(device):
    segment = (4, RandomUniformInitializer(), shoal.Adagrad(lr=0.1), FixedR8Compressor(1.0))
    table = HashTable.from_config(config([segment], [0.1]), name="rounded", seed=3, device="cuda")
    plain = HashTable.from_config(config([segment], [0.1]), name="plain", seed=3)
    ((group, _),) = groups_of([table])
    features = Features((0, 0), padding=7)
    ids = torch.tensor([5, 6, 5, 7], device=device)
    found = group.find(ids, torch.tensor([1, 3]), features, missing="initial")
    rows = group.rows(found, features, missing="initial").cpu()
    assert table.size() == 0
    torch.testing.assert_close(rows[:3], plain.lookup(ids[:3].cpu(), insert_missing=True))
    assert not rows[3].any()
    group.update([Part(found, features, torch.ones(4, 4, device=device))], step=Step(3, lr_scale=(0.5,)))
    plain._apply(ids[:3].cpu(), torch.ones(3, 4), [0.05], 3, True, 0)
    torch.testing.assert_close(table.lookup(ids[:3]).cpu(), plain.lookup(ids[:3].cpu()))


def test_a_serving_table_is_read_and_not_updated(device):
    made = config([(4, RandomUniformInitializer(), shoal.Sgd(lr=0.1), Fp32Compressor())], [0.1])
    made.table_config.entry_config.entry_type = EntryConfig.SERVING
    table = HashTable.from_config(made, name="served", device="cuda")
    table.assign(torch.arange(3, device=device), torch.ones(3, 4, device=device))
    ((group, _),) = groups_of([table])
    assert not group.traits.trains
    found = group.find(torch.tensor([2, 5], device=device), torch.tensor([2]), Features(), missing="initial")
    assert group.rows(found, Features(), missing="initial").tolist() == [[1.0] * 4, [0.0] * 4]
    with pytest.raises(UnsupportedError, match="serving"):
        group.update([Part(found, Features(), torch.ones(2, 4, device=device))], step=Step())


def test_sync_clients_are_told_what_was_written(device):
    keys = TouchedKeySet(1000)
    tables = [shoal.HashTable(4, seed=3, device="cuda") for _ in range(2)]
    tables[1]._set_touched(keys, 0)
    ((group, _),) = groups_of(tables)
    ids, counts, offsets, grad = _batch(device)
    _train(group, ids, counts, offsets, grad)
    assert keys.steal().sort()[0].tolist() == ids.view(3, -1)[1:].unique().tolist()


def test_the_memory_of_tables_goes_with_their_last_user(device):
    gc.collect()
    gc.disable()
    try:
        table = shoal.HashTable(4, device="cuda")
        ((group, _),) = groups_of([table])
        found = group.find(torch.arange(3, device=device), torch.tensor([3]), Features(), missing="initial")
        group.update([Part(found, Features(), torch.ones(3, 4, device=device))], step=Step())
        storage = weakref.ref(table._storage)
        del table, group
        assert storage() is None
    finally:
        gc.enable()


def test_tables_made_one_by_one_are_one_group():
    tables = _gpu(3)
    ((group, places),) = groups_of(tables)
    assert isinstance(group, FusedGroup)
    assert places == [0, 1, 2]


FEATURES = Features(tables=(0, 1, 1), combiners=(SUM, MEAN, SQRTN), columns=(0, 4, 8), width=12)


def _batch(device, n=30, bags=5, low=0, high=50, seed=0):
    make = torch.Generator().manual_seed(seed)
    ids = torch.randint(low, high, (3 * n,), generator=make).to(device)
    cuts = [torch.sort(torch.randint(0, n + 1, (bags - 1,), generator=make))[0] for _ in range(3)]
    offsets = torch.cat(
        [torch.cat([torch.tensor([0]), c]) + k * n for k, c in enumerate(cuts)] + [torch.tensor([3 * n])]
    )
    return ids, torch.full((3,), n), offsets.to(device), torch.randn(bags, 12, generator=make).to(device)


def _train(group, ids, counts, offsets, grad, step=None):
    found = group.find(ids, counts, FEATURES, missing="initial")
    out = torch.empty(grad.shape, device=ids.device)
    group.pooled(found, FEATURES, offsets, None, out, missing="initial")
    group.update([Part(found, FEATURES, grad, offsets)], step=step or Step())
    return out


def _one_by_one(tables, ids, counts, offsets, grad, step=0):
    """The same with CPU tables and the references."""
    found = Found(ids.cpu(), counts, ids.new_empty(0), ids.new_empty(0))
    part = Part(found, FEATURES, grad.cpu(), offsets.cpu())
    rows = row_gradients(part, 4).split(counts.tolist())
    for number, table in enumerate(tables):
        own = [k for k, of in enumerate(FEATURES.tables) if of == number]
        mine = torch.cat([found.ids.split(counts.tolist())[k] for k in own])
        table.apply_gradients(mine, torch.cat([rows[k] for k in own]), step, enable_dedup=True)


OPTIMIZERS = [
    shoal.Sgd(lr=0.5), shoal.Adagrad(lr=0.5), shoal.Adam(lr=0.1), shoal.Momentum(lr=0.1), shoal.Ftrl(lr=0.1),
    shoal.RowwiseAdagrad(lr=0.1),
]  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_optimizer_steps_as_on_the_cpu(optimizer, deterministic, device):
    options = {"optimizer": optimizer, "seed": 3}
    cpu = [shoal.HashTable(4, **options) for _ in range(2)]
    gpu = [shoal.HashTable(4, device="cuda", deterministic=deterministic, **options) for _ in range(2)]
    ((group, _),) = groups_of(gpu)
    for seed in range(3):
        batch = _batch(device, seed=seed)
        _train(group, *batch, Step(seed))
        _one_by_one(cpu, *batch, step=seed)
    for plain, table in zip(cpu, gpu, strict=True):
        assert_same_rows(plain, table, 1e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_rows_of_all_tables_may_have_numbers_beyond_32_bits(optimizer, device):
    cpu = [shoal.HashTable(4, optimizer=optimizer, seed=3) for _ in range(2)]
    gpu = [shoal.HashTable(4, optimizer=optimizer, seed=3, device="cuda") for _ in range(2)]
    ((group, _),) = groups_of(gpu)
    for seed in range(3):
        batch = _batch(device, seed=seed)
        _train(group, *batch)
        _one_by_one(cpu, *batch)
        group.described.wide = True  # as they become with billions of rows
    for plain, table in zip(cpu, gpu, strict=True):
        assert_same_rows(plain, table, 1e-5)


def test_bad_gradients_are_skipped_where_a_table_says_so(device):
    cpu = [shoal.HashTable(4, seed=3, on_bad_gradient="skip") for _ in range(2)]
    gpu = [shoal.HashTable(4, seed=3, on_bad_gradient="skip", device="cuda") for _ in range(2)]
    ((group, _),) = groups_of(gpu)
    ids, counts, offsets, grad = _batch(device)
    grad[1, 2], grad[3, 5] = float("nan"), float("inf")
    _train(group, ids, counts, offsets, grad)
    _one_by_one(cpu, ids, counts, offsets, grad)
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
        batch = _batch(device, seed=seed)
        _train(group, *batch)
        _one_by_one(cpu, *batch)
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
    ids, counts, offsets, grad = _batch(device)
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
    _one_by_one(cpu, ids, counts, offsets, grad)
    for plain, table in zip(cpu, gpu, strict=True):
        assert_same_rows(plain, table, 1e-5)


def test_times_are_those_of_the_step(device):
    tables = [shoal.HashTable(4, seed=3, device="cuda") for _ in range(2)]
    ((group, _),) = groups_of(tables)
    batch = _batch(device)
    for seconds in (5000, 4000):  # a time that was given is believed
        _train(group, *batch, Step(time_s=seconds))
        rows = tables[0]._storage.entries(0)[1]
        assert set(tables[0]._storage.arena.row_times(rows).tolist()) == {seconds}
    assert tables[0].max_update_time == 5000


def test_different_rows_are_different_groups():
    tables = [shoal.HashTable(dim, optimizer=optimizer, device="cuda")
              for dim, optimizer in ((4, "sgd"), (4, "adagrad"), (8, "sgd"), (4, "sgd"))]  # fmt: skip
    assert [places for _, places in groups_of(tables)] == [[0, 3], [1], [2]]


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


# --- on a device alone ------------------------------------------------------------------------------------------------


def _big(count, **options):
    tables = [shoal.HashTable(4, seed=3, device="cuda", **options).reserve(200_000) for _ in range(count)]
    return tables, groups_of(tables)[0][0]


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_step_does_not_wait_for_the_device(optimizer):
    _, group = _big(2, optimizer=optimizer)
    batches = [_batch("cuda", 3000, 500, high=1 << 40, seed=seed) for seed in range(8)]
    for batch in batches[:2]:
        _train(group, *batch)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        for batch in batches:
            found = group.find(*batch[:2], FEATURES, missing="zeros")
            group.rows(found, FEATURES, missing="initial")
            _train(group, *batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def _captured(step):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", [shoal.Sgd, shoal.Adagrad], ids=["sgd", "adagrad"])
def test_a_captured_step_replays_with_new_ids_rates_and_times(optimizer, tmp_path):
    rate = shoal.table.PolynomialDecay(0.5, 10, 0.1)
    gpu, group = _big(2, optimizer=optimizer(lr=rate))
    cpu = [shoal.HashTable(4, seed=3, optimizer=optimizer(lr=rate)) for _ in range(2)]
    static = _batch("cuda", 300, 40, high=1000, seed=0)
    graph, _ = _captured(lambda: _train(group, *static))
    for _ in range(2):
        _one_by_one(cpu, *static)
    for step in range(6):
        batch = _batch("cuda", 300, 40, high=1000 * (step + 1), seed=step)
        for to, of in zip(static, batch, strict=True):
            to.copy_(of)
        if step == 2:
            for at, tables in (("cuda", gpu), ("cpu", cpu)):
                for table in tables:
                    table.erase(torch.arange(200, device=at))
                    table.assign(torch.arange(5000, 5200, device=at), torch.ones(200, 4, device=at))
        if step == 3:
            gpu[0].reserve(3_000_000)  # grows in place
            gpu[1].save(str(tmp_path / "one"))
            gpu[1].restore(str(tmp_path / "one"))  # moves
            gpu[1].reserve(200_000)
        now = 1000 + step
        group.set_step(Step(step, time_s=now))
        graph.replay()
        _one_by_one(cpu, *batch, step=step)
        for number, table in enumerate(gpu):
            ids = batch[0].view(3, -1)[number : 2 * number + 1].flatten().unique()
            rows = table._storage.find(ids, table._number, "rows")
            assert set(table._storage.arena.row_times(rows).tolist()) == {now}
            torch.testing.assert_close(table.lookup(ids).cpu(), cpu[number].lookup(ids.cpu()), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_a_captured_step_reads_its_step_and_scale_from_tensors():
    rate = shoal.table.PolynomialDecay(0.5, 10, 0.1)
    gpu, group = _big(2, optimizer=shoal.Sgd(lr=rate))
    static = _batch("cuda", 300, 40, high=1000, seed=0)
    number, time = torch.tensor([[0], [1]], device="cuda").unbind()
    scale = torch.ones(2, device="cuda")
    graph, _ = _captured(lambda: _train(group, *static, Step(number, time, scale)))
    number.fill_(7)
    time.fill_(1234)
    scale.copy_(torch.tensor([1.0, 0.5]))
    ids = static[0].view(3, -1)
    before = [table.lookup(ids[k]) for k, table in enumerate(gpu)]
    graph.replay()
    cpu = [shoal.HashTable(4, seed=3, optimizer=shoal.Sgd(lr=rate(7) * k)) for k in (1.0, 0.5)]
    for k, table in enumerate(cpu):
        table.assign(ids[k].cpu(), before[k].cpu())
    rows = gpu[0]._storage.entries(0)[1]
    assert set(gpu[0]._storage.arena.row_times(rows).tolist()) == {1234}
    _one_by_one([cpu[0], shoal.HashTable(4, optimizer="sgd")], *static)
    torch.testing.assert_close(gpu[0].lookup(ids[0]).cpu(), cpu[0].lookup(ids[0].cpu()), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_many_steps_with_new_ids_grow_the_tables():
    tables = [shoal.HashTable(4, seed=3, device="cuda") for _ in range(2)]
    ((group, _),) = groups_of(tables)
    for step in range(300):
        batch = _batch("cuda", 700, 50, low=step * 500, high=step * 500 + 1000, seed=step)
        _train(group, *batch)
    assert tables[0].size() > 100_000
    assert tables[1].size() > 140_000


@pytest.mark.gpu
def test_a_group_follows_streams():
    tables, group = _big(2, optimizer=shoal.Sgd(lr=1.0), initializer="zeros")
    batch = _batch("cuda", 3000, 500)
    side = torch.cuda.Stream()
    for turn in range(6):
        with torch.cuda.stream(side if turn % 2 else torch.cuda.default_stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream() if turn % 2 else side)
            _train(group, *batch)
    torch.cuda.synchronize()
    cpu = [shoal.HashTable(4, seed=3, optimizer=shoal.Sgd(lr=1.0), initializer="zeros") for _ in range(2)]
    for _ in range(6):
        _one_by_one(cpu, *batch)
    for plain, table in zip(cpu, tables, strict=True):
        assert_same_rows(plain, table, 1e-3)
