"""A GPU cache over a CPU table gives what the CPU table alone gives, whatever leaves the cache and when."""

import pytest
import torch
from gpu_tables import rows_of

import shoal
from shoal.errors import ConfigError
from shoal.table import SlotOccurrenceThresholdConfig, create_hash_filter
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
    assert torch.equal(times, times2)
    torch.testing.assert_close(words2, words, rtol=1e-5, atol=1e-6)
    assert cached.max_update_time == alone.max_update_time


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
    assert cached.written_rows > 0  # rows did leave
    assert_same(alone, cached)
    cached.close()


def test_a_prefetched_row_that_changed_meanwhile_is_not_taken(device):
    """The worst order: fetched, then brought, changed and written back by others before it arrives."""
    alone, cached = tables(4)
    ids = torch.arange(8)
    for table, where in ((alone, "cpu"), (cached.below, "cpu")):
        table.assign(ids.to(where), torch.ones(8, 2))
    fetched = cached._fetch

    def slow(asked):
        result = fetched(asked)
        if len(cached._tainted) == 0 and asked.tolist() == [1]:
            cached._fetch = fetched
            for row in (1, 2, 3, 4, 5):  # changes id 1, then pushes it out
                there = torch.tensor([row], device=device)
                cached.assign_add(there, torch.ones(1, 2, device=device))
                alone.assign_add(torch.tensor([row]), torch.ones(1, 2))
        return result

    cached._fetch = slow
    one = torch.tensor([1], device=device)
    cached._ahead(one, torch.cuda.current_stream() if device.type == "cuda" else None)
    assert cached.lookup(one).tolist() == [[2, 2]]
    assert_same(alone, cached)


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
    with pytest.raises(ConfigError, match="needs 5 rows in GPU memory, cache_rows is 4"):
        cached.assign(torch.arange(5, device=device), torch.zeros(5, 2, device=device))
    with pytest.raises(ConfigError, match="cache_rows must be at least 1"):
        CachedHashTable(cached.below, cache_rows=0)
    with pytest.raises(ConfigError, match="stands over a CPU table"):
        CachedHashTable(cached, cache_rows=4)
    assert cached.size() == 0
