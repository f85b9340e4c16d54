"""A GPU cache over a CPU table gives the results of the CPU table, no matter what leaves the cache and when."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gpu_tables import assert_same_times, rows_of

import shoal
from shoal.errors import ConfigError, UnsupportedError
from shoal.table import (
    SlotOccurrenceThresholdConfig,
    create_hash_filter,
    fused_lookup,
    restore_incremental,
    save_incremental,
)
from shoal.table.cuda.cache import CachedHashTable


def tables(cache_rows, **options):
    """A CPU table, and a cache over another."""
    alone, below = (shoal.HashTable(2, optimizer=shoal.Adagrad(lr=0.1), seed=3, **options) for _ in range(2))
    return alone, CachedHashTable(below, cache_rows=cache_rows)


def assert_same(alone, cached):
    cached.flush()
    ids, times, words = rows_of(alone._native)
    ids2, times2, words2 = rows_of(cached.below._native)
    assert torch.equal(ids, ids2)
    assert_same_times(times, times2)
    torch.testing.assert_close(words2, words, rtol=1e-5, atol=1e-6)
    assert_same_times(*(torch.tensor(table.max_update_time) for table in (cached, alone)))


@pytest.mark.parametrize("seed", range(3))
def test_results_are_those_of_the_cpu_table_under_any_eviction_order(seed, device):
    torch.manual_seed(seed)
    alone, cached = tables(24)
    for step in range(8):
        ids = torch.randint(0, 60, (14,))
        there = ids.to(device)
        if step % 3 == 2:
            cached.prefetch(there)
        torch.testing.assert_close(cached.lookup(there).cpu(), alone.lookup(ids), rtol=1e-5, atol=1e-6)
        values = torch.randn(14, 2)
        call = ("apply", "assign", "insert", "dedup")[(step + seed) % 4]
        if call == "assign":
            alone.assign(ids, values, step)
            cached.assign(there, values.to(device), step)
        elif call == "insert":
            alone.lookup(ids, insert_missing=True)
            cached.lookup(there, insert_missing=True)
        else:
            alone.apply_gradients(ids, values, step, enable_dedup=call == "dedup", req_time=step)
            cached.apply_gradients(there, values.to(device), step, enable_dedup=call == "dedup", req_time=step)
    assert cached.written_rows > 0  # rows left the cache
    assert_same(alone, cached)
    cached.close()


def test_a_prefetched_row_that_changed_meanwhile_is_not_taken(device):
    """The worst order: fetched, then brought, changed and written back by others before it arrives."""
    alone, cached = tables(4)
    ids = torch.arange(8)
    for table, where in ((alone, "cpu"), (cached.below, "cpu")):
        table.assign(ids.to(where), torch.ones(8, 2))
    fetched = cached.fetch

    def slow(asked):
        result = fetched(asked)
        if asked.tolist() == [1]:
            cached.fetch = fetched
            for row in (1, 2, 3, 4, 5):  # changes id 1, then displaces it
                there = torch.tensor([row], device=device)
                cached.assign_add(there, torch.ones(1, 2, device=device))
                alone.assign_add(torch.tensor([row]), torch.ones(1, 2))
        return result

    cached.fetch = slow
    one = torch.tensor([1], device=device)
    cached.prefetch(one)
    assert cached.lookup(one).tolist() == [[2, 2]]
    assert_same(alone, cached)
    cached.close()


@pytest.mark.parametrize("removal", ["erase", "clear", "evict", "restore"])
def test_a_row_that_is_removed_while_it_is_fetched_does_not_come_back(removal, device, tmp_path):
    _, cached = tables(4, expire_after="1d")
    one = torch.tensor([1], device=device)
    shoal.HashTable(2, optimizer="adagrad", name="below").save(str(tmp_path / "empty"))
    cached.below.assign(torch.tensor([1, 2]), torch.ones(2, 2), 7)
    fetched = cached.fetch

    def slow(asked):
        result = fetched(asked)
        cached.fetch = fetched
        if removal == "erase":
            cached.erase(one)
        elif removal == "clear":
            cached.clear()
        elif removal == "evict":
            cached.evict(7 + 86400)
        else:
            cached.restore(str(tmp_path / "empty"))
        return result

    cached.fetch = slow
    cached.prefetch(one)
    assert not cached.lookup(one).any()
    assert not cached.contains(one).any()
    cached.close()


def test_a_cache_is_looked_up_with_other_tables_in_one_call(device):
    _, cached = tables(2)
    other = shoal.HashTable(2, optimizer="sgd", device="cuda", name="other")
    ids = torch.arange(6, device=device)
    other.assign(ids, torch.full((6, 2), 3.0, device=device))
    cached.below.assign(torch.arange(6), torch.full((6, 2), 5.0))
    both = torch.tensor([0, 1, 4, 5], device=device)
    rows = fused_lookup([cached, other], both, torch.tensor([2, 2]), 1)[0]
    assert rows.view(4, 2)[:, 0].tolist() == [5, 5, 3, 3]


def test_incremental_checkpoints_see_what_is_in_the_cache(device, tmp_path):
    alone, cached = tables(4, name="items")
    for step in range(3):
        ids, values = torch.arange(step * 3, step * 3 + 4), torch.full((4, 2), float(step))
        alone.assign(ids, values)
        cached.assign(ids.to(device), values.to(device))
        one, two = save_incremental(alone, tmp_path / "a"), save_incremental(cached, tmp_path / "c")
        assert (one.kind, one.rows, one.removed) == (two.kind, two.rows, two.removed)
    _, other = tables(4, name="items")
    restore_incremental(other, tmp_path / "a")
    assert torch.equal(other.lookup(torch.arange(3, device=device)).cpu(), alone.lookup(torch.arange(3)))
    assert other.size() == alone.size()
    cached.close()


def test_rows_come_and_go_with_their_state_and_filter(device):
    def make():
        thresholds = SlotOccurrenceThresholdConfig(default_occurrence_threshold=1)
        return create_hash_filter(1000, 7, thresholds.SerializeToString())

    alone, below = (shoal.HashTable(2, optimizer="adam", seed=3, hash_filter=make()) for _ in range(2))
    cached = CachedHashTable(below, cache_rows=8)
    torch.manual_seed(0)
    for step in range(6):
        ids, grads = torch.randint(0, 14, (6,)), torch.randn(6, 2)
        alone.apply_gradients(ids, grads, step)
        cached.apply_gradients(ids.to(device), grads.to(device), step)
    assert_same(alone, cached)
    assert cached.size() == alone.size()


def test_removal_and_checkpoints_reach_both(device, tmp_path):
    alone, cached = tables(6, expire_after="1d")
    for begin in range(0, 12, 4):
        ids, values = torch.arange(begin, begin + 4), torch.randn(4, 2)
        alone.assign(ids, values, begin * 20000)
        cached.assign(ids.to(device), values.to(device), begin * 20000)
    assert cached.contains(torch.arange(14, device=device)).tolist() == [True] * 12 + [False] * 2
    assert cached.erase(torch.tensor([0, 11, 99], device=device)) == alone.erase(torch.tensor([0, 11, 99])) == 2
    cached.save(str(tmp_path / "t"))
    assert cached.evict() == alone.evict() == 3
    assert_same(alone, cached)
    again = CachedHashTable(shoal.HashTable(2, optimizer=shoal.Adagrad(lr=0.1)), cache_rows=4)
    again.restore(str(tmp_path / "t"))
    assert again.size() == 7
    ids = torch.arange(8, 11, device=device)
    assert torch.equal(again.lookup(ids), cached.lookup(ids))
    assert len(cached.lookup_entry(ids)) == 3
    assert cached.clear().size() == 0


def test_a_batch_larger_than_the_cache_is_refused(device):
    _, cached = tables(4)
    with pytest.raises(ConfigError, match="cache_rows must be at least 5 for this batch, got 4"):
        cached.assign(torch.arange(5, device=device), torch.zeros(5, 2, device=device))
    with pytest.raises(ConfigError, match="cache_rows must be at least 1"):
        CachedHashTable(cached.below, cache_rows=0)
    with pytest.raises(ConfigError, match="must be a CPU table"):
        CachedHashTable(cached, cache_rows=4)
    assert cached.size() == 0


class LargeIdsFirst:
    def scores(self, ids, before, known, *, time_s):
        return -ids.float()


@pytest.mark.parametrize(
    ("policy", "stay"),
    [
        ("lru", [3, 4, 5, 6]), ("slru", [1, 2, 5, 6]), ("lfu", [1, 2, 5, 6]), (shoal.EpochLru(), [3, 4, 5, 6]),
        ("epoch_lfu", [1, 4, 5, 6]), (LargeIdsFirst(), [1, 2, 3, 6]),
    ],
)  # fmt: skip
def test_rows_leave_a_cache_by_its_policy(policy, stay, device):
    below = shoal.HashTable(2, initializer="zeros")
    cached = CachedHashTable(below, cache_rows=4, evict=policy)
    for id in (1, 1, 1, 2, 2, 3, 4, 5, 6):
        if id == 4 and "epoch" in str(policy).lower():
            cached.next_eviction_epoch()
        cached.assign(torch.tensor([id], device=device), torch.full((1, 2), float(id), device=device))
    assert (cached.find_rows(torch.arange(1, 7, device=device)) >= 0).nonzero().view(-1).add(1).tolist() == stay
    assert torch.equal(cached.lookup(torch.tensor([1, 6], device=device)).cpu(), torch.tensor([[1.0] * 2, [6.0] * 2]))


def test_policies_that_a_cache_cannot_follow_are_refused(device):
    below = shoal.HashTable(2, max_rows=100, evict="score")
    for policy in ("score", shoal.Lru(min_age="1h"), shoal.Lfu(admit="if_better")):
        with pytest.raises(ConfigError, match="every row of a batch must fit into the cache"):
            CachedHashTable(below, cache_rows=4, evict=policy)
    cached = CachedHashTable(below, cache_rows=4)
    with pytest.raises(UnsupportedError, match="does not keep scores; call set_score"):
        cached.assign(torch.tensor([1], device=device), torch.ones(1, 2, device=device), scores=2.0)
    cached.set_score(3.0)
    with pytest.raises(ConfigError, match="next_eviction_epoch needs"):
        cached.next_eviction_epoch()


def test_a_call_that_waits_for_its_prefetch_lets_others_through(device):
    """One thread waits for the prefetcher, another one has the cache: neither stops the prefetcher."""
    _, cached = tables(8)
    one, two = torch.tensor([1], device=device), torch.tensor([2], device=device)
    cached.below.assign(torch.arange(4), torch.ones(4, 2))
    fetched, inside, go_on = cached.fetch, threading.Event(), threading.Event()

    def slow(asked):
        if asked.tolist() == [1]:
            inside.set()
            assert go_on.wait(60)
        return fetched(asked)

    cached.fetch = slow
    with ThreadPoolExecutor(2) as pool:
        cached.prefetch(one)
        assert inside.wait(60)
        waits = pool.submit(cached.apply_gradients, one, torch.ones(1, 2, device=device))
        other = pool.submit(cached.lookup, two)
        assert other.result(60).tolist() == [[1, 1]]
        go_on.set()
        waits.result(60)
    assert cached.lookup(one)[0, 0] < 1
    cached.close()


def test_the_memory_of_a_cache_goes_with_its_last_user(device):
    gc.collect()
    gc.disable()
    try:
        _, cached = tables(4)
        cached.prefetch(torch.arange(2, device=device))
        cached.lookup(torch.arange(2, device=device))
        cached.close()
        group = weakref.ref(cached.storage)
        del cached
        assert group() is None
    finally:
        gc.enable()
