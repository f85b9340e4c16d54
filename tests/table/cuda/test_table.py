"""A GPU table behaves like a CPU table: reads, writes, filters, expiry, growth, refusals."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gpu_tables import MIN, assert_same_rows, config, pair
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.errors import CapacityError, ConfigError, UnsupportedError
from shoal.table import (
    EntryDump,
    FixedR8Compressor,
    HashTable,
    MergedMultiTypeHashTable,
    MultiTypeHashTable,
    OneBitCompressor,
    RandomUniformInitializer,
    SgdOptimizer,
    SlotOccurrenceThresholdConfig,
    TouchedKeySet,
    ZerosInitializer,
    create_hash_filter,
    fused_apply_gradient,
)
from shoal.table.cuda.storage import most_slots, stash_cells


def test_worked_example(device):
    table = shoal.HashTable(2, optimizer=shoal.Sgd(lr=0.5), initializer="zeros", device="cuda")
    to = {"device": device}
    table.assign_add(torch.tensor([7, 8], **to), torch.tensor([[1.0, 2], [3, 4]], **to))
    assert table.lookup(torch.tensor([8, 9, 7], **to)).tolist() == [[3, 4], [0, 0], [1, 2]]
    assert table.size() == 2
    table.apply_gradients(torch.tensor([7, 7, 9], **to), torch.tensor([[1.0, 1], [1, 1], [2, 2]], **to))
    assert table.lookup(torch.tensor([7, 9], **to)).tolist() == [[0, 1], [-1, -1]]
    assert len(table) == 3
    assert table.contains(torch.tensor([7, 1], **to)).tolist() == [True, False]


def test_every_int64_is_a_key(device):
    ids = torch.tensor([0, -1, 1, MIN, MIN + 1, 2**63 - 1], device=device)
    table = shoal.HashTable(1, optimizer="sgd", initializer="zeros", device="cuda")
    table.assign(ids, torch.arange(6.0, device=device).view(6, 1))
    assert table.lookup(ids).view(-1).tolist() == [0, 1, 2, 3, 4, 5]
    assert table.size() == 6
    assert table.erase(ids[2:4]) == 2
    assert table.lookup(ids).view(-1).tolist() == [0, 1, 0, 0, 4, 5]
    assert table.contains(ids).tolist() == [True, True, False, False, True, True]


def test_new_rows_are_those_of_the_cpu(device):
    cpu, gpu = pair(7, "adam", initializer=RandomUniformInitializer(-0.3, 0.7))
    ids = torch.tensor([5, -9, 5, 1 << 60, MIN])
    rows = gpu.lookup(ids.to(device), insert_missing=True).cpu()
    torch.testing.assert_close(rows, cpu.lookup(ids, insert_missing=True), rtol=0, atol=1e-7)
    assert torch.equal(rows[0], rows[2])
    assert gpu.size() == 4
    assert_same_rows(cpu, gpu)


operations = st.lists(
    st.tuples(
        st.sampled_from(["assign", "assign_add", "apply", "dedup", "erase", "reinitialize", "insert", "evict"]),
        st.lists(st.integers(-3, 12).map(lambda i: MIN if i == -3 else i * 7919), max_size=12),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=8)
@given(operations)
def test_any_sequence_of_calls_leaves_what_the_cpu_has(calls):
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    cpu, gpu = pair(3, shoal.Adagrad(lr=0.1), expire_after="1d")
    for i, (call, listed, days) in enumerate(calls):
        ids = torch.tensor(listed, dtype=torch.int64)
        values = torch.linspace(-1, 1, max(1, 3 * len(listed)))[: 3 * len(listed)].view(-1, 3) + i
        time = days * 43200
        there, moved = ids.to(device), values.to(device)
        if call in ("assign", "assign_add"):
            getattr(cpu, call)(ids, values, time)
            getattr(gpu, call)(there, moved, time)
        elif call in ("apply", "dedup"):
            cpu.apply_gradients(ids, values, i, enable_dedup=call == "dedup", req_time=time)
            gpu.apply_gradients(there, moved, i, enable_dedup=call == "dedup", req_time=time)
        elif call == "erase":
            assert gpu.erase(there) == cpu.erase(ids)
        elif call == "insert":
            a, b = (
                cpu.lookup(ids, insert_missing=True, req_time=time),
                gpu.lookup(there, insert_missing=True, req_time=time),
            )
            torch.testing.assert_close(b.cpu(), a, rtol=1e-5, atol=1e-6)
        elif call == "evict":
            assert gpu.evict() == cpu.evict()
        else:
            # Its time is the wall clock's, which differs between the two, so it is overwritten.
            assert torch.equal(gpu.reinitialize(there)[1].cpu(), cpu.reinitialize(ids)[1])
            cpu.assign_add(ids, values, time)
            gpu.assign_add(there, moved, time)
        assert gpu.size() == cpu.size()
        assert gpu.max_update_time == cpu.max_update_time
    assert_same_rows(cpu, gpu, 1e-5)


def test_it_grows_and_keeps_every_row(device):
    table = shoal.HashTable(2, optimizer="sgd", initializer="zeros", device="cuda")
    torch.manual_seed(0)
    ids = torch.randperm(3000, device=device) * 2654435761
    values = torch.randn(3000, 2, device=device)
    for part in range(0, 3000, 600):
        table.assign(ids[part : part + 600], values[part : part + 600])
    assert table.size() == 3000
    assert torch.equal(table.lookup(ids), values)
    assert not table.contains(ids + 1).any()
    assert table.erase(ids[::3]) == 1000
    assert table.size() == 2000
    kept = torch.ones(3000, dtype=torch.bool, device=device)
    kept[::3] = False
    assert torch.equal(table.contains(ids), kept)
    room = table.memory_bytes()
    table.assign(ids[::3] + 1, values[::3])  # rows are reused
    assert table.memory_bytes() == room
    assert torch.equal(table.lookup(ids[::3] + 1), values[::3])
    assert torch.equal(table.lookup(ids[kept]), values[kept])
    table.clear()
    assert table.size() == 0
    assert not table.contains(ids).any()
    table.assign(ids[:5], values[:5])
    assert torch.equal(table.lookup(ids[:5]), values[:5])


def test_full_buckets_overflow_and_lose_nothing(device):
    table = shoal.HashTable(1, optimizer="sgd", initializer="zeros", device="cuda")
    table._storage.max_load = 0.99
    table.reserve(700)
    buckets = table._storage._buckets[0]
    ids = torch.arange(1, 1 + int(buckets * 8 * 0.97), device=device)
    table.assign(ids, ids.float().view(-1, 1))
    assert table._storage._buckets[0] == buckets
    cells = table._storage.stash_keys.tensor[0, : stash_cells(buckets)]
    assert int((cells != MIN).sum()) > 0  # some are in the stash
    assert torch.equal(table.lookup(ids).view(-1), ids.float())
    assert table.erase(ids[1::2]) == ids.numel() // 2
    assert torch.equal(table.lookup(ids[::2]).view(-1), ids[::2].float())
    assert not table.contains(ids[1::2]).any()
    table._storage.max_load = 0.5
    table.assign(ids[1::2], ids[1::2].float().view(-1, 1))
    assert torch.equal(table.lookup(ids).view(-1), ids.float())
    assert table.size() == ids.numel()


def test_a_full_device_is_a_clear_error_and_leaves_the_table_as_it_was(device, monkeypatch):
    table = shoal.HashTable(2, optimizer="sgd", initializer="zeros", device="cuda", name="items")
    ids = torch.arange(40, device=device)
    table.assign(ids, torch.ones(40, 2, device=device))

    def refuse(part, elements):
        raise CapacityError("0 of 1 MiB free")

    many = torch.arange(40, 60_000 if device.type == "cpu" else 40_000_000, device=device)
    group = table._storage
    for store in (group.arena.words, group.keys, group.rows, group.stash_keys, group.stash_rows):
        monkeypatch.setattr(store, "grow", refuse)
        with pytest.raises(CapacityError, match=r"'items'.*0 of 1 MiB free.*nothing was changed"):
            table.assign(many, torch.ones(many.numel(), 2, device=device))
        monkeypatch.undo()
        assert table.size() == 40
        assert torch.equal(table.lookup(ids), torch.ones(40, 2, device=device))
    table.assign(ids, torch.zeros(40, 2, device=device))
    assert not table.lookup(ids).any()


def test_filters_count_as_they_do_on_the_cpu(device):
    def make():
        thresholds = SlotOccurrenceThresholdConfig(default_occurrence_threshold=2)
        return create_hash_filter(1000, 7, thresholds.SerializeToString())

    tables = [
        shoal.HashTable(1, optimizer=shoal.Sgd(lr=1.0), initializer="zeros", hash_filter=make(), device=d)
        for d in ("cpu", "cuda")
    ]
    for call in ("apply", "dedup", "assign", "assign_add", "insert", "apply", "insert"):
        sizes = []
        for table in tables:
            where = table.device
            ids = torch.tensor([9, 9, 9, 4, 5, 4], device=where)
            values = torch.arange(6.0, device=where).view(6, 1)
            if call in ("apply", "dedup"):
                table.apply_gradients(ids, values, enable_dedup=call == "dedup")
            elif call == "insert":
                table.lookup(ids + 1, insert_missing=True)
            else:
                getattr(table, call)(ids + len(call), values)
            sizes.append(table.size())
        assert sizes[0] == sizes[1], call
    assert_same_rows(*tables)


def test_expiry_goes_by_slot_and_the_tables_own_clock(device):
    table = shoal.HashTable(1, optimizer="sgd", expire_after="2d", device="cuda")
    for id, time in ((1, 827200), (2, 827201), (3, 1000000)):
        table.assign(torch.tensor([id], device=device), torch.ones(1, 1, device=device), time)
    assert table.evict() == 1
    assert table.contains(torch.tensor([1, 2, 3], device=device)).tolist() == [False, True, True]
    assert table.evict(1000000 + 2 * 86400) == 2


def test_touched_keys_are_those_that_training_changed(device):
    class Client:
        def attach_table(self, name, dim, lookup):
            self.lookup = lookup
            self.keys = TouchedKeySet()
            return self.keys, 3

    client = Client()
    instance = config([(2, ZerosInitializer(), SgdOptimizer())], [1.0])
    table = HashTable.from_config(instance, name="t", sync_client=client, device="cuda")
    ids = torch.tensor([4, 5, 4], device=device)
    table.assign(ids + 10, torch.ones(3, 2, device=device))
    table.apply_gradients(ids, torch.ones(3, 2, device=device))
    table.reinitialize(torch.tensor([9], device=device))
    stolen, numbers = client.keys.steal_pairs()
    assert sorted(stolen.tolist()) == [4, 5, 9]
    assert set(numbers.tolist()) == {3}
    assert client.lookup(torch.tensor([4, 5])).tolist() == [[-2, -2], [-1, -1]]


def test_quantized_lookups_show_what_serving_will_see(device):
    instance = config([(3, ZerosInitializer(), SgdOptimizer(), FixedR8Compressor(2.0))], [1.0])
    table = HashTable.from_config(instance, name="t", device="cuda")
    values = torch.tensor([[0.3, -0.3, 0.0078], [2.5, -7.0, float("nan")]], device=device)
    table.assign(torch.tensor([1, 2], device=device), values)
    seen = table.lookup(torch.tensor([1, 2], device=device)).tolist()
    assert seen == [[0.296875, -0.296875, 0.0], [1.984375, -2.0, 0.0]]


def test_bad_gradients_are_refused_or_passed_over(device):
    ids = torch.tensor([1, 2, 3], device=device)
    bad = torch.tensor([[1.0], [float("nan")], [float("inf")]], device=device)
    table = shoal.HashTable(1, optimizer=shoal.Sgd(lr=1.0), initializer="zeros", device="cuda")
    with pytest.raises(ConfigError, match="2 rows of the gradients hold NaN"):
        table.apply_gradients(ids, bad).as_op()
    assert table.size() == 0
    table.apply_gradients(ids, torch.ones(3, 1, device=device)).as_op()
    skipping = shoal.HashTable(
        1, optimizer=shoal.Sgd(lr=1.0), initializer="zeros", device="cuda", on_bad_gradient="skip"
    )
    skipping.apply_gradients(ids, bad)
    assert skipping.size() == 1
    assert skipping.skipped_gradients == 2
    assert skipping.lookup(ids).view(-1).tolist() == [-1, 0, 0]


def test_gradients_that_are_skipped_while_the_count_is_read_are_counted(device, monkeypatch):
    table = shoal.HashTable(2, device="cuda", on_bad_gradient="skip")
    ids, bad = torch.tensor([1], device=device), torch.full((1, 2), float("nan"), device=device)
    read = torch.Tensor.__int__

    def read_then_write(tensor):  # as if another thread wrote
        monkeypatch.undo()
        number = read(tensor)
        table.apply_gradients(ids, bad)
        return number

    table.apply_gradients(ids, bad)
    monkeypatch.setattr(torch.Tensor, "__int__", read_then_write)
    assert table.skipped_gradients == 1
    assert table.skipped_gradients == 2
    table.skipped_gradients = 0
    table.apply_gradients(ids, bad)
    assert table.skipped_gradients == 1


def test_empty_batches_are_legal(device):
    table = shoal.HashTable(3, device="cuda")
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert table.lookup(none).shape == (0, 3)
    table.assign(none, torch.empty(0, 3, device=device), req_time=5)
    table.apply_gradients(none, torch.empty(0, 3, device=device), enable_dedup=True, req_time=4)
    assert table.erase(none) == 0
    assert table.reinitialize(none)[1].shape == (0,)
    assert table.lookup_entry(none) == []
    assert table.max_update_time == 5
    assert table.size() == 0


def test_wrong_arguments_are_refused_before_any_effect(device):
    table = shoal.HashTable(3, device="cuda", name="t")
    ids = torch.tensor([1, 2], device=device)
    values = torch.ones(2, 3, device=device)
    with pytest.raises(ConfigError, match=r"'t': ids must be int64 or narrower integers, got torch.float32"):
        table.lookup(ids.float())
    with pytest.raises(ConfigError, match=r"'t': values of 2 ids must be \[2, 3\], got shape \[2, 2\]"):
        table.assign(ids, values[:, :2])
    with pytest.raises(ConfigError, match="float32, got torch"):
        table.assign(ids, values.double())
    with pytest.raises(ConfigError, match="req_time"):
        table.assign(ids, values, -1)
    with pytest.raises(ConfigError, match="must be a dense"):
        table.lookup(ids.to_sparse())
    with pytest.raises(UnsupportedError, match="CPU tables"):
        _ = table._native
    with pytest.raises(ConfigError, match="device must be 'cpu' or 'cuda', got 'xpu'"):
        shoal.HashTable(3, device="xpu")
    assert table.size() == 0


def test_entries_are_those_of_the_cpu(device):
    cpu, gpu = pair(2, shoal.Adam(lr=0.1))
    ids, grads = torch.tensor([3, 4, 5]), torch.ones(3, 2)
    cpu.apply_gradients(ids, grads, req_time=9)
    gpu.apply_gradients(ids.to(device), grads.to(device), req_time=9)
    asked = torch.tensor([4, 7, 3])
    for mine, theirs in zip(gpu.lookup_entry(asked.to(device)), cpu.lookup_entry(asked), strict=True):
        a, b = EntryDump.FromString(mine), EntryDump.FromString(theirs)
        assert list(a.num) == pytest.approx(list(b.num), abs=1e-6)
        assert a.last_update_ts_sec == b.last_update_ts_sec
        assert (mine == b"") == (theirs == b"")
        if mine:
            assert list(a.opt.dump[0].adam.v) == pytest.approx(list(b.opt.dump[0].adam.v), abs=1e-6)


def test_threads_may_read_write_and_evict_at_once(device):
    table = shoal.HashTable(2, optimizer="sgd", initializer="zeros", device="cuda", expire_after="1d")
    table.reserve(200)

    def work(number):
        ids = torch.arange(number * 20, number * 20 + 20, device=device)
        for time in (1, 200_000):
            table.assign(ids, torch.full((20, 2), float(number), device=device), time)
            table.evict(100)
        return bool((table.lookup(ids) == number).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4), timeout=100))
    assert table.size() == 80


def test_its_memory_goes_with_its_last_user(device):
    """No cycle keeps a table, and so gigabytes of a GPU, until the collector comes by."""
    gc.collect()
    gc.disable()
    try:
        table = shoal.HashTable(2, optimizer="sgd", device="cuda")
        ids = torch.arange(4, device=device)
        fused_apply_gradient([table], ids, None, [4], torch.ones(8, device=device), None, None, [0.1], 5, 0, 1)
        table.changes.begin_epoch()
        group = weakref.ref(table._storage)
        del table
        assert group() is None
    finally:
        gc.enable()


def test_tables_of_several_kinds_by_slot(device):
    slots = {
        "a": config([(2, ZerosInitializer(), SgdOptimizer())], [1.0]),
        "b": config([(3, RandomUniformInitializer(), SgdOptimizer())], [1.0]),
        "c": config([(2, ZerosInitializer(), SgdOptimizer())], [1.0]),
    }
    for kind in (MultiTypeHashTable, MergedMultiTypeHashTable):
        tables = []
        for d in ("cpu", "cuda"):
            build = lambda name, made, d=d: HashTable.from_config(made, name=name, seed=1, device=d)  # noqa: E731
            one = kind is MultiTypeHashTable
            tables.append(kind(slots, build if one else lambda made, b=build: MultiTypeHashTable(made, b)))
        for table, at in zip(tables, ("cpu", device), strict=True):
            ids = torch.tensor([1, 2, 1], device=at)
            table.assign({"a": (ids, torch.ones(3, 2, device=at))}, 5)
            table.apply_gradients({s: (ids, torch.ones(3, d, device=at)) for s, d in (("a", 2), ("b", 3), ("c", 2))})
        asked = torch.arange(4)
        here, there = (t.lookup({s: asked.to(d) for s in "abc"}) for t, d in zip(tables, ("cpu", device), strict=True))
        for slot in slots:
            torch.testing.assert_close(there[slot].cpu(), here[slot])


def test_a_batch_that_is_kept_out_or_refused_leaves_scales_noise_and_filter_alone(device):
    def make(on):
        thresholds = SlotOccurrenceThresholdConfig(default_occurrence_threshold=1)
        made = config([(2, ZerosInitializer(), SgdOptimizer(), OneBitCompressor())], [1.0])
        counts = create_hash_filter(1000, 7, thresholds.SerializeToString())
        return HashTable.from_config(made, name="t", hash_filter=counts, seed=1, device=on)

    bad, good = torch.tensor([[1.0, float("nan")]]), torch.ones(1, 2)
    for table, at in ((make("cpu"), "cpu"), (make("cuda"), device)):
        before = table._host.scales()
        one = torch.tensor([1], device=at)
        with pytest.raises(ConfigError, match="nothing was applied"):
            table.apply_gradients(one, bad.to(at), 600).as_op()
        table.apply_gradients(one, good.to(at), 600)  # counts as the first occurrence: not admitted
        assert table.size() == 0
        assert table._host.scales() == before
        assert table._host.calls() == 0
        table.apply_gradients(one, good.to(at), 600)
        assert table.size() == 1
        assert table._host.scales() != before
        assert table._host.calls() == 1


@pytest.mark.parametrize("tables", [1, 2, 10, 64, 65, 1000, 4000])
def test_the_addresses_of_any_number_of_tables_fit(tables):
    slots, cells = most_slots(tables)
    assert tables * (12 * slots + 12 * cells) <= 1 << 44  # of 2**47 in all
    assert cells >= stash_cells(slots // 8)
    if tables <= 128:  # one table can have all rows of a group
        buckets = 1 << ((1 << 30) * 4 // 3 // 8 - 1).bit_length()
        assert slots >= (buckets + 1) * 8


def test_the_last_rows_take_no_more_memory_than_they_need(device, monkeypatch):
    if device.type == "cuda":
        pytest.skip("a device grows by pages, which are larger than this table")
    table = shoal.HashTable(2, optimizer="sgd", initializer="zeros", device="cuda")
    words, asked = table._storage.arena.words, []
    stride, grow = table._storage.layout.stride, words.grow

    def nearly_full(part, elements):
        asked.append(elements)
        if elements > 700 * stride:
            raise CapacityError("0 of 1 MiB free")
        grow(part, elements)

    monkeypatch.setattr(words, "grow", nearly_full)
    for begin, count in ((0, 450), (600, 200)):  # more would double it
        ids = torch.arange(begin, begin + count, device=device)
        table.assign(ids, torch.ones(count, 2, device=device))
    assert len(table) == 650
    assert max(asked) > 700 * stride


def test_a_slice_of_columns_begins_with_the_slice_of_initial_rows(device):
    from shoal.table.config.options import config_of_options

    ids = torch.arange(5, device=device) * 77
    rows = {}
    for first, dim in ((0, 8), (3, 5)):
        config = config_of_options("t", dim, optimizer="sgd", initializer="uniform", expire_after=None, lr=0.0)
        for at in ("cpu", "cuda"):
            table = shoal.HashTable.from_config(config, name="t", seed=9, device=at, first_column=first)
            there = ids.cpu() if at == "cpu" else ids
            rows[at, first] = table.lookup(there, insert_missing=True).cpu()
            table.apply_gradients(there + 1, torch.ones(5, dim, device=there.device))  # creates rows, moves none
            rows[at, first, "made"] = table.lookup(there + 1).cpu()
    for what in ((), ("made",)):
        for at in ("cpu", "cuda"):
            torch.testing.assert_close(rows[(at, 3, *what)], rows[("cpu", 0, *what)][:, 3:], rtol=1e-6, atol=1e-8)
