"""The changed ids of a table: plain values first, then threads, then many ids."""

import threading

import pytest
import torch

import shoal
from shoal.errors import ConfigError
from shoal.table.filters.admission import create_hash_filters
from shoal.table.tracking import TableTracker


def make(dim=2, **options):
    return shoal.HashTable(dim, optimizer=shoal.Sgd(lr=1.0), initializer="zeros", **options)


def ids_of(tracker):
    return sorted(tracker.take().ids.tolist())


def write(table, *ids):
    table.assign(torch.tensor(ids), torch.ones(len(ids), table.dim_size))


def test_every_kind_of_write_is_told_once():
    table = make()
    tracker = TableTracker(table)
    assert ids_of(tracker) == []
    table.apply_gradients(torch.tensor([3, 1, 3]), torch.ones(3, 2))
    assert ids_of(tracker) == [1, 3]
    assert ids_of(tracker) == []
    table.apply_gradients(torch.tensor([4, 4]), torch.ones(2, 2), enable_dedup=True)
    write(table, 5)
    table.assign_add(torch.tensor([6]), torch.ones(1, 2))
    table.reinitialize(torch.tensor([7]))
    table.lookup(torch.tensor([8, 5]), insert_missing=True)
    table.lookup(torch.tensor([9]))
    assert ids_of(tracker) == [4, 5, 6, 7, 8]


def test_what_was_written_before_is_not_told():
    table = make()
    write(table, 1, 2)
    tracker = TableTracker(table)
    assert ids_of(tracker) == []


def test_ids_that_a_filter_keeps_out_are_not_told():
    from shoal.table.config.messages import SlotOccurrenceThresholdConfig

    twice = SlotOccurrenceThresholdConfig(default_occurrence_threshold=2)
    (counting,) = create_hash_filters(1, True, twice, filter_capacity=1000)
    table = make(hash_filter=counting)
    tracker = TableTracker(table)
    table.apply_gradients(torch.tensor([1, 2, 2, 2]), torch.ones(4, 2))
    assert ids_of(tracker) == [2]
    assert torch.cat(list(table.all_ids())).tolist() == [2]


@pytest.mark.parametrize("how", ["erase", "evict", "clear", "restore"])
def test_what_leaves_a_table_is_told_and_found_absent(how, tmp_path):
    table = make(expire_after="1d", name="t")
    table.assign(torch.tensor([1]), torch.ones(1, 2), req_time=1_000)
    table.save(str(tmp_path / "one"))
    table.assign(torch.tensor([2]), torch.ones(1, 2), req_time=2_000_000)
    tracker = TableTracker(table)
    if how == "erase":
        assert table.erase(torch.tensor([1, 1, 99])) == 1
        changed, left = [1], [2]
    elif how == "evict":
        assert table.evict() == 1
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
    assert rows[~found].eq(0).all()
    assert rows[found].eq(1).all()
    assert ids_of(tracker) == []


def test_erased_and_written_again_is_there():
    table = make()
    write(table, 1)
    tracker = TableTracker(table)
    table.erase(torch.tensor([1]))
    write(table, 1)
    assert ids_of(tracker) == [1]
    assert table.find(torch.tensor([1]))[1].tolist() == [True]


def test_nothing_is_found_in_nothing():
    rows, found = make().find(torch.empty(0, dtype=torch.int64))
    assert (rows.shape, found.shape) == ((0, 2), (0,))


def test_two_trackers_are_told_alike_and_one_may_leave():
    table = make()
    first, second = TableTracker(table), TableTracker(table)
    write(table, 1)
    assert ids_of(first) == [1]
    write(table, 2)
    assert (ids_of(first), ids_of(second)) == ([2], [1, 2])
    first.close()
    write(table, 3)
    assert (ids_of(first), ids_of(second)) == ([], [3])
    first.close()


def test_a_sync_client_hears_of_gradients_alone_beside_a_tracker():
    from shoal.serving.sync.monolith.handle import SyncClientHandle

    table, handle = make(name="beside"), SyncClientHandle("beside")
    table.attach(handle)
    tracker = TableTracker(table)
    write(table, 1)
    table.apply_gradients(torch.tensor([2]), torch.ones(1, 2))
    assert handle.touched.keys.steal().tolist() == [2]
    assert ids_of(tracker) == [1, 2]


def test_more_ids_than_are_kept_mean_that_any_may_have_changed():
    table = make()
    tracker = TableTracker(table, capacity=100)
    write(table, *range(10_000))
    assert tracker.take().everything
    assert sorted(torch.cat(list(table.all_ids())).tolist()) == list(range(10_000))
    write(table, 3)
    taken = tracker.take()
    assert (taken.ids.tolist(), taken.everything, taken.lost) == ([3], False, 0)


def test_removed_ids_beyond_what_is_kept_are_counted_and_logged(caplog):
    table = make()
    write(table, *range(1000))
    tracker = TableTracker(table, capacity=100)
    table.erase(torch.arange(1000))
    taken = tracker.take()
    assert len(taken.ids) + taken.lost == 1000
    assert "removed ids exceeded the tracker's capacity" in caplog.text
    assert tracker.take().lost == 0


def test_a_capacity_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        TableTracker(make(), capacity=0)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_copy_that_takes_and_reads_beside_writers_ends_equal(threads):
    table = make(dim=1)
    tracker = TableTracker(table)
    copy: dict[int, float] = {}

    def sync():
        taken = tracker.take()
        rows, found = table.find(taken.ids)
        for id_, value, there in zip(taken.ids.tolist(), rows[:, 0].tolist(), found.tolist(), strict=True):
            if there:
                copy[id_] = value
            else:
                copy.pop(id_, None)

    def train(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(200):
            ids = torch.randint(0, 500, (64,), generator=generator)
            table.apply_gradients(ids, torch.ones(64, 1))
            table.erase(ids[:2])

    writers = [threading.Thread(target=train, args=(seed,)) for seed in range(threads)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        sync()
    for writer in writers:
        writer.join(60)
    sync()
    every = torch.cat(list(table.all_ids()))
    assert copy == dict(zip(every.tolist(), table.lookup(every)[:, 0].tolist(), strict=True))


def test_many_ids_in_one_batch():
    table = make(dim=1)
    tracker = TableTracker(table)
    ids = torch.randint(-(1 << 62), 1 << 62, (300_000,))
    table.apply_gradients(ids, torch.ones(300_000, 1))
    assert torch.equal(tracker.take().ids.sort()[0], ids.unique())
