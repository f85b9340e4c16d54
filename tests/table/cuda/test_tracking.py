"""The changed ids of GPU tables and of tables cached on a GPU."""

import warnings

import pytest
import torch

import shoal
from shoal.errors import UnsupportedError
from shoal.table.cuda.cache import CachedHashTable
from shoal.table.tracking import TableTracker


def make(kind, **options):
    arguments = {"optimizer": shoal.Sgd(lr=1.0), "initializer": "zeros", "expire_after": "1d", "name": "t", **options}
    if kind == "cached":
        return CachedHashTable(shoal.HashTable(2, **arguments), cache_rows=64, device="cuda")
    return shoal.HashTable(2, device="cuda", **arguments)


def ids_of(tracker):
    return sorted(tracker.take().ids.tolist())


@pytest.mark.parametrize("kind", ["gpu", "cached"])
def test_every_kind_of_write_is_told_once(kind, device):
    table = make(kind)
    tracker = TableTracker(table)
    table.apply_gradients(torch.tensor([3, 1, 3], device=device), torch.ones(3, 2, device=device))
    assert ids_of(tracker) == [1, 3]
    assert ids_of(tracker) == []
    table.apply_gradients(torch.tensor([4, 4], device=device), torch.ones(2, 2, device=device), enable_dedup=True)
    table.assign(torch.tensor([5], device=device), torch.ones(1, 2, device=device))
    table.assign_add(torch.tensor([6], device=device), torch.ones(1, 2, device=device))
    table.reinitialize(torch.tensor([7], device=device))
    table.lookup(torch.tensor([8, 5], device=device), insert_missing=True)
    table.lookup(torch.tensor([9], device=device))
    assert ids_of(tracker) == [4, 5, 6, 7, 8]
    rows, found = table.find(torch.tensor([3, 9, 5]))
    assert (rows.tolist(), found.tolist()) == ([[-2, -2], [0, 0], [1, 1]], [True, False, True])
    assert ids_of(tracker) == []  # reading changes nothing


@pytest.mark.parametrize("kind", ["gpu", "cached"])
@pytest.mark.parametrize("how", ["erase", "evict", "clear", "restore"])
def test_what_leaves_a_table_is_told_and_found_absent(kind, how, device, tmp_path):
    table = make(kind)
    one, two = (torch.tensor([k], device=device) for k in (1, 2))
    ones = torch.ones(1, 2, device=device)
    table.assign(one, ones, req_time=1_000)
    table.save(str(tmp_path / "one"))
    table.assign(two, ones, req_time=2_000_000)
    tracker = TableTracker(table)
    if how == "erase":
        table.erase(torch.tensor([1, 99], device=device))
        changed, left = [1], [2]
    elif how == "evict":
        table.evict()
        changed, left = [1], [2]
    elif how == "clear":
        table.clear()
        changed, left = [1, 2], []
    else:
        table.restore(str(tmp_path / "one"))
        changed, left = [1, 2], [1]
    taken = tracker.take()
    assert taken.everything == (how in ("clear", "restore"))
    assert taken.ids.sort()[0].tolist() == changed
    rows, found = table.find(torch.tensor([1, 2]))
    assert found.tolist() == [1 in left, 2 in left]
    assert rows[found].eq(1).all()
    assert sorted(torch.cat(list(table.all_ids())).tolist()) == left
    tracker.close()
    table.assign(two, ones, req_time=2_000_000)
    assert ids_of(tracker) == []


@pytest.mark.parametrize("kind", ["gpu", "cached"])
def test_two_trackers_and_more_ids_than_are_kept(kind, device):
    table = make(kind)
    small, large = TableTracker(table, capacity=5), TableTracker(table)
    ids = torch.arange(40, device=device)
    table.assign(ids, torch.ones(40, 2, device=device))
    assert small.take().everything
    assert ids_of(large) == sorted(torch.cat(list(table.all_ids())).tolist()) == list(range(40))


@pytest.mark.gpu
def test_a_tracker_makes_no_write_wait():
    table = shoal.HashTable(4, optimizer="sgd", device="cuda").reserve(100_000)
    tracker = TableTracker(table)
    ids, grads = torch.arange(1000, device="cuda"), torch.randn(1000, 4, device="cuda")
    table.apply_gradients(ids, grads, enable_dedup=True)  # compiles
    tracker.take()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        for i in range(5):
            table.apply_gradients(ids + 100 * i, grads, enable_dedup=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ids_of(tracker) == list(range(1400))


@pytest.mark.gpu
def test_a_captured_graph_cannot_be_followed():
    table = make("gpu").reserve(1000)
    ids, grads = torch.arange(10, device="cuda"), torch.ones(10, 2, device="cuda")
    table.apply_gradients(ids, grads, enable_dedup=True)
    TableTracker(table)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UnsupportedError, match="cannot report which ids"), torch.cuda.graph(graph):
        table.apply_gradients(ids.clone(), grads, enable_dedup=True)  # a copy, because torch warns about an empty graph
