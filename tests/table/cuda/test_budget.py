"""Budgets of tables in GPU memory: plain values, then groups, modules, graphs, checkpoints and followers.

Small tables evict exactly the rows that their policy names. In large tables, which ``large`` simulates with small ones,
an id replaces one in its buckets.
"""

import threading

import pytest
import torch

import shoal
from shoal.errors import ConfigError
from shoal.table import restore_incremental, save_incremental
from shoal.table.cuda.storage.allowance import Allowance
from shoal.table.protocol import SUM, Features, Part, Step, groups_of
from shoal.table.tracking import TableTracker

POLICIES = ["lru", "slru", "lfu", "epoch_lru", "epoch_lfu", "score"]


def make(**options):
    given = {"optimizer": shoal.Sgd(lr=1.0), "initializer": "zeros", "device": "cuda", **options}
    return shoal.HashTable(2, **given)


@pytest.fixture
def large(monkeypatch):
    monkeypatch.setattr(Allowance, "most_small", 0)


def put(table, *ids, **options):
    ids = torch.tensor(ids, device=table.device)
    table.assign(ids, ids.float().view(-1, 1).repeat(1, 2), **options)


def held(table):
    return sorted(torch.cat(list(table.all_ids())).tolist())


def check_rows(table):
    """Every row belongs to its id, and counters add up."""
    ids = held(table)
    assert len(set(ids)) == len(ids) == table.size()
    ids = torch.tensor(ids, device=table.device)
    assert torch.equal(table.lookup(ids), ids.float().view(-1, 1).repeat(1, 2))
    stats = table.eviction_stats()
    assert stats.evicted == stats.created - table.size()


# --- which rows are evicted -------------------------------------------------------------------------------------------


def test_lru_lets_the_row_go_that_was_written_longest_ago():
    table = make(max_rows=3)
    for id in (1, 2, 3, 1, 4):
        put(table, id)
    assert held(table) == [1, 3, 4]
    assert table.lookup(torch.tensor([2], device=table.device)).tolist() == [[0, 0]]
    check_rows(table)


def test_lfu_lets_the_row_go_that_was_written_least_often_and_of_equal_ones_the_older():
    table = make(max_rows=3, evict=shoal.Lfu())
    put(table, 1)
    for _ in range(3):
        put(table, 2, 2)
    for id in range(10, 14):
        put(table, id)
    assert held(table) == [2, 12, 13]


def test_rows_of_earlier_epochs_leave_first():
    table = make(max_rows=3, evict=shoal.EpochLfu())
    for _ in range(3):
        put(table, 1)
    assert table.next_eviction_epoch() == 2
    put(table, 2, 3)
    put(table, 4)
    assert held(table) == [2, 3, 4]
    daily = make(max_rows=2, evict=shoal.EpochLru(every="1d"))
    put(daily, 1, req_time=1_000_000)
    put(daily, 2, req_time=1_100_000)
    put(daily, 3, req_time=1_100_000)
    assert held(daily) == [2, 3]


def test_scores_decide_and_a_lower_one_can_be_refused():
    table = make(max_rows=3, evict=shoal.Score(admit="if_better"))
    put(table, 1, 2, 3, scores=torch.tensor([1.0, -2.0, 3.0], device=table.device))
    put(table, 4, 4, 6, scores=torch.tensor([-5.0, -5.0, -4.0], device=table.device))
    assert held(table) == [1, 2, 3]
    assert table.eviction_stats().refused == 2
    put(table, 5, 7, 5, scores=torch.tensor([0.5, -1.0, 0.5], device=table.device))
    assert held(table) == [1, 3, 5]
    with pytest.raises(ConfigError, match="must be a number and not NaN"):
        table.set_score(float("nan"))
    table.set_score(9.0)
    put(table, 1)
    put(table, 6)
    put(table, 7)
    assert held(table) == [1, 6, 7]
    check_rows(table)


def test_a_new_id_that_was_written_once_can_be_refused():
    table = make(max_rows=2, evict=shoal.Lfu(admit="if_better"))
    put(table, 1, 2)
    put(table, 1)
    put(table, 3)  # of equal ones the older is evicted
    put(table, 3)
    put(table, 4)
    assert held(table) == [1, 3]
    assert table.eviction_stats().refused == 1


def test_a_policy_of_ones_own_numbers_the_rows():
    class MostlyEven:
        def scores(self, ids, before, known, *, time_s):
            assert known.dtype is torch.bool
            return (ids % 2 == 0).float() + before / 100

    table = make(max_rows=3, evict=MostlyEven())
    bag = shoal.nn.HashEmbeddingBag(table, combiner="sum")
    for id in range(6):
        bag(torch.tensor([[id]], device=table.device)).sum().backward()
    assert held(table) == [2, 4, 5]


def test_pinned_and_young_rows_stay():
    table = make(max_rows=3)
    table.pin(torch.tensor([1, 50], device=table.device))
    put(table, 1, 2, 3)
    for id in (4, 50, 6, 7):
        put(table, id)
    assert held(table) == [1, 7, 50]
    assert table.pinned().tolist() == [1, 50]
    table.unpin(torch.tensor([1], device=table.device))
    put(table, 9)
    put(table, 10)
    assert held(table) == [9, 10, 50]
    young = make(max_rows=2, evict=shoal.Lru(min_age="1h"))
    put(young, 1, req_time=1000)
    put(young, 2, req_time=5000)
    put(young, 3, req_time=5000)
    assert held(young) == [2, 3]
    put(young, 4, req_time=5001)
    assert held(young) == [2, 3]
    assert young.eviction_stats().refused == 1


def test_a_call_that_brings_more_than_fits_keeps_the_budget():
    table = make(max_rows=10)
    put(table, *range(30))
    put(table, *range(200, 250), 200, 249)
    assert table.size() == 10
    assert min(held(table)) >= 200
    assert table.eviction_stats().refused == 60
    check_rows(table)


def test_a_refused_id_is_read_as_its_initial_row():
    table = make(max_rows=2, initializer="uniform", seed=3)
    ids = torch.arange(4, device=table.device)
    assert torch.allclose(table.lookup(ids, insert_missing=True), table.initial_rows(ids), atol=1e-7)
    assert table.size() == 2


def test_what_leaves_can_be_had():
    table = make(max_rows=2, optimizer=shoal.Adagrad(lr=1.0))
    put(table, 1, req_time=10)
    put(table, 2, req_time=20)
    with table.collect_evicted(limit=2) as evicted:
        for id in (3, 4, 5):
            put(table, id, req_time=30)
        assert len(evicted) == 2
        left = evicted.take()
    assert left.ids.tolist() == [1, 2]
    assert left.lost == 1
    assert left.times.tolist() == [10, 20]
    assert left.values.tolist() == [[1, 1], [2, 2]]
    assert left.states.shape == (2, 2)
    assert len(evicted.take().ids) == 0
    stats = table.eviction_stats()
    assert (stats.evicted, stats.created, stats.hits, stats.age_max_s, stats.age_min_s) == (3, 5, 0, 20, 0)


def test_a_compiled_step_sets_scores():
    table = make(max_rows=20, evict="score")
    ids = torch.tensor([1, 2, 3], device=table.device)

    def step(scores):
        table.apply_gradients(ids, torch.ones(3, 2, device=ids.device), enable_dedup=True, scores=scores)
        return table.lookup(ids)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for scores, expected in ((torch.tensor([5.0, 1.0, 3.0], device=table.device), [5, 1, 3]), (2.0, [2, 2, 2])):
        compiled(scores)
        assert table._scores_before(ids)[0].tolist() == expected


def test_no_row_that_leaves_is_missed_while_another_thread_takes_those_before(monkeypatch):
    table = make(max_rows=4)
    put(table, 0, 1, 2, 3)
    written, cat = threading.Event(), torch.cat

    def write():
        put(table, 4, 5, 6, 7)
        put(table, 8, 9, 10, 11)
        written.set()

    writer = threading.Thread(target=write)

    def cat_after_writes(tensors):
        monkeypatch.setattr(torch, "cat", cat)
        joined = torch.cat(tensors)
        writer.start()
        written.wait(2)  # in vain if the writer has to wait for `take`
        return joined

    with table.collect_evicted(limit=6) as evicted:
        monkeypatch.setattr(torch, "cat", cat_after_writes)
        left = evicted.take()
        writer.join(60)
        after = evicted.take()
    assert left.ids.numel() + left.lost + after.ids.numel() + after.lost == 8
    assert table.eviction_stats().evicted == 8


@pytest.mark.parametrize("policy", POLICIES)
def test_a_large_table_keeps_its_limit_and_its_rows(policy, large):
    table, generator = make(max_rows=300, evict=policy), torch.Generator().manual_seed(0)
    for step in range(3):
        put(table, 1, 2, 3, *torch.randint(0, 900, (200,), generator=generator).tolist(), req_time=1000 + step)
    assert table.size() == 300
    check_rows(table)
    stats = table.eviction_stats()
    assert stats.evicted > 20
    assert stats.age_max_s >= stats.age_min_s >= 0
    if policy != "score":
        assert {1, 2, 3} <= set(held(table))


def test_slru_lets_rows_go_first_that_were_written_once():
    table = make(max_rows=4, evict="slru")
    for ids in ([1], [1], [2, 2], [3], [4], [5]):
        put(table, *ids)
    assert held(table) == [1, 3, 4, 5]  # 2 is 3 calls old and counts as 12, 1 is 4
    for id in range(6, 12):
        put(table, id)
    assert held(table) == [1, 9, 10, 11]
    for id in (12, 10, 13):
        put(table, id)
    assert held(table) == [10, 11, 12, 13]


def test_pins_ages_and_scores_hold_in_a_large_table(large):
    table = make(max_rows=100, evict=shoal.Score(admit="if_better", min_age="1h"))
    table.pin(torch.arange(20, device=table.device))
    put(table, *range(100), scores=torch.arange(100.0, device=table.device), req_time=1000)
    put(table, *range(200, 300), scores=50.0, req_time=10_000)
    left = held(table)
    assert set(range(20)) <= set(left)
    assert set(range(51, 100)) <= set(left)
    before = table.eviction_stats()
    assert before.evicted >= 20  # those in between that were in reach
    put(table, *range(400, 450), scores=1000.0, req_time=10_001)  # the other rows are pinned or young
    after = table.eviction_stats()
    assert after.refused - before.refused + after.evicted - before.evicted == 50
    assert set(range(20)) <= set(held(table))
    check_rows(table)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_bytes_never_pass_the_budget():
    on_card = torch.cuda.is_available()
    budget = shoal.MemoryBudget("90MiB" if on_card else "80KiB")
    tables = [make(max_bytes=budget) for _ in range(2)]
    generator, count = torch.Generator().manual_seed(0), 400_000 if on_card else 700
    for _ in range(5 if on_card else 2):
        for table in tables:
            ids = torch.randint(0, 50 * count, (count,), generator=generator).to(table.device)
            table.assign(ids, ids.float().view(-1, 1).repeat(1, 2))
            assert sum(table.memory_bytes() for table in tables) == budget.memory_bytes() <= budget.max_bytes
    assert budget.memory_bytes() > 0.7 * budget.max_bytes
    for table in tables:
        check_rows(table)
        assert table.size() > 0
    assert sum(table.eviction_stats().evicted for table in tables) > 0
    tables[0].clear()
    assert tables[0].memory_bytes() < budget.max_bytes / 2
    del table, tables
    assert budget.memory_bytes() == 0


def test_a_memory_budget_is_of_one_device():
    budget = shoal.MemoryBudget("1GiB")
    make(max_bytes=budget)
    if torch.cuda.is_available():
        with pytest.raises(ConfigError, match="must be on one device"):
            shoal.HashTable(2, max_bytes=budget)


# --- groups and modules -----------------------------------------------------------------------------------------------


def steps_of(tables, batches, features):
    """Trains a group on batches of ids, one bag each per feature, with gradients that make rows tell their id."""
    ((group, _),) = groups_of(tables)
    for number, rows in enumerate(batches, start=1):
        ids = torch.cat([torch.tensor(of) for of in rows]).to(tables[0].device)
        counts = torch.tensor([len(of) for of in rows])
        offsets = torch.arange(ids.numel() + 1, device=ids.device) if counts.unique().numel() == 1 else None
        found = group.find(ids, counts, features, missing="initial")
        assert offsets is not None
        grad = torch.zeros(int(counts[0]), features.width, device=ids.device)
        for feature, of in enumerate(rows):
            column = features.columns[feature]
            grad[:, column : column + 2] = -torch.tensor(of, device=ids.device).float().view(-1, 1)
        group.update([Part(found, features, grad, offsets)], step=Step(number))
    return group


def test_tables_of_a_group_keep_budgets_of_their_own():
    tables = [make(max_rows=3, name="a"), make(name="b"), make(max_rows=4, evict="lfu", name="c")]
    features = Features(tables=(0, 1, 2), combiners=(SUM,) * 3, columns=(0, 2, 4), width=6)
    batches = [[[7, 7, 20 + step], [7, 7, 20 + step], [7, 7, 20 + step]] for step in range(4)]
    steps_of(tables, batches, features)
    assert held(tables[0]) == [7, 22, 23]
    assert held(tables[1]) == [7, *range(20, 24)]
    assert held(tables[2]) == [7, 21, 22, 23]
    for table in (tables[0], tables[2]):
        stats = table.eviction_stats()
        assert (stats.created, stats.hits, stats.evicted) == (5, 7, 5 - table.size())
    for table in tables:
        ids = torch.tensor(held(table), device=table.device)
        times = torch.where(ids == 7, 8, 1).float()
        assert torch.equal(table.lookup(ids), (ids * times).view(-1, 1).repeat(1, 2))


def test_large_tables_of_a_group_give_new_ids_the_rows_of_others(large):
    tables = [make(max_rows=150, optimizer=shoal.Adagrad(lr=1.0), name=name) for name in "ab"]
    features = Features(tables=(0, 1, 0), combiners=(SUM,) * 3, columns=(0, 2, 4), width=6)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 4000, (3, 60), generator=generator).tolist() for _ in range(3)]
    trackers = [TableTracker(table) for table in tables]
    steps_of(tables, batches, features)
    for table, tracker, of in zip(tables, trackers, ((0, 2), (1,)), strict=True):
        ids, written = held(table), {id for batch in batches for feature in of for id in batch[feature]}
        assert len(set(ids)) == len(ids) == table.size() == 150
        assert set(ids) <= written
        stats, told = table.eviction_stats(), set(tracker.take().ids.tolist())
        assert set(ids) <= told <= written
        assert len(told) + stats.refused >= len(written)  # a refused id can come again
        assert stats.created - stats.evicted == 150
        assert stats.evicted > 10


def test_modules_train_a_table_with_a_budget():
    table = make(max_rows=20)
    bag = shoal.nn.HashEmbeddingBag(table, combiner="sum")
    for step in range(3):
        bag(torch.arange(step * 8, step * 8 + 8, device=table.device).view(4, 2)).sum().backward()
    table.as_op()
    assert held(table)[-16:] == list(range(8, 24))
    assert table.size() == 20


def test_tables_of_a_multi_hash_table_keep_budgets():
    def config(rows):
        return make(max_rows=rows).config

    multi = shoal.table.MultiHashTable.from_configs({"a": config(2), "b": config(3)}, device="cuda")
    for start in range(0, 8, 2):
        ids = torch.arange(start, start + 2, device=make().device)
        multi.apply_gradients({name: (ids, torch.ones(2, 2, device=ids.device)) for name in "ab"})
    assert held(multi.tables["a"]) == [6, 7]
    assert held(multi.tables["b"]) in ([4, 6, 7], [5, 6, 7])  # 4 and 5 were written together


@pytest.mark.parametrize("grouped", [False, True])
def test_the_miss_ratio_curve_tells_what_other_sizes_would_miss(grouped):
    table = make(max_rows=40)
    bag = shoal.nn.HashEmbeddingBag(table, combiner="sum")
    for step in range(30):  # each id comes three times, with 160 others in between
        ids = torch.arange(16, device=table.device) + 16 * (step % 10)
        if grouped:
            bag(ids.view(4, 4)).sum().backward()
        else:
            table.assign(ids, torch.ones(16, 2, device=table.device))
    curve = table.miss_ratio_curve()
    assert 20 < curve.sampled < 130  # one in eight of 480
    assert curve.at(40) == 1.0
    assert curve.at(400) == pytest.approx(curve.sampled * 8 / 480 / 3)  # only the first write of three
    assert table.budget_report()["budget"]["curve"] == curve.to_json()


# --- checkpoints and followers ----------------------------------------------------------------------------------------


def test_evicted_rows_leave_incremental_checkpoints_and_followers(tmp_path):
    table = make(max_rows=3, name="t")
    for id in (1, 2, 3):
        put(table, id)
    save_incremental(table, tmp_path)
    tracker = TableTracker(table)
    put(table, 4)
    put(table, 5)
    assert sorted(tracker.take().ids.tolist()) == [1, 2, 4, 5]
    save_incremental(table, tmp_path)
    for device in ("cpu", "cuda"):
        other = make(max_rows=3, name="t", device=device)
        restore_incremental(other, tmp_path)
        assert held(other) == [3, 4, 5]
        put(other, 6)
        assert held(other) == [4, 5, 6]


@pytest.mark.parametrize("policy", ["lru", "slru", "lfu", "epoch_lru"])
def test_a_restored_table_evicts_in_the_same_order_as_before(policy, tmp_path):
    table = make(max_rows=8, evict=policy, name="t")
    for ids in ([0, 1, 2, 3, 4, 5], [1, 2], [6], [7, 1], [3, 4]):
        put(table, *ids, req_time=1000)
    if policy == "epoch_lru":
        table.next_eviction_epoch()
    put(table, 0, req_time=1000)
    table.save(str(tmp_path / "t"))
    others = [make(max_rows=8, evict=policy, name="t", device=device) for device in ("cuda", "cpu")]
    for other in others:
        other.restore(str(tmp_path / "t"))
    for ids in ([100, 101], [102]):
        for one in (table, *others):
            put(one, *ids, req_time=1001)
        assert held(others[0]) == held(table)
        if policy != "epoch_lru":  # the CPU has another coarse clock
            assert held(others[1]) == held(table)


def test_a_smaller_budget_restores_the_newest_rows(tmp_path):
    table = make(max_rows=40, name="t", device="cpu")
    for id in range(40):
        put(table, id, req_time=1000 + id)
    table.save(str(tmp_path / "t"))
    small = make(max_rows=10, name="t")
    small.pin(torch.tensor([31], device=small.device))
    small.restore(str(tmp_path / "t"))
    assert held(small) == list(range(30, 40))
    assert small.eviction_stats().refused == 30
    put(small, 5000)
    put(small, 5001)
    assert held(small) == [31, *range(33, 40), 5000, 5001]
    check = torch.tensor(held(small), device=small.device)
    assert torch.equal(small.lookup(check), check.float().view(-1, 1).repeat(1, 2))


def test_erased_rows_are_used_again_and_a_cleared_table_fills_up(large):
    table = make(max_rows=50)
    put(table, *range(50))
    assert table.erase(torch.arange(10, device=table.device)) == 10
    put(table, *range(100, 110))
    assert held(table) == [*range(10, 50), *range(100, 110)]
    put(table, 200, 201)
    assert table.size() == 50
    table.clear()
    put(table, *range(60))
    assert table.size() == 50


def test_a_cache_lets_go_by_its_policy_and_keeps_the_cpu_tables_budget():
    below = shoal.HashTable(2, optimizer=shoal.Sgd(lr=1.0), initializer="zeros", max_rows=30)
    table = shoal.table.CachedHashTable(below, cache_rows=6, evict="lfu")
    for _ in range(3):
        put(table, 1, 2)
    for start in range(10, 50, 4):
        put(table, *range(start, start + 4))
    resident = table.find_rows(torch.tensor([1, 2, 10], device=table.device)) >= 0
    assert resident.tolist() == [True, True, False]
    table.flush()
    assert below.size() == 30
    assert table.eviction_stats().evicted >= 10
    check = torch.tensor([1, 2, 49], device=table.device)
    assert torch.equal(table.lookup(check), check.float().view(-1, 1).repeat(1, 2))
