"""`HashTable`: worked examples, bad input, a state machine against the reference, threads."""

import itertools
import tempfile
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch._subclasses.fake_tensor import FakeTensorMode

import shoal
from shoal import table
from shoal.table import (
    AdagradOptimizer,
    CombineAsSegment,
    ConstantsInitializer,
    EntryConfig,
    EntryDump,
    Fp32Compressor,
    HashTable,
    MultiHashTable,
    SgdOptimizer,
    SlidingHashFilter,
    SlotExpireTimeConfig,
    SlotOccurrenceThresholdConfig,
    TouchedKeySet,
    ZerosInitializer,
    hash_table_from_config,
)
from shoal.table.eviction import BackgroundEviction
from shoal.testing.tables import Pair, instance, instances, rows


@pytest.fixture(autouse=True)
def fresh_registry_and_threads():
    table.reset_registry()
    threads = shoal.num_threads()
    yield
    shoal.set_num_threads(threads)
    table.reset_registry()


def ids(*values):
    return torch.tensor(values, dtype=torch.int64)


def one(dim=1, rate=1.0, optimizer=None, initializer=None, compressor=None, serving=False, name="one", **fields):
    options = {key: fields.pop(key) for key in ("hash_filter", "on_bad_gradient", "seed") if key in fields}
    segment = CombineAsSegment(dim, initializer or ZerosInitializer(), optimizer or SgdOptimizer(), compressor)
    config = instance([segment], [rate], **fields)
    if serving:
        config.table_config.entry_config.entry_type = EntryConfig.SERVING
    return HashTable.from_config(config, name=name, **options)


# --- worked examples -------------------------------------------------------------------------------------------------


def test_example_a_sgd_with_duplicates():
    t = one(2, 0.5)
    assert t.assign_add(ids(7, 8), torch.tensor([[1.0, 2], [3, 4]])) is t
    assert t.lookup(ids(8, 9, 7)).tolist() == [[3, 4], [0, 0], [1, 2]]
    assert t.size() == 2
    t.apply_gradients(ids(7, 7, 9), torch.tensor([[1.0, 1], [1, 1], [2, 2]]), 0)
    assert t.lookup(ids(7, 9)).tolist() == [[0, 1], [-1, -1]]
    assert t.size() == 3
    assert t.contains(ids(7, 8, 10)).tolist() == [True, True, False]


@pytest.mark.parametrize(("dedup", "weight", "norm"), [(False, -0.7152685, 5.1), (True, -0.4972452, 9.1)])
def test_example_b_duplicates_are_steps_unless_deduplicated(dedup, weight, norm):
    t = one(1, 0.5, AdagradOptimizer())
    t.apply_gradients(ids(5, 5), torch.tensor([[2.0], [1.0]]), 0, enable_dedup=dedup)
    assert t.lookup(ids(5)).item() == pytest.approx(weight, abs=1e-6)
    entry = EntryDump.FromString(t.lookup_entry(ids(5))[0])
    assert entry.opt.dump[0].adagrad.norm[0] == pytest.approx(norm, abs=1e-6)
    assert not entry.HasField("id")
    assert t.lookup_entry(ids(6)) == [b""]


def test_example_c_constants():
    t = one(initializer=ConstantsInitializer(0.25))
    assert t.lookup(ids(1)).item() == 0
    assert t.assign_add(ids(1), torch.ones(1)).lookup(ids(1)).item() == 1.25
    assert t.apply_gradients(ids(2), torch.tensor([0.5]), 0).lookup(ids(2)).item() == -0.25
    same, status = t.reinitialize(ids(1, 3))
    assert same is t
    assert (status.tolist(), status.dtype) == ([1, 0], torch.int32)
    assert t.lookup(ids(1, 2, 3)).flatten().tolist() == [0.25, -0.25, 0.25]
    assert t.reinitialize(ids(4, 4))[1].tolist() == [0, 1]


def test_example_d_threshold():
    t = table.test_hash_table(1, enable_hash_filter=True, occurrence_threshold=2)
    t.apply_gradients(ids(9, 9, 9), torch.ones(3, 1), 0)
    assert t.lookup(ids(9)).item() == -1
    t = table.test_hash_table(1, enable_hash_filter=True, occurrence_threshold=2)
    t.apply_gradients(ids(9, 9, 9), torch.ones(3, 1), 0, enable_dedup=True)
    assert t.size() == 0
    t.apply_gradients(ids(9), torch.ones(1, 1), 0, enable_dedup=True)
    assert t.lookup(ids(9)).item() == -1


def test_example_e_stale_rows_leave_by_eviction():
    t = one(slot_expire_time_config=SlotExpireTimeConfig(default_expire_time=2))
    for key, now in ((1, 827200), (2, 827201), (3, 1000000)):
        t.assign(ids(key), torch.ones(1), now)
    assert t.evict(1000000) == 1
    assert t.contains(ids(1, 2, 3)).tolist() == [False, True, True]


def test_expiry_zero_makes_everything_stale_and_overrides_go_by_slot():
    expiry = SlotExpireTimeConfig(default_expire_time=1, slot_expire_times=[{"slot": 32767, "expire_time": 0}])
    t = one(slot_expire_time_config=expiry)
    t.assign(ids(-1, 1), torch.ones(2), 50)
    assert t.evict(50) == 1
    assert t.contains(ids(-1, 1)).tolist() == [False, True]
    assert t.evict(50 + 86399) == 0
    assert t.evict(50 + 86400) == 1


def test_two_segments_example():
    segments = [
        CombineAsSegment(1, ZerosInitializer(), table.FtrlOptimizer()),
        CombineAsSegment(2, ZerosInitializer(), AdagradOptimizer()),
    ]
    t = HashTable.from_config(instance(segments, [0.5, 0.05]), name="two")
    t.apply_gradients(ids(1), torch.tensor([2.0, 1, -3]), 0)
    expected = torch.tensor([[-0.4938648, -0.04767313, 0.04972452]])
    torch.testing.assert_close(t.lookup(ids(1)), expected, rtol=1e-6, atol=1e-6)


def test_fixed_r8_rows_show_quantized_values_and_keep_their_own():
    t = one(6, compressor=table.FixedR8Compressor(2.0))
    t.assign(ids(1), torch.tensor([0.3, -0.3, 0.0078, 0.0079, 2.5, -7]))
    assert t.lookup(ids(1)).tolist() == [[0.296875, -0.296875, 0, 0.015625, 1.984375, -2.0]]
    assert EntryDump.FromString(t.lookup_entry(ids(1))[0]).num[5] == -7
    t.apply_gradients(ids(1), torch.full((6,), -0.5), 0)
    assert EntryDump.FromString(t.lookup_entry(ids(1))[0]).num[5] == -6.5


def test_hash_net_rows_sharpen_with_the_step():
    t = one(1, 1.0, compressor=table.FloatCompressorConfig(one_bit={"amplitude": 0.2}))
    t.assign(ids(1), torch.tensor([0.7]))
    assert t.lookup(ids(1)).item() == pytest.approx(0.12087356, rel=1e-6)
    t.apply_gradients(ids(1), torch.tensor([0.0]), 601)
    assert t.lookup(ids(1)).item() == pytest.approx(0.12087356, rel=1e-6)
    t.apply_gradients(ids(1), torch.tensor([1.0]), 600)
    assert EntryDump.FromString(t.lookup_entry(ids(1))[0]).num[0] == pytest.approx(0.7 - 0.08646097, rel=1e-6)
    t.assign(ids(1), torch.tensor([0.7]))
    assert t.lookup(ids(1)).item() == pytest.approx(0.17707033, rel=1e-6)


# --- rules of writes -------------------------------------------------------------------------------------------------


def test_times_are_overwritten_and_the_clock_only_rises():
    t = one()
    t.assign(ids(1), torch.ones(1), 100).assign(ids(1), torch.ones(1), 40)
    assert EntryDump.FromString(t.lookup_entry(ids(1))[0]).last_update_ts_sec == 40
    assert t.max_update_time == 100
    t.apply_gradients(ids(), torch.empty(0), 0, req_time=2**32 - 1)
    assert t.max_update_time == 2**32 - 1
    before = int(time.time())
    t.reinitialize(ids(1))
    assert before <= EntryDump.FromString(t.lookup_entry(ids(1))[0]).last_update_ts_sec <= int(time.time())


def test_the_filter_is_asked_per_occurrence_before_an_assign_and_during_an_assign_add():
    def filtered(threshold):
        config = SlotOccurrenceThresholdConfig(default_occurrence_threshold=threshold)
        hash_filter = SlidingHashFilter(1000, 5, config)
        return one(hash_filter=hash_filter, name="filtered"), hash_filter

    t, hash_filter = filtered(1)
    t.assign(ids(1, 1, 1), torch.tensor([1.0, 2, 3]))
    assert t.lookup(ids(1)).item() == 3
    assert hash_filter.get(1) == 3
    t, hash_filter = filtered(1)
    t.assign_add(ids(1, 1, 1), torch.tensor([1.0, 2, 3]))
    assert t.lookup(ids(1)).item() == 5
    assert hash_filter.get(1) == 2  # the third found the row that the second had created
    t.reinitialize(ids(2))
    assert hash_filter.get(2) == 0
    t, _ = filtered(1)
    t.apply_gradients(ids(1), torch.ones(1), 0, req_time=77)
    assert (t.size(), t.max_update_time) == (0, 77)


def test_touched_keys_are_those_that_training_changed():
    class Client:
        def __init__(self):
            self.touched = TouchedKeySet()

        def attach_table(self, name, dim, lookup):
            return self.touched, 3

    client = Client()
    config = SlotOccurrenceThresholdConfig(slot_occurrence_thresholds=[{"slot": 1, "occurrence_threshold": 1}])
    hash_filter = SlidingHashFilter(1000, 5, config)
    segment = CombineAsSegment(1, ZerosInitializer(), SgdOptimizer())
    t = HashTable.from_config(instance([segment], [1.0]), name="touched", sync_client=client, hash_filter=hash_filter)
    dropped = (1 << 48) + 5
    t.assign(ids(1), torch.ones(1)).assign_add(ids(2), torch.ones(1))
    assert client.touched.steal().tolist() == []
    t.apply_gradients(ids(1, 3, dropped, 3), torch.ones(4), 0)
    t.reinitialize(ids(4))
    keys, tables = client.touched.steal_pairs()
    assert sorted(keys.tolist()) == [1, 3, 4]
    assert set(tables.tolist()) == {3}


def test_lookup_may_insert_missing_rows():
    t = one(2, initializer=ConstantsInitializer(0.25))
    assert t.lookup(ids(1, 2), insert_missing=True, req_time=5).tolist() == [[0.25, 0.25]] * 2
    assert t.size() == 2


# --- serving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compressor", "shown"),
    [
        (Fp32Compressor(), [0.3, -2.5, 0.0]),
        (table.Fp16Compressor(), [0.30004883, -2.5, 0.0]),
        (table.FixedR8Compressor(2.0), [0.296875, -2.0, 0.0]),
        (table.OneBitCompressor(), [0.05, -0.05, -0.05]),
    ],
)
def test_serving_rows_are_encoded(compressor, shown):
    t = one(3, compressor=compressor, serving=True)
    t.assign(ids(1), torch.tensor([0.3, -2.5, 0.0]), 9)
    assert t.lookup(ids(1, 2)).tolist()[0] == pytest.approx(shown)
    assert t.lookup(ids(2)).tolist() == [[0, 0, 0]]
    t.assign_add(ids(5), torch.tensor([0.3, -2.5, 0.0]))
    assert torch.equal(t.lookup(ids(5)), t.lookup(ids(1)))
    t.assign_add(ids(1), torch.tensor([0.0, 2.0, 1.0]))
    assert t.lookup(ids(1))[0, 2] > 0
    t.reinitialize(ids(1))
    zero = -0.05 if isinstance(compressor, table.OneBitCompressor) else 0.0
    assert t.lookup(ids(1)).tolist()[0] == pytest.approx([zero] * 3)
    for call in (
        lambda: t.apply_gradients(ids(1), torch.zeros(3), 0),
        lambda: t.lookup_entry(ids(1)),
        lambda: t.save("/nowhere"),
    ):
        with pytest.raises(RuntimeError, match="not supported by serving entries"):
            call()


def test_half_rows_overflow_to_infinity():
    t = one(2, compressor=table.Fp16Compressor(), serving=True)
    t.assign(ids(1), torch.tensor([70000.0, -70000.0]))
    assert t.lookup(ids(1)).tolist() == [[float("inf"), float("-inf")]]


def test_skip_zero_embedding():
    t = one(2, compressor=Fp32Compressor(), serving=True, skip_zero_embedding=True)
    t.assign(ids(1, 2), torch.tensor([[1.0, 1], [0, 1e-30]]))
    assert t.contains(ids(1, 2)).tolist() == [True, False]
    t.assign(ids(1, 3), torch.zeros(2, 2)).assign_add(ids(4), torch.zeros(1, 2))
    assert t.contains(ids(1, 3, 4)).tolist() == [False, False, True]


# --- names and bad input ---------------------------------------------------------------------------------------------


def test_registered_names_are_unique_until_the_registry_is_reset():
    segment = CombineAsSegment(1, ZerosInitializer(), SgdOptimizer())
    t = hash_table_from_config(instance([segment], [1.0]), name_suffix="x")
    assert t.name == "MonolithHashTable_x"
    assert HashTable.from_proto(t.to_proto()) is t
    with pytest.raises(ValueError, match="MonolithHashTable_x"):
        hash_table_from_config(instance([segment], [1.0]), name_suffix="x")
    table.reset_registry()
    hash_table_from_config(instance([segment], [1.0]), name_suffix="x")


def test_a_name_that_is_taken_is_refused_before_the_table_attaches_itself_to_anything():
    attached = []

    class Client:
        def attach_table(self, name, dim, lookup):
            attached.append(name)

        def attach_multi_table(self, name, tables):
            attached.append(name)

    segment = CombineAsSegment(1, ZerosInitializer(), SgdOptimizer())
    for make in (
        lambda: hash_table_from_config(instance([segment], [1.0]), name_suffix="x", sync_client=Client()),
        lambda: MultiHashTable.from_configs({"a": instance([segment], [1.0])}, sync_client=Client(), name_suffix="x"),
    ):
        attached.clear()
        make()
        with pytest.raises(ValueError, match="exists already"):
            make()
        assert len(attached) == 1


def test_a_name_is_free_again_when_its_table_could_not_be_made():
    segment = CombineAsSegment(1, ZerosInitializer(), SgdOptimizer())
    with pytest.raises(ValueError, match="learning_rate_fns"):
        hash_table_from_config(instance([segment], [1.0, 2.0]), name_suffix="x")
    with pytest.raises(ValueError, match="there is no table named 'MonolithHashTable_x'; registered tables are none"):
        HashTable.from_proto(table.HashTableProto(shared_name="MonolithHashTable_x"))
    with pytest.raises(ValueError, match="sync_client must be one of create_parameter_sync_clients"):
        hash_table_from_config(instance([segment], [1.0]), name_suffix="x", sync_client=TouchedKeySet())
    hash_table_from_config(instance([segment], [1.0]), name_suffix="x")


BAD_CALLS = {
    "float ids": (lambda t: t.lookup(torch.tensor([1.0])), "int64.*read the ids as integers"),
    "float ids of a write": (lambda t: t.assign(torch.tensor([float("nan")]), torch.ones(2)), "int64.*read the ids"),
    "boolean ids": (lambda t: t.lookup(torch.tensor([True])), "int64"),
    "unsigned ids": (lambda t: t.lookup(torch.tensor([1], dtype=torch.uint64)), r"int64.*view\(torch.int64\)"),
    "text ids": (lambda t: t.lookup("abc"), "int64"),
    "huge id": (lambda t: t.lookup([1 << 63]), "int64"),
    "sparse ids": (lambda t: t.lookup(torch.tensor([1, 2]).to_sparse()), "dense"),
    "meta ids": (lambda t: t.lookup(torch.empty(2, dtype=torch.int64, device="meta")), "meta"),
    "too few values": (lambda t: t.assign(ids(1, 2), torch.ones(3)), "4 elements"),
    "too many values": (lambda t: t.assign_add(ids(1), torch.ones(3)), "2 elements"),
    "values of another width": (
        lambda t: t.assign(ids(1, 2), torch.ones(4, 1)),
        r"must be \[2, 2\].*got shape \[4, 1\]",
    ),
    "values transposed": (lambda t: t.assign_add(ids(1, 2, 3), torch.ones(2, 3)), r"must be \[3, 2\].*\[2, 3\]"),
    "gradients of another width": (lambda t: t.apply_gradients(ids(1, 2, 3), torch.ones(2, 3), 0), r"grads.*\[3, 2\]"),
    "NaN values": (lambda t: t.assign(ids(1, 2), torch.tensor([[1.0, 1], [1, float("nan")]]), 9), "id 2.*NaN"),
    "infinite values": (lambda t: t.assign_add(ids(1, 2), torch.tensor([[1.0, 1], [1, float("inf")]]), 9), "id 2.*NaN"),
    "double values": (lambda t: t.assign(ids(1), torch.ones(2, dtype=torch.float64)), "float32"),
    "values for nothing": (lambda t: t.assign(ids(), torch.ones(2)), "0 ids"),
    "negative time": (lambda t: t.assign(ids(1), torch.ones(2), -1), "req_time"),
    "late time": (lambda t: t.assign(ids(1), torch.ones(2), 1 << 32), "req_time"),
    "fractional time": (lambda t: t.assign(ids(1), torch.ones(2), 1.5), "req_time"),
    "text step": (lambda t: t.apply_gradients(ids(1), torch.ones(2), "one"), "global_step"),
    "huge step": (lambda t: t.apply_gradients(ids(1), torch.ones(2), 1 << 70), "global_step"),
    "NaN": (lambda t: t.apply_gradients(ids(1, 2), torch.tensor([1.0, 1, float("nan"), 1]), 0), "id 2"),
    "infinity": (lambda t: t.apply_gradients(ids(1, 2), torch.tensor([1.0, 1, 1, float("inf")]), 0), "id 2"),
    "NaN under dedup": (
        lambda t: t.apply_gradients(ids(1, 1), torch.tensor([1.0, 1, float("nan"), 1]), 0, enable_dedup=True),
        "id 1",
    ),
}


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32], ids=str
)
def test_narrower_integers_are_ids_too(dtype):
    t = one(2)
    narrow = torch.tensor([7, 100], dtype=dtype)
    t.assign(narrow, torch.ones(2, 2))
    t.apply_gradients(narrow, torch.ones(2, 2), 0)
    assert t.contains(ids(7, 100)).tolist() == [True, True]
    assert torch.equal(t.lookup(narrow), t.lookup(ids(7, 100)))


def test_values_may_have_the_shape_of_the_ids_or_be_flat():
    t = one(2)
    t.assign(ids(1, 2, 3, 4).view(2, 2), torch.arange(8.0).view(2, 2, 2))
    t.assign(ids(5, 6), torch.arange(4.0))
    assert t.lookup(ids(4, 6)).tolist() == [[6, 7], [2, 3]]


def test_entries_are_listed_for_ids_of_any_shape():
    t = one(2)
    t.assign(ids(1, 3), torch.ones(2, 2))
    flat = t.lookup_entry(ids(1, 2, 3, 4))
    assert [bool(entry) for entry in flat] == [True, False, True, False]
    assert t.lookup_entry(ids(1, 2, 3, 4).view(2, 2)) == flat
    assert t.lookup_entry(torch.tensor(3)) == flat[2:3]
    segment = CombineAsSegment(2, ZerosInitializer(), SgdOptimizer())
    multi = MultiHashTable.from_configs({"a": instance([segment], [1.0])})
    assert multi.lookup_entry({"a": ids(1, 2).view(2, 1)}) == {"a": [b"", b""]}


def test_rows_that_are_quantized_or_not_checked_take_values_that_are_not_finite():
    bad = torch.tensor([[float("nan"), float("inf")]])
    quantized = hash_table_from_config(
        instance([CombineAsSegment(2, ZerosInitializer(), SgdOptimizer(), table.FixedR8Compressor(2.0))], [1.0])
    )
    assert quantized.assign(ids(1), bad).lookup(ids(1)).tolist() == [[0, 1.984375]]
    trusting = HashTable(2, on_bad_gradient="ignore")
    assert trusting.assign(ids(1), bad).lookup(ids(1)).isfinite().sum() == 0


@pytest.mark.parametrize("lr", ["0.1", b"0.1", True, None, [0.1]], ids=repr)
def test_a_learning_rate_that_is_no_number_is_refused(lr):
    for call in (
        lambda: HashTable(2, lr=lr) if lr is not None else HashTable(2, optimizer=shoal.Sgd(lr=lr)),
        lambda: shoal.Adagrad(lr=lr),
        lambda: table.HashTableConfigInstance(table.EmbeddingHashTableConfig(), [lr]),
    ):
        with pytest.raises(ValueError, match="must be a number or a function of the step"):
            call()


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_refused_with_the_tables_name_and_changes_nothing(case):
    t = one(2, name="prices")
    t.assign(ids(1), torch.ones(2), 5)
    call, words = BAD_CALLS[case]
    with pytest.raises(ValueError, match=words) as caught:
        call(t)
    assert "'prices'" in str(caught.value)
    assert t.lookup(ids(1, 2)).tolist() == [[1, 1], [0, 0]]
    assert (t.size(), t.max_update_time) == (1, 5)


def test_a_rate_that_is_not_finite_is_refused():
    t = one(rate=lambda: float("nan"), name="prices")
    with pytest.raises(ValueError, match="prices"):
        t.apply_gradients(ids(1), torch.ones(1), 0)
    assert t.size() == 0


def test_bad_gradients_may_be_skipped_and_are_counted():
    t = one(2, on_bad_gradient="skip")
    t.apply_gradients(ids(1, 2, 1), torch.tensor([[1.0, 1], [float("nan"), 1], [1, 1]]), 0)
    assert t.lookup(ids(1, 2)).tolist() == [[-2, -2], [0, 0]]
    assert t.size() == 1
    assert t.skipped_gradients == 1


@pytest.fixture(params=["float64 by default", "another device by default"])
def torch_defaults(request):
    if request.param.startswith("float64"):
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)
    else:
        with torch.device("meta"):  # as in `with torch.device("cuda")`; tensors on it have no values
            yield


def test_tables_give_float32_on_the_cpu_whatever_torchs_defaults(torch_defaults):
    t = one(2)
    asked = torch.tensor([1, 2, 1], device="cpu")
    values = torch.tensor([[1.0, 2], [3, 4], [5, 6]], dtype=torch.float32, device="cpu")
    t.assign(asked, values)
    for found in (t.lookup(asked), t.lookup([1, 2, 1]), t.lookup(asked, insert_missing=True)):
        assert (found.dtype, found.device.type, found.tolist()) == (torch.float32, "cpu", [[5, 6], [3, 4], [5, 6]])
    assert t.assign([7], [[1.0, 2.0]]).lookup([7, 8]).tolist() == [[1, 2], [0, 0]]
    assert t.contains(asked).tolist() == [True] * 3
    assert t.reinitialize([7, 9])[1].tolist() == [1, 0]
    t.apply_gradients(asked, values, 0)
    assert t.lookup([1, 2]).tolist() == [[-1, -2], [0, 0]]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # torch's own warning, once per process
def test_tensors_without_numbers_are_refused():
    asked = ids(1)
    t = one(2).assign(asked, torch.ones(2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(1, 2)
        for call in (lambda: t.lookup(fake.long()), lambda: t.assign(asked, fake)):
            with pytest.raises(ValueError, match=r"table 'one': .* FakeTensor"):
                call()
        with pytest.raises(ValueError, match="without memory"):
            t.lookup(asked)  # its result would be one of these, too
    assert t.lookup(asked).tolist() == [[1, 1]]


@pytest.mark.timeout(300)
def test_compiled_functions_may_call_a_table():
    t = one(2)

    @torch.compile(backend="eager")
    def step(asked, grads):
        t.apply_gradients(asked, grads * 2, 0)
        return t.lookup(asked) + t.contains(asked).float()[:, None]

    for n in (3, 4):
        t.clear()
        assert torch.equal(step(torch.arange(n), torch.ones(n, 2)), torch.full((n, 2), -1.0))


def test_strange_but_legal_input():
    t = one(2)
    assert t.lookup(ids()).shape == (0, 2)
    t.assign(ids(), torch.empty(0, 2)).assign_add(ids(), torch.empty(0)).apply_gradients(ids(), torch.empty(0, 2), 0)
    assert t.reinitialize(ids())[1].tolist() == []
    extremes = ids(0, -1, 2**63 - 1, -(2**63))
    t.assign(extremes, torch.arange(8.0))
    assert t.lookup(extremes).flatten().tolist() == list(range(8))
    crossed = torch.arange(12.0).view(2, 6).t()[::3]  # neither contiguous nor 1-D
    t.assign(torch.tensor([[5, 6]]).t(), crossed)
    assert t.lookup(torch.tensor([[5], [6]])).tolist() == crossed.tolist()
    grads = torch.ones(1, 2, requires_grad=True)
    t.apply_gradients(ids(5), grads * 2, 0)
    assert t.clear() is t
    assert t.size() == 0


# --- the state machine -----------------------------------------------------------------------------------------------

keys = st.lists(st.one_of(st.integers(-3, 8), st.sampled_from([2**63 - 1, -(2**63), (5 << 48) + 1])), max_size=12)
times = st.integers(0, 400_000)


class TableMachine(RuleBasedStateMachine):
    """A table and a dict go the same way."""

    def __init__(self):
        super().__init__()
        self.threads = shoal.num_threads()
        self.folder = tempfile.TemporaryDirectory()
        self.saves = itertools.count()
        self.seen = {0}

    def teardown(self):
        shoal.set_num_threads(self.threads)
        self.folder.cleanup()

    @initialize(data=st.data(), threshold=st.sampled_from([0, 0, 2]), days=st.integers(0, 3))
    def build(self, data, threshold, days):
        config = data.draw(instances(max_segments=2, dims=st.integers(1, 5)))
        config.table_config.slot_expire_time_config.default_expire_time = days
        config.table_config.slot_expire_time_config.slot_expire_times.add(slot=5, expire_time=1)
        thresholds = SlotOccurrenceThresholdConfig(default_occurrence_threshold=threshold)
        self.pair = Pair.of(config, SlidingHashFilter(400, 5, thresholds), SlidingHashFilter(400, 5, thresholds))
        self.step = 0

    def take(self, drawn):
        self.seen.update(drawn)
        return torch.tensor(drawn, dtype=torch.int64)

    @rule(drawn=keys, data=st.data(), now=times)
    def assign(self, drawn, data, now):
        values = rows(data.draw, len(drawn), self.pair.ours.dim_size)
        self.pair.ours.assign(self.take(drawn), values, now)
        self.pair.reference.assign(drawn, values, now)

    @rule(drawn=keys, data=st.data(), now=times)
    def assign_add(self, drawn, data, now):
        values = rows(data.draw, len(drawn), self.pair.ours.dim_size)
        self.pair.ours.assign_add(self.take(drawn), values, now)
        self.pair.reference.assign_add(drawn, values, now)

    @rule(drawn=keys, data=st.data(), now=times, dedup=st.booleans())
    def apply_gradients(self, drawn, data, now, dedup):
        self.step += 1
        grads = rows(data.draw, len(drawn), self.pair.ours.dim_size)
        arguments = {"enable_dedup": dedup, "req_time": now}
        self.pair.ours.apply_gradients(self.take(drawn), grads, self.step, **arguments)
        self.pair.reference.apply_gradients(drawn, grads, self.step, **arguments)

    @rule(drawn=keys)
    def reinitialize(self, drawn):
        status = self.pair.ours.reinitialize(self.take(drawn))[1]
        assert status.tolist() == self.pair.reference.reinitialize(drawn)[1].tolist()

    @rule(now=times)
    def evict(self, now):
        assert self.pair.ours.evict(now) == self.pair.reference.evict(now)

    @rule(drawn=keys)
    def erase(self, drawn):
        known = {key for key in drawn if key in self.pair.reference.rows}
        assert self.pair.ours.erase(self.take(drawn)) == len(known)
        for key in known:
            del self.pair.reference.rows[key]

    @rule()
    def clear(self):
        self.pair.ours.clear()
        self.pair.reference.clear()

    @rule(n=st.integers(1, 4))
    def use_threads(self, n):
        shoal.set_num_threads(n)

    @rule()
    def save_and_restore(self):
        """A checkpoint keeps everything but the stale rows."""
        base = f"{self.folder.name}/save{next(self.saves)}"
        self.pair.ours.save(base)
        self.pair.ours.restore(base)
        reference = self.pair.reference
        for key in [key for key in reference.rows if reference.stale(key, reference.max_update_time)]:
            del reference.rows[key]
        saved = [row.time for row in reference.rows.values()]
        reference.max_update_time = max([reference.max_update_time, *saved])  # rows reset by the wall clock

    @invariant()
    def agree(self):
        if not hasattr(self, "pair"):
            return
        ours, reference = self.pair.ours, self.pair.reference
        assert ours.size() == reference.size()
        assert ours.max_update_time == reference.max_update_time
        every = sorted(self.seen)
        asked = torch.tensor(every)
        assert ours.contains(asked).tolist() == reference.contains(every).tolist()
        # Rounding accumulates over the steps; other tests check each optimizer to 1e-6 per step.
        torch.testing.assert_close(ours.lookup(asked), reference.lookup(every), rtol=1e-3, atol=1e-3)
        for key, entry in zip(every, ours.lookup_entry(asked), strict=True):
            if key in reference.rows:
                mine, theirs = EntryDump.FromString(entry).last_update_ts_sec, reference.rows[key].time
                assert mine == theirs or abs(mine - theirs) <= 600 < theirs - 10**9  # a clock read twice
                reference.rows[key].time = mine


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(stateful_step_count=25)


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dedup", [False, True])
def test_results_are_the_same_for_any_number_of_threads(dedup):
    random = np.random.default_rng(1)
    asked = [torch.from_numpy(random.zipf(1.3, 30_000).astype(np.int64) % 20_000) for _ in range(4)]
    grads = [torch.from_numpy(random.normal(size=(30_000, 5)).astype(np.float32)) for _ in range(4)]

    def train(threads):
        shoal.set_num_threads(threads)
        t = one(5, 0.1, AdagradOptimizer(), table.RandomUniformInitializer(), seed=3, name=f"threads{threads}")
        for step, (batch, of_batch) in enumerate(zip(asked, grads, strict=True)):
            t.apply_gradients(batch, of_batch, step, enable_dedup=dedup)
            t.assign_add(batch[:1000], of_batch[:1000])
        t.assign(asked[0][:9000], grads[0][:9000])
        return t.size(), t.lookup(torch.arange(20_000))

    size, found = train(1)
    for threads in (2, 3, 8):
        again, same = train(threads)
        assert again == size
        assert torch.equal(same, found)


def test_a_large_batch_with_many_duplicates_matches_plain_sums():
    t = one(3, 1.0)
    asked = torch.arange(200_000) % 7
    t.apply_gradients(asked, torch.ones(200_000, 3), 0)
    counts = torch.bincount(asked).float()
    assert torch.equal(t.lookup(torch.arange(7)), -counts[:, None].expand(7, 3))


def test_concurrent_writers_lose_nothing():
    t = one(4, 1.0)
    asked = torch.arange(5000)

    def work():
        for _ in range(10):
            t.apply_gradients(asked, torch.full((5000, 4), -1.0), 0)
            t.assign_add(asked, torch.ones(5000, 4))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert torch.equal(t.lookup(asked), torch.full((5000, 4), 80.0))


def test_skipped_gradients_of_all_threads_are_counted():
    t = one(1, on_bad_gradient="skip")
    bad = torch.tensor([float("nan"), 1.0])

    def work():
        for _ in range(200):
            t.apply_gradients(ids(1, 2), bad, 0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert t.skipped_gradients == 800


def test_rows_are_never_torn_while_the_table_grows_shrinks_and_is_saved(tmp_path):
    t = one(16, slot_expire_time_config=SlotExpireTimeConfig(default_expire_time=1))
    stop = threading.Event()
    wrong: list[object] = []

    def guarded(work):
        def loop():
            random = np.random.default_rng(threading.get_ident())
            try:
                while not stop.is_set():
                    work(random)
            except Exception as error:
                wrong.append(error)

        return loop

    def write(random):
        asked = torch.from_numpy(random.integers(0, 30_000, 2000))
        values = torch.from_numpy(random.integers(1, 1000, (2000, 1)).astype(np.float32)).expand(2000, 16)
        t.assign(asked, values, int(random.integers(0, 200_000)))

    def read(random):
        found = t.lookup(torch.from_numpy(random.integers(0, 30_000, 2000)))
        if not torch.equal(found, found[:, :1].expand_as(found)):
            wrong.append("torn row")

    def remove(random):
        t.evict(int(random.integers(86_400, 200_000)))
        t.erase(torch.from_numpy(random.integers(0, 30_000, 500)))
        time.sleep(0.01)

    def save(random):
        t.save(str(tmp_path / "live"))

    def touch(random):
        t.apply_gradients(torch.from_numpy(random.integers(0, 30_000, 500)), torch.zeros(500, 16), 0)

    threads = [threading.Thread(target=guarded(work)) for work in (write, write, read, read, remove, save, touch)]
    for thread in threads:
        thread.start()
    time.sleep(3)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not wrong, wrong[0]
    t.save(str(tmp_path / "last"))


def expiring(**fields):
    t = one(slot_expire_time_config=SlotExpireTimeConfig(default_expire_time=1), **fields)
    return t.assign(ids(1), torch.ones(1), 10).assign(ids(2), torch.ones(1), 200_000)


@pytest.mark.parametrize("hours", [1, 2**31 - 1])
def test_background_eviction_begins_after_its_first_period_and_stops_promptly(hours):
    t = expiring(enable_feature_eviction=True, feature_evict_every_n_hours=hours)
    began = time.monotonic()
    t.close()
    t.close()
    assert time.monotonic() - began < 30  # it does not wait for the period
    assert t.size() == 2
    assert t.evict(t.max_update_time) == 1


def test_background_eviction_goes_by_the_tables_clock_and_ends_with_the_table():
    t = expiring()
    eviction = BackgroundEviction(t, timedelta(milliseconds=5))
    deadline = time.monotonic() + 60
    while t.size() == 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert t.contains(ids(1, 2)).tolist() == [False, True]
    del t
    eviction._thread.join(60)
    assert not eviction._thread.is_alive()
