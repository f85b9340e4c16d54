"""Several tables: fused operations, multi-type, merged and native multi tables."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal import Ragged, table
from shoal.table import (
    AdagradOptimizer,
    CombineAsSegment,
    ConstantsInitializer,
    EmbeddingHashTableConfig,
    EntryConfig,
    EntryDump,
    FtrlOptimizer,
    HashTableConfigInstance,
    MergedMultiTypeHashTable,
    MultiHashTable,
    MultiTypeHashTable,
    PolynomialDecay,
    SgdOptimizer,
    SlidingHashFilter,
    SlotOccurrenceThresholdConfig,
    ZerosInitializer,
    convert_to_cached_config,
    fused_apply_gradient,
    fused_lookup,
    hash_table_from_config,
    hash_table_lookup_gradient,
)
from shoal.table.reference import ReferenceTable


@pytest.fixture(autouse=True)
def fresh_registry():
    table.reset_registry()
    yield
    table.reset_registry()


def config(dim, rate=1.0, optimizer=None, initializer=None, **fields):
    segment = CombineAsSegment(dim, initializer or ZerosInitializer(), optimizer or SgdOptimizer())
    message = EmbeddingHashTableConfig(
        entry_config=EntryConfig(segments=[segment]), cuckoo=table.CuckooEmbeddingHashTableConfig(), **fields
    )
    return HashTableConfigInstance(message, [rate])


def factory(name, instance):
    return hash_table_from_config(instance, name_suffix=name)


def ids(*values):
    return torch.tensor(values, dtype=torch.int64)


def pair():
    """Tables a (dim 3) and b (dim 2)."""
    return [factory("a", config(3)), factory("b", config(2, 0.5, AdagradOptimizer()))]


# --- fused -----------------------------------------------------------------------------------------------------------


def test_fused_worked_example_f():
    tables = pair()
    tables[0].assign(ids(1, 2), torch.tensor([[1.0, 2, 3], [4, 5, 6]]))
    tables[1].assign(ids(1, 7), torch.tensor([[10.0, 20], [70, 71]]))
    asked = ids(1, 2, 7, 1, 9, 7)
    rows, splits, id_offsets, offsets, indices = fused_lookup(tables, asked, torch.tensor([2, 1, 0, 3]).int(), 2)
    assert rows.tolist() == [1, 2, 3, 4, 5, 6, 70, 71, 10, 20, 0, 0, 70, 71]
    assert (splits.tolist(), splits.dtype) == ([8, 6], torch.int32)
    assert (id_offsets.tolist(), id_offsets.dtype) == ([0, 2, 3, 3, 6], torch.int32)
    assert (offsets.tolist(), offsets.dtype) == ([0, 6, 8, 8, 14], torch.int32)
    assert torch.equal(indices, asked)


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans())
def test_fused_gradients_do_what_single_ones_do_block_by_block(data, k, shards, dedup, filtered):
    table.reset_registry()
    optimizers = [SgdOptimizer(), AdagradOptimizer(), FtrlOptimizer(l1_regularization=0.1)]
    instances = [config(2 * i + 1, 0.1 * (i + 1), optimizers[i]) for i in range(k)]
    thresholds = SlotOccurrenceThresholdConfig(default_occurrence_threshold=1) if filtered else b""
    shared, of_reference = SlidingHashFilter(1000, 5, thresholds), SlidingHashFilter(1000, 5, thresholds)
    ours = [hash_table_from_config(c, shared, str(i)) for i, c in enumerate(instances)]
    reference = [ReferenceTable(c, of_reference) for c in instances]
    for step in range(3):
        sizes = data.draw(st.lists(st.integers(0, 5), min_size=k * shards, max_size=k * shards))
        asked = data.draw(st.lists(st.integers(-3, 3), min_size=sum(sizes), max_size=sum(sizes)))
        dims = [2 * (block % k) + 1 for block in range(k * shards)]
        floats = sum(n * d for n, d in zip(sizes, dims, strict=True))
        grads = torch.randn(floats, generator=torch.Generator().manual_seed(step))
        slot_size = torch.tensor(sizes, dtype=torch.int32)
        _, _, id_offsets, offsets, indices = fused_lookup(ours, ids(*asked), slot_size, shards)
        rates = torch.cat([c.call_learning_rate_fns(step) for c in instances])
        fused_apply_gradient(
            ours, ids(*asked), indices, slot_size, grads, id_offsets, offsets, rates, 5, step, shards, dedup
        )
        at = place = 0
        for block, (n, dim) in enumerate(zip(sizes, dims, strict=True)):
            part = grads[place : place + n * dim]
            reference[block % k].apply_gradients(asked[at : at + n], part, step, enable_dedup=dedup, req_time=5)
            at, place = at + n, place + n * dim
    everything = torch.arange(-3, 4)
    for mine, theirs in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine.lookup(everything), theirs.lookup(everything), rtol=1e-5, atol=1e-6)
        assert mine.size() == theirs.size()
        assert mine.max_update_time == theirs.max_update_time == 5


def test_calls_that_are_cut_alike_get_tensors_of_their_own():
    tables = [shoal.HashTable(dim, optimizer="sgd", name=f"alike{dim}") for dim in (1, 2)]
    sizes = torch.tensor([1, 0, 0, 2]).int()
    first = fused_lookup(tables, ids(1, 2, 3), sizes, 2)
    for told in first[1:4]:
        told.zero_()
    assert [told.tolist() for told in fused_lookup(tables, ids(4, 5, 6), sizes, 2)[1:4]] == [
        [1, 4], [0, 1, 1, 1, 3], [0, 1, 1, 1, 5],
    ]  # fmt: skip


def test_no_tables_at_all():
    for shards in (2, 3):
        rows, splits, id_offsets, offsets, _ = fused_lookup([], ids(), torch.tensor([]).int(), shards)
        assert rows.numel() == 0
        assert splits.tolist() == [0] * shards
        assert id_offsets.tolist() == offsets.tolist() == [0]


def test_fused_calls_refuse_what_does_not_add_up_and_change_nothing():
    tables = pair()
    good = torch.tensor([1, 1]).int()
    for sizes, shards in ((torch.tensor([1, 2]).int(), 1), (torch.tensor([1]).int(), 1), (torch.tensor([3, -1]), 1)):
        with pytest.raises(ValueError, match="fused_slot_size"):
            fused_lookup(tables, ids(1, 2), sizes, shards)
    with pytest.raises(ValueError, match="num_of_shards"):
        fused_lookup(tables, ids(), torch.tensor([]).int(), 0)

    def apply(grads=None, rates=(1.0, 1.0), offsets=None, req_time=0, step=0):
        grads = torch.ones(5) if grads is None else grads
        fused_apply_gradient(tables, ids(1, 2), ids(1, 2), good, grads, offsets, None, rates, req_time, step, 1)

    bad = torch.ones(5)
    bad[4] = float("nan")
    for arguments, words in (
        ({"grads": torch.ones(4)}, "id_grads"),
        ({"grads": bad}, "NaN"),
        ({"rates": [1.0]}, "must have 2 rates, one per segment"),
        ({"rates": [1.0, float("inf")]}, "rate"),
        ({"offsets": torch.tensor([0, 0, 2])}, "id_offsets"),
        ({"req_time": -1}, "req_time"),
    ):
        with pytest.raises(ValueError, match=words):
            apply(**arguments)
    assert [t.size() for t in tables] == [0, 0]
    apply()
    assert [t.size() for t in tables] == [1, 1]


def test_offsets_that_do_not_fit_int32_are_refused_before_memory_is_taken():
    wide = shoal.HashTable(1 << 24, optimizer="sgd", name="wide")
    n = (1 << 31) // wide.dim_size
    with pytest.raises(ValueError, match=r"table 'wide': 2147483648 floats do not fit int32"):
        fused_lookup([wide], torch.arange(n), torch.tensor([n], dtype=torch.int32), 1)


def test_an_id_from_two_shards_makes_two_steps_in_shard_order():
    t = factory("a", config(1, 0.5, AdagradOptimizer()))
    for accumulate in (False, True):
        t.clear()
        sizes = torch.tensor([1, 1]).int()
        fused_apply_gradient(
            [t], ids(5, 5), None, sizes, torch.tensor([2.0, 1.0]), None, None, [0.5], None, 0, 2, accumulate
        )
        assert t.lookup(ids(5)).item() == pytest.approx(-0.7152685, abs=1e-6)
    fused_apply_gradient(
        [t.clear()], ids(5, 5), None, torch.tensor([2]), torch.tensor([2.0, 1.0]), None, None, [0.5], None, 0, 1, True
    )
    assert t.lookup(ids(5)).item() == pytest.approx(-0.4972452, abs=1e-6)


def test_lookup_gradient_spreads_rows_over_their_ids():
    where = torch.tensor([[0, 0], [0, 1], [1, 0]])
    got, grads = hash_table_lookup_gradient(where, ids(7, 8, 7), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert got.tolist() == [7, 8, 7]
    assert grads.tolist() == [[1, 2], [1, 2], [3, 4]]
    with pytest.raises(ValueError, match=r"in \[0, 2\), got 2"):
        hash_table_lookup_gradient(torch.tensor([[2, 0]]), ids(7), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="id_indices"):
        hash_table_lookup_gradient(torch.tensor([[0, 0]]), ids(7, 8), torch.zeros(2, 1))


def test_slots_of_entries():
    entries = [EntryDump(id=value).SerializeToString() for value in (-1, 5, (3 << 48) | 9)]
    slots = table.extract_slot_from_entry(entries)
    assert (slots.tolist(), slots.dtype) == ([32767, 0, 3], torch.int32)
    assert table.extract_slot_from_entry(entries, fid_v2=False).tolist() == [1023, 0, 0]
    assert table.extract_slot_from_entry([]).tolist() == []
    with pytest.raises(ValueError, match="entry 1"):
        table.extract_slot_from_entry([entries[0], b"\xff\xff\xff"])


# --- multi-type ------------------------------------------------------------------------------------------------------


def test_multi_type_orders_slots_by_name_and_touches_only_what_is_named():
    t = MultiTypeHashTable({"b": config(2), "a": config(1, 0.5)}, factory)
    assert t.get_table_dim_sizes() == [1, 2]
    t.assign_add({"b": (ids(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))}, 7)
    t.apply_gradients({"a": (ids(1), torch.tensor([[2.0]])), "b": (ids(1), torch.ones(1, 2))}, 0, req_time=9)
    found = t.lookup({"b": ids(1, 2, 3), "a": ids(1)})
    assert found["b"].tolist() == [[0, 1], [3, 4], [0, 0]]
    assert found["a"].tolist() == [[-1]]
    assert t.tables["a"].max_update_time == 9
    assert t.size() == 3
    rows = t.fused_lookup(ids(1, 2), torch.tensor([1, 1]).int(), 1)[0]
    assert rows.tolist() == [-1, 3, 4]
    t.fused_apply_gradient(ids(1, 2), None, torch.tensor([1, 1]).int(), torch.ones(3), None, None, 0, 20, 1)
    assert t.lookup({"a": ids(1), "b": ids(2)})["b"].tolist() == [[2, 3]]
    assert t.tables["b"].max_update_time == 20
    assert t.reinitialize("a", ids(1, 4))[1].tolist() == [1, 0]
    assert t.reinitialize("c", ids(1, 4))[1].tolist() == [-1, -1]


def test_multi_type_rejects_unknown_slots_and_bad_writes_as_a_whole():
    t = MultiTypeHashTable({"a": config(1), "b": config(2)}, factory)
    good = (ids(1), torch.ones(1, 1))
    for call in (t.assign, t.assign_add, lambda writes: t.apply_gradients(writes, 0)):
        with pytest.raises(KeyError, match="nope"):
            call({"a": good, "nope": good})
        with pytest.raises(ValueError, match=r"values|grads"):
            call({"a": good, "b": good})
    with pytest.raises(KeyError, match="nope"):
        t.lookup({"nope": ids(1)})
    with pytest.raises(ValueError, match="NaN"):
        t.apply_gradients({"a": good, "b": (ids(1), torch.tensor([[1.0, float("nan")]]))}, 0)
    with pytest.raises(ValueError, match="req_time"):
        t.apply_gradients({"a": good}, 0, req_time=-1)
    assert t.size() == 0


# --- merged ----------------------------------------------------------------------------------------------------------


def merged(configs):
    return MergedMultiTypeHashTable(configs, lambda by_name: MultiTypeHashTable(by_name, factory))


def test_merged_names_are_md5_of_the_members():
    t = merged({"shop": config(2), "price": config(2), "fc_slot_3": config(3)})
    assert t.slot_mapping == {
        "price": "c4994ee36e1c818429b92da2af0d9b38",
        "shop": "c4994ee36e1c818429b92da2af0d9b38",
        "fc_slot_3": "1cc202e2a6834a029ebbf8c1dfb0177c",
    }
    tables = t.table.tables
    assert tables["1cc202e2a6834a029ebbf8c1dfb0177c"].extra_restore_names == ["af5bbe003827b45d95a8e6a6c55ec030"]
    assert tables["c4994ee36e1c818429b92da2af0d9b38"].extra_restore_names == []
    assert t.get_table_dim_sizes() == [3, 2]


def test_merging_goes_by_configuration_and_rates():
    schedule = {"a": config(2, PolynomialDecay(0.5, 8)), "b": config(2, PolynomialDecay(0.5, 8))}
    assert len(set(merged(schedule).slot_mapping.values())) == 1
    lambdas = {"c": config(2, lambda: 1.0), "d": config(2, lambda: 1.0)}
    assert len(set(merged(lambdas).slot_mapping.values())) == 2


def test_merged_slots_share_rows_and_duplicates_are_steps():
    t = merged({"b": config(1, 0.5, AdagradOptimizer()), "a": config(1, 0.5, AdagradOptimizer())})
    t.apply_gradients({"b": (ids(5), torch.tensor([[1.0]])), "a": (ids(5), torch.tensor([[2.0]]))}, 0)
    found = t.lookup({"b": ids(5, 6), "a": ids(5)})
    assert found["a"].item() == pytest.approx(-0.7152685, abs=1e-6)  # a's gradient first
    assert found["b"].flatten().tolist() == [found["a"].item(), 0]
    t.assign({"b": (ids(6), torch.tensor([[3.0]]))}, 3)
    t.assign_add({"a": (ids(6), torch.tensor([[1.0]]))})
    assert t.lookup({"b": ids(6)})["b"].tolist() == [[4]]
    again = merged({"x": config(1, 0.5, AdagradOptimizer()), "y": config(1, 0.5, AdagradOptimizer())})
    again.apply_gradients({"x": (ids(5), torch.tensor([[2.0]])), "y": (ids(5), torch.ones(1, 1))}, 0, enable_dedup=True)
    assert again.lookup({"x": ids(5)})["x"].item() == pytest.approx(-0.4972452, abs=1e-6)
    with pytest.raises(NotImplementedError):
        t.reinitialize("a", ids(1))
    with pytest.raises(KeyError, match="nope"):
        t.lookup({"nope": ids(1)})


def test_merged_in_front_of_a_synchronous_table_hands_packs_on():
    class Synchronous:
        """Answers with the rows of the pack, as an all-to-all table does, one batch late."""

        def __init__(self, configs):
            self.names, self.given, self.waiting = list(configs), None, None

        def lookup(self, slot_to_id, auxiliary_bundle, early_reorder_indicies_res_pack):
            assert sorted(slot_to_id) == self.names
            previous, self.waiting = self.waiting, (dict(auxiliary_bundle), early_reorder_indicies_res_pack)
            bundle, pack = previous or self.waiting
            return dict(zip(self.names, pack, strict=True)), dict(bundle)

        def apply_gradients(self, slot_to_grad, auxiliary_bundle, global_step, req_time=None, scale=1):
            self.given = slot_to_grad, auxiliary_bundle, global_step, req_time, scale

    t = MergedMultiTypeHashTable({"a": config(1), "b": config(1)}, Synchronous)
    (name,) = set(t.slot_mapping.values())
    found, bundle = t.lookup({"a": None, "b": None}, {"mine": 1}, ({name: [2, 1]}, [torch.tensor([[1.0], [2], [3]])]))
    assert {slot: rows.tolist() for slot, rows in found.items()} == {"a": [[1], [2]], "b": [[3]]}
    assert bundle == {"mine": 1}
    found, _ = t.lookup({"a": None, "b": None}, {}, ({name: [0, 1]}, [torch.tensor([[9.0]])]))
    assert [len(found["a"]), len(found["b"])] == [2, 1]  # the sizes of this batch
    t.apply_gradients({"b": torch.ones(1, 1), "a": torch.zeros(2, 1)}, bundle, 3, scale=2, skip_merge_id=True)
    grads, *rest = t.table.given
    assert grads[name].tolist() == [[0], [0], [1]]
    assert rest == [{"mine": 1}, 3, None, 2]


# --- native multi ----------------------------------------------------------------------------------------------------


def multi(**more):
    return MultiHashTable.from_configs({"b": config(2, 0.5), "a": config(1, 2.0)}, **more)


def test_multi_table_reads_and_writes_by_name_with_each_tables_own_rate():
    t = multi(name_suffix="x")
    assert t.name == "MonolithMultiHashTable_x"
    t.apply_gradients({"b": (ids(1), torch.ones(1, 2)), "a": (ids(1, 1), torch.ones(2, 1))}, 0, 50)
    assert {name: rows.tolist() for name, rows in t.lookup({"a": ids(1), "b": ids(1, 2), "c": ids(3)}).items()} == {
        "a": [[-4]],
        "b": [[-0.5, -0.5], [0, 0]],
    }
    t.assign({"a": (ids(9), torch.ones(1, 1))}, 60).assign_add({"a": (ids(9), torch.ones(1, 1))}, req_time=70)
    assert t.lookup({"a": ids(9)})["a"].item() == 2
    assert [part.max_update_time for part in t.tables.values()] == [70, 70]
    assert t.reinitialize("a", ids(9, 10))[1].tolist() == [1, 0]
    assert t.reinitialize("zzz", ids(9, 10))[1].tolist() == [-1, -1]
    assert t.size() == 4
    assert MultiHashTable.from_proto(t.to_proto()) is t
    assert list(t.to_proto().dims) == [1, 2]
    with pytest.raises(ValueError, match="exists"):
        multi(name_suffix="x")


def test_multi_table_write_to_an_unknown_name_changes_nothing():
    t = multi()
    good = (ids(1), torch.ones(1, 1))
    for call in (t.assign, t.assign_add, t.apply_gradients):
        with pytest.raises(KeyError, match="zzz"):
            call({"a": good, "zzz": good}, req_time=9)
        with pytest.raises(ValueError):
            call({"a": good, "b": good}, req_time=9)
    with pytest.raises(ValueError, match="NaN"):
        t.apply_gradients({"a": good, "b": (ids(1), torch.tensor([[float("nan"), 0]]))}, 0)
    assert t.size() == 0
    assert [part.max_update_time for part in t.tables.values()] == [0, 0]


def test_raw_interface_round_trip():
    t = multi()
    asked = t.get_ragged_id({"b": ids(1, 2), "zzz": ids(5)})
    assert (asked.values.tolist(), asked.row_splits.tolist()) == ([1, 2], [0, 0, 2])
    t.raw_assign(asked, t.get_flat_value({"b": torch.tensor([[1.0, 2], [3, 4]])}), 5)
    t.raw_apply_gradients((ids(8, 1), torch.tensor([0, 1, 2])), torch.tensor([1.0, 2, 2]), 0, req_time=6)
    flat = t.raw_lookup((ids(8, 1, 2), torch.tensor([0, 1, 3])))
    assert flat.tolist() == [-2, 0, 1, 3, 4]
    found = t.get_embeddings((ids(8, 1, 2), torch.tensor([0, 1, 3])), flat)
    assert {name: rows.tolist() for name, rows in found.items()} == {"a": [[-2]], "b": [[0, 1], [3, 4]]}
    assert t.get_embeddings(t.get_ragged_id({}), torch.empty(0))["b"].shape == (0, 2)
    with pytest.raises(KeyError, match="zzz"):
        t.get_flat_value({"zzz": torch.ones(1)})
    for rows in ([[1], [2], [3]], []):
        with pytest.raises(ValueError, match=f"a positive multiple of 2 rows of ids, got {len(rows)}"):
            t.raw_lookup(Ragged.from_lists(rows))
    with pytest.raises(ValueError, match="elements"):
        t.raw_assign(asked, torch.ones(3))


def test_raw_lookup_of_glued_requests_is_request_major():
    t = multi()
    t.assign({"a": (ids(1, 2), torch.tensor([[1.0], [2.0]])), "b": (ids(1, 2), torch.tensor([[10.0, 11], [20, 21]]))})
    requests = Ragged.from_lists([[1], [2, 1], [2], [], [2, 1], [1]])
    expected = [1, 20, 21, 10, 11, 2, 2, 1, 10, 11]
    assert t.raw_lookup(requests).tolist() == expected


def test_cached_config_builds_equal_tables_and_lends_the_first_expiry():
    days = table.SlotExpireTimeConfig(default_expire_time=3)
    cached = convert_to_cached_config({"b": config(2, slot_expire_time_config=days), "a": config(1), "c": config(1)})
    assert table.MultiEmbeddingHashTableConfig.FromString(cached.serialized).names == ["a", "b", "c"]
    assert cached.dims == [1, 2, 1]
    one = MultiHashTable.from_cached_config(cached, name_suffix="0")
    two = MultiHashTable.from_cached_config(cached, name_suffix="1")
    assert one.table_names == two.table_names == ["a", "b", "c"]
    one.assign({"a": (ids(1), torch.ones(1, 1))}, 0)
    assert one.evict(3 * 86400) == 1
    assert cached.configs["a"].table_config.HasField("slot_expire_time_config") is False


def test_tables_of_a_multi_table_share_the_filter():
    thresholds = SlotOccurrenceThresholdConfig(default_occurrence_threshold=1)
    t = multi(hash_filter=SlidingHashFilter(1000, 5, thresholds))
    t.assign_add({"a": (ids(1), torch.ones(1, 1))})
    assert t.size() == 0
    t.assign_add({"b": (ids(1), torch.ones(1, 2))})  # seen once, in the other table
    assert t.size() == 1


def test_multi_table_fused_calls_follow_the_sorted_names():
    t = MultiHashTable.from_configs(
        {"b": config(2, 0.5, initializer=ConstantsInitializer(1.0)), "a": config(1, 2.0)}, name_suffix="f"
    )
    sizes = torch.tensor([1, 1, 0, 1]).int()
    t.fused_apply_gradient(ids(1, 1, 1), None, sizes, torch.tensor([1.0, 2, 2, 2, 2]), None, None, 0, 9, 2)
    rows, splits, *_ = t.fused_lookup(ids(1, 1, 1), sizes, 2)
    assert rows.tolist() == [-2, -1, -1, -1, -1]
    assert splits.tolist() == [3, 2]
    entry = EntryDump.FromString(t.lookup_entry({"b": ids(1)})["b"][0])
    assert list(entry.num) == [-1, -1]
    assert entry.last_update_ts_sec == 9


def test_several_tables_give_float32_on_the_cpu_whatever_torchs_defaults():
    asked = torch.tensor([1, 2], device="cpu")
    values = torch.tensor([[1.0, 2], [3, 4]], dtype=torch.float32, device="cpu")
    multi = MultiHashTable.from_configs({"b": config(2), "a": config(2)}, name_suffix="m")
    merged = MergedMultiTypeHashTable(
        {"x": config(2), "y": config(2)}, lambda configs: MultiTypeHashTable(configs, factory)
    )
    with torch.device("meta"):  # as in `with torch.device("cuda")`; tensors on it have no values
        multi.assign({"a": (asked, values)}).apply_gradients({"a": (asked, values), "b": ([1], [[1.0, 1.0]])}, 0)
        assert {name: rows.tolist() for name, rows in multi.lookup({"a": asked, "b": [1]}).items()} == {
            "a": [[0, 0], [0, 0]],
            "b": [[-1, -1]],
        }
        assert multi.raw_lookup((asked, torch.tensor([0, 1, 2], device="cpu"))).tolist() == [0, 0, 0, 0]
        assert multi.raw_lookup(([1, 1], [0, 1, 2])).tolist() == [0, 0, -1, -1]
        rows, splits, id_offsets, offsets, _ = multi.fused_lookup(asked, [1, 1], 1)
        multi.fused_apply_gradient(asked, asked, [1, 1], rows, id_offsets, offsets, 0, None, 1)
        assert (splits.tolist(), offsets.tolist()) == ([4], [0, 2, 4])
        merged.assign({"x": (asked, values), "y": ([3], [[5.0, 6.0]])})
        assert merged.lookup({"x": [3], "y": asked})["x"].tolist() == [[5, 6]]
