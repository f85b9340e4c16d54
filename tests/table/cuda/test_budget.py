"""Budgets of tables in GPU memory."""

import pytest
import torch

import shoal
from shoal.errors import CapacityError, UnsupportedError
from shoal.table.tracking import TableTracker


@pytest.fixture
def make():
    def table(**options):
        given = {"optimizer": shoal.Sgd(lr=1.0), "initializer": "zeros", "device": "cuda", **options}
        return shoal.HashTable(2, **given)

    return table


def put(table, *ids, **options):
    ids = torch.tensor(ids, device=table.device)
    table.assign(ids, ids.float().view(-1, 1).repeat(1, 2), **options)


def held(table):
    return sorted(torch.cat(list(table.all_ids())).tolist())


def check_rows(table):
    ids = torch.tensor(held(table), device=table.device)
    assert torch.equal(table.lookup(ids), ids.float().view(-1, 1).repeat(1, 2))


@pytest.mark.parametrize("policy", ["lru", "lfu", "epoch_lru", "epoch_lfu", "score"])
def test_a_full_table_keeps_its_limit_and_its_rows(policy, make):
    table = make(max_rows=100, evict=policy)
    for start in range(0, 300, 20):
        put(table, 1, 2, 3, *range(start + 10, start + 27), req_time=1000 + start)
        assert table.size() <= 100
    check_rows(table)
    assert {1, 2, 3} <= set(held(table))
    stats = table.eviction_stats()
    assert stats.evicted == stats.created - table.size() > 100
    assert stats.age_max_s >= stats.age_min_s >= 0


def test_policies_choose(make):
    table = make(max_rows=8, evict="lru")
    for id in (1, 2, 3, 4, 5, 6, 7, 1, 8, 9):
        put(table, id)
    assert held(table) == [1, 3, 4, 5, 6, 7, 8, 9]
    table = make(max_rows=4, evict="score")
    put(table, 1, 2, scores=torch.tensor([5.0, -1.0], device=table.device))
    put(table, 3, 4, scores=3.0)
    put(table, 5, scores=4.0)
    assert held(table) == [1, 3, 4, 5]


def test_pinned_and_young_rows_stay_and_a_call_that_cannot_fit_changes_nothing(make):
    table = make(max_rows=6)
    table.pin(torch.tensor([1], device=table.device))
    for id in range(1, 12):
        put(table, id)
    assert 1 in held(table)
    assert table.pinned().tolist() == [1]
    before = held(table)
    with pytest.raises(CapacityError, match="half of what the budget holds"):
        put(table, *range(100, 110))
    young = make(max_rows=4, evict=shoal.Lru(min_age="1h"))
    put(young, 1, 2, req_time=5000)
    put(young, 3, 4, req_time=5000)
    with pytest.raises(CapacityError, match="pinned or too young"):
        put(young, 5, req_time=5000)
    assert (held(table), held(young)) == (before, [1, 2, 3, 4])


def test_what_leaves_can_be_had_and_is_told(make):
    table = make(max_rows=4, optimizer=shoal.Adagrad(lr=1.0))
    tracker = TableTracker(table)
    with table.collect_evicted() as evicted:
        for id in range(6):
            put(table, id, req_time=10 + id)
        left = evicted.take()
    assert left.ids.tolist() == [0, 1]
    assert left.values.tolist() == [[0, 0], [1, 1]]
    assert left.states.shape == (2, 2)
    assert set(tracker.take().ids.tolist()) == set(range(6))


def test_modules_train_a_table_with_a_budget(make):
    table = make(max_rows=20)
    bag = shoal.nn.HashEmbeddingBag(table, combiner="sum")
    for step in range(10):
        bag(torch.arange(step * 4, step * 4 + 4, device=table.device).view(2, 2)).sum().backward()
    table.as_op()
    assert table.size() <= 20
    assert held(table)[-1] == 39


def test_what_gpus_do_not_have_yet_is_refused(make):
    with pytest.raises(UnsupportedError, match="if_better"):
        make(max_rows=4, evict=shoal.Lfu(admit="if_better"))
    with pytest.raises(UnsupportedError, match="CPU tables"):
        make(max_rows=4).miss_ratio_curve()


def test_a_cache_lets_go_by_its_policy_and_keeps_the_cpu_tables_budget():
    below = shoal.HashTable(2, optimizer=shoal.Sgd(lr=1.0), initializer="zeros", max_rows=30)
    table = shoal.table.CachedHashTable(below, cache_rows=6, evict="lfu")
    for _ in range(3):
        put(table, 1, 2)
    for id in range(10, 50):
        put(table, id)
    resident = table.find_rows(torch.tensor([1, 2, 10], device=table.device)) >= 0
    assert resident.tolist() == [True, True, False]
    table.flush()
    assert below.size() == 30
    assert table.eviction_stats().evicted >= 10
    check = torch.tensor([1, 2, 49], device=table.device)
    assert torch.equal(table.lookup(check), check.float().view(-1, 1).repeat(1, 2))
