"""Times of rows: taken from the clock, given, refused; in tables, modules and fused calls."""

import time
from datetime import timedelta

import pytest
import torch

import shoal
from shoal.nn import HashEmbeddingBag, SparseOptimizer
from shoal.table import EntryDump, fused_apply_gradient, hash_table_from_config
from shoal.table.clock import Now, now
from shoal.table.table import HashTable

DAY = 86400


def ids(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


def stamps(table, *numbers):
    """The times of rows."""
    return [EntryDump.FromString(entry).last_update_ts_sec for entry in table.lookup_entry(ids(*numbers))]


def own(**options):
    return shoal.HashTable(dim=2, optimizer=shoal.Sgd(lr=1.0), **options)


def of_a_configuration():
    return HashTable.from_config(own().config, name="configured")


WRITES = {
    "assign": lambda t, **time: t.assign(ids(1, 1), torch.ones(2, 2), **time),
    "assign_add": lambda t, **time: t.assign_add(ids(1, 1), torch.ones(2, 2), **time),
    "apply_gradients": lambda t, **time: t.apply_gradients(ids(1, 1), torch.ones(2, 2), **time),
    "apply_gradients, dedup": lambda t, **time: t.apply_gradients(
        ids(1, 1), torch.ones(2, 2), enable_dedup=True, **time
    ),
    "lookup": lambda t, **time: t.lookup(ids(1, 1), insert_missing=True, **time),
    "fused": lambda t, **time: fused_apply_gradient(
        [t], ids(1, 1), None, torch.tensor([2]), torch.ones(4), None, None, [1.0], time.get("req_time"), 0, 1
    ),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_without_a_time_takes_the_current_one(write):
    table, before = own(), int(time.time())
    WRITES[write](table)
    (stamp,) = stamps(table, 1)
    assert before <= stamp <= time.time()
    assert table.max_update_time == stamp


@pytest.mark.parametrize("write", WRITES)
def test_a_write_without_a_time_never_moves_a_stamp_back(write):
    table, later = own(), int(time.time()) + 3600
    table.assign(ids(1), torch.zeros(1, 2), later)
    WRITES[write](table)
    assert stamps(table, 1) == [later]
    assert table.max_update_time == later


@pytest.mark.parametrize("write", [name for name in WRITES if name != "lookup"])
def test_a_time_that_is_given_is_kept_also_an_older_one(write):
    table = own()
    table.assign(ids(1), torch.zeros(1, 2))
    WRITES[write](table, req_time=1000)
    assert stamps(table, 1) == [1000]


@pytest.mark.parametrize("write", WRITES)
def test_a_time_more_than_a_day_ahead_is_refused_and_changes_nothing(write):
    table = own(name="prices")
    table.assign(ids(1), torch.zeros(1, 2), 1000)
    with pytest.raises(ValueError, match=r"'prices'.*req_time must be at most a day ahead of the clock"):
        WRITES[write](table, req_time=int(time.time()) + 2 * DAY)
    assert stamps(table, 1) == [1000]
    assert table.max_update_time == 1000
    WRITES[write](table, req_time=int(time.time()) + DAY - 60)


@pytest.mark.parametrize("write", WRITES)
def test_a_table_of_a_configuration_has_0_where_no_time_is_given(write):
    for table in (of_a_configuration(), hash_table_from_config(own().config, name_suffix=f"clock {write}")):
        WRITES[write](table)
        assert stamps(table, 1) == [0]
        assert table.max_update_time == 0
        WRITES[write](table, req_time=(1 << 32) - 1)
        assert table.max_update_time == (1 << 32) - 1
        table.assign(ids(1), torch.ones(1, 2))
        assert stamps(table, 1) == [0]


def test_a_time_read_from_a_clock_never_moves_a_stamp_back_in_any_table():
    table = of_a_configuration()
    table.assign(ids(1), torch.ones(1, 2), 2000)
    table.assign(ids(1, 2), torch.ones(2, 2), Now(1500))
    assert stamps(table, 1, 2) == [2000, 1500]
    assert isinstance(now(), Now)


def test_a_new_row_in_the_place_of_a_removed_one_takes_its_own_time():
    table = of_a_configuration()
    table.assign(torch.arange(100), torch.ones(100, 2), 5000)
    table.erase(torch.arange(100))
    table.assign(torch.arange(100, 300), torch.ones(200, 2), Now(1500))
    assert set(stamps(table, *range(100, 300))) == {1500}


def test_reinitialize_does_not_move_a_stamp_back_either():
    table, later = own(), int(time.time()) + 3600
    table.assign(ids(1), torch.zeros(1, 2), later)
    table.reinitialize(ids(1, 2))
    first, second = stamps(table, 1, 2)
    assert first == later
    assert second <= time.time()


def test_rows_written_without_a_time_outlive_evict_and_save(tmp_path):
    table = own(expire_after=timedelta(days=30))
    table.assign(ids(1), torch.ones(1, 2), int(time.time()))
    table.assign(ids(2), torch.ones(1, 2))
    table.apply_gradients(ids(1), torch.ones(1, 2))
    assert table.evict() == 0
    table.save(str(tmp_path / "rows"))
    other = own(expire_after="30d").restore(str(tmp_path / "rows"))
    assert sorted(other.contains(ids(1, 2)).tolist()) == [True, True]


# --- modules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [own, of_a_configuration])
@pytest.mark.parametrize("fused", [True, False])
def test_modules_take_the_current_time_and_never_move_a_stamp_back(table, fused):
    table, later = table(), int(time.time()) + 3600
    table.assign(ids(1), torch.zeros(1, 2), later)
    bag = HashEmbeddingBag(table, fused=fused)
    before = int(time.time())
    bag([[1, 2]]).sum().backward()
    if not fused:
        SparseOptimizer(bag).step()
    first, second = stamps(table, 1, 2)
    assert first == later
    assert before <= second <= time.time()


def test_a_clock_of_the_users_own_is_a_time_that_was_given():
    table = own()
    table.assign(ids(1), torch.zeros(1, 2))
    bag = HashEmbeddingBag(table)
    bag.clock = lambda: 1234.5
    bag([[1, 2]]).sum().backward()
    assert stamps(table, 1, 2) == [1234, 1234]


def test_a_module_refuses_a_clock_that_is_far_ahead():
    table = of_a_configuration()
    bag = HashEmbeddingBag(table, insert_missing=False)
    bag.clock = lambda: time.time() + 2 * DAY
    with pytest.raises(ValueError, match="at most a day ahead"):
        bag([[1]]).sum().backward()
    assert table.size() == 0
    optimizer = SparseOptimizer(bag)
    bag([[1]]).sum().backward()
    with pytest.raises(ValueError, match="at most a day ahead"):
        optimizer.step(req_time=int(time.time()) + 2 * DAY)
    assert table.size() == 0


def test_a_copy_of_a_model_goes_by_the_clock_as_the_model_does():
    import copy

    bag = copy.deepcopy(HashEmbeddingBag(own()))
    assert bag.table.clocked


def test_rows_without_a_time_in_a_checkpoint_do_not_expire_at_the_first_write(tmp_path):
    """Version 0.1 stamped rows with 0 where it was given no time."""
    old = HashTable(2, name="t", expire_after="1d", optimizer="sgd")
    old.assign(torch.arange(5), torch.ones(5, 2), req_time=0)
    old.save(tmp_path / "t")
    table = HashTable(2, name="t", expire_after="1d", optimizer="sgd").restore(tmp_path / "t")
    table.apply_gradients(torch.tensor([7]), torch.ones(1, 2))
    assert table.evict() == 0
    assert table.size() == 6
