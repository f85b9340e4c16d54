"""Times of rows on a GPU, and values that are not finite, as in tests of CPU tables."""

import time

import pytest
import torch
from gpu_tables import rows_of

import shoal
from shoal.table.clock import Now
from shoal.table.cuda.cache import CachedHashTable
from shoal.table.table import HashTable


def own(**options):
    return shoal.HashTable(2, optimizer=shoal.Sgd(lr=1.0), device="cuda", **options)


def cached(**options):
    return CachedHashTable(shoal.HashTable(2, optimizer=shoal.Sgd(lr=1.0), **options), cache_rows=64)


def stamps(table):
    """Id -> time."""
    ids, times, _ = rows_of(table.staged()._native)
    return dict(zip(ids.tolist(), times.tolist(), strict=True))


WRITES = {
    "assign": lambda t, ids, **time: t.assign(ids, torch.ones(len(ids), 2, device=ids.device), **time),
    "assign_add": lambda t, ids, **time: t.assign_add(ids, torch.ones(len(ids), 2, device=ids.device), **time),
    "gradients": lambda t, ids, **time: t.apply_gradients(ids, torch.ones(len(ids), 2, device=ids.device), **time),
    "lookup": lambda t, ids, **time: t.lookup(ids, insert_missing=True, **time),
}


@pytest.mark.parametrize("make", [own, cached])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_without_a_time_takes_the_current_one_and_never_moves_a_stamp_back(make, write, device):
    table, before = make(), int(time.time())
    later = before + 3600
    table.assign(torch.tensor([1], device=device), torch.zeros(1, 2, device=device), later)
    WRITES[write](table, torch.tensor([1, 2, 2, 3], device=device))
    times = stamps(table)
    assert times[1] == later
    assert before <= times[2] == times[3] <= time.time()
    assert table.max_update_time == later


@pytest.mark.parametrize("make", [own, cached])
def test_a_time_that_is_given_is_kept_and_one_far_ahead_refused(make, device):
    table, ids = make(), torch.tensor([1, 2], device=device)
    WRITES["assign"](table, ids)
    WRITES["gradients"](table, ids, req_time=1000)
    assert stamps(table) == {1: 1000, 2: 1000}
    for write in WRITES.values():
        with pytest.raises(ValueError, match="at most a day ahead"):
            write(table, ids, req_time=int(time.time()) + 2 * 86400)


def test_a_new_row_in_the_place_of_a_removed_one_takes_its_own_time(device):
    table = HashTable.from_config(own().config, name="configured", device="cuda")
    ids = torch.arange(50, device=device)
    WRITES["assign"](table, ids, req_time=(1 << 32) - 5)  # above what an int32 holds
    WRITES["assign"](table, ids[:20], req_time=Now(9))
    assert set(stamps(table).values()) == {(1 << 32) - 5}
    table.erase(ids)
    WRITES["assign"](table, torch.arange(100, 220, device=device).repeat(2), req_time=Now(1500))
    assert set(stamps(table).values()) == {1500}
    WRITES["assign"](table, torch.arange(300, 310, device=device))
    assert stamps(table)[305] == 0


@pytest.mark.parametrize("make", [own, cached])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_change_nothing(make, bad, device):
    table, ids = make(), torch.tensor([1, 2], device=device)
    WRITES["assign"](table, ids, req_time=5)
    values = torch.tensor([[3.0, 3.0], [bad, 3.0]], device=device)
    for write in (table.assign, table.assign_add):
        with pytest.raises(ValueError, match="1 row of the values holds NaN or infinity"):
            write(ids, values).as_op()
    assert table.lookup(ids).tolist() == [[1, 1], [1, 1]]
