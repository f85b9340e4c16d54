"""One update of several tables in this process is bit-identical to ``apply_gradients`` on each of them.

Plain values first, then bad input, then tables that change between find and update, then threads.
"""

import threading

import pytest
import torch

import shoal
from shoal import table
from shoal.errors import ConfigError, UnsupportedError
from shoal.table import HashTable, create_hash_filter, restore_incremental, save_incremental
from shoal.table.clock import Now, now
from shoal.table.config.entry import CombineAsSegment, HashTableConfigInstance
from shoal.table.config.messages import EmbeddingHashTableConfig, EntryConfig, SlotOccurrenceThresholdConfig
from shoal.table.config.optim import ROW_OPTIMIZERS
from shoal.table.export_mode import ExportMode, enter_export_mode
from shoal.table.local_update import update
from shoal.table.pooling import pool_columns, row_gradients
from shoal.table.protocol import FIRSTN, MAX, MEAN, SQRTN, SUM, Features, Found, Part, Step, marks_shape
from shoal.table.tracking.touched import TouchedKeySet

KINDS = sorted(set(ROW_OPTIMIZERS) - {"batch_softmax"})  # it needs a dim of 1


class Tables:
    """A group, as far as `update` asks."""

    def __init__(self, *tables):
        self.tables, self.dim = tables, tables[0].dim_size


def pair(make):
    """Two equal tables: one for the group, one to judge it by."""
    return make(), make()


def found(ids, counts):
    empty = torch.empty(0, dtype=torch.int64)
    return Found(ids, torch.tensor(counts), empty, empty)


def rows_part(features, counts, dim, ids=None, high=50):
    n = sum(counts)
    ids = torch.randint(0, high, (n,)) if ids is None else ids
    return Part(found(ids, counts), features, torch.randn(n, dim))


def bags_part(features, lengths, weights=False, high=50, dim=5):
    """A part of bags: ``lengths`` ``[F][B]``. Marks are those of some rows with few values."""
    lengths = torch.tensor(lengths, dtype=torch.int64).reshape(len(features.tables), -1)
    n = int(lengths.sum())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.reshape(-1).cumsum(0)])
    at = found(torch.randint(0, high, (n,)), lengths.sum(1).tolist())
    grad = torch.randn(lengths.shape[1], features.width)
    given = torch.rand(n) * 2 - 0.5 if weights else None
    marks = torch.zeros(marks_shape(n, dim), dtype=torch.uint8) if MAX in features.combiners else None
    pool_columns(torch.randint(0, 3, (n, dim)).float(), at, features, offsets, given, torch.empty_like(grad), marks)
    return Part(at, features, grad, offsets, given, marks)


def of_table(parts, place, dim):
    """What ``apply_gradients`` of one table of the group gets."""
    ids, grads = [], []
    for part in parts:
        each = part.found.counts.tolist()
        for own, grad, at in zip(
            part.found.ids.split(each), row_gradients(part, dim).split(each), part.features.tables, strict=True
        ):
            keep = own != part.features.padding if part.features.padding is not None else own == own
            if at == place:
                ids.append(own[keep])
                grads.append(grad[keep])
    return torch.cat(ids), torch.cat(grads)


def alone(judges, parts, number=0, each="sum", time=None):
    for place, judge in enumerate(judges):
        if any(place in part.features.tables for part in parts):
            ids, grads = of_table(parts, place, judge.dim_size)
            judge.apply_gradients(ids, grads, number, enable_dedup=each == "sum", req_time=time)


def entries(one, high=60):
    return one.lookup_entry(torch.arange(-2, high)), one.size(), one.max_update_time


def assert_same(tables, judges, high=60):
    for mine, judge in zip(tables, judges, strict=True):
        assert entries(mine, high) == entries(judge, high)


def small(kind="adagrad", dim=5, **options):
    return HashTable(dim, optimizer=kind, seed=3, **options)


# --- plain values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", ["sum", "occurrence"])
@pytest.mark.parametrize("kind", KINDS)
def test_bags_and_rows_step_as_each_table_alone_does(kind, each):
    mine, judges = zip(*(pair(lambda: small(kind)) for _ in range(3)), strict=True)
    kinds, lengths = (SUM, MEAN, SQRTN, MEAN, MAX, FIRSTN), (1, 1, 1, 1, 1, 2)
    pooled = Features((0, 1, 2, 1, 0, 1), kinds, (0, 9, 15, 21, 26, 32), 45, 7, lengths)
    plain = Features((2, 0))
    group = Tables(*mine)
    for number in range(3):
        some, more = [[5, 0, 4], [3, 1, 0]], [[1, 1, 1], [1, 1, 1]]
        parts = [
            bags_part(pooled, [[0, 3, 1], [2, 2, 2], [5, 0, 4], [1, 1, 1], *some], weights=number == 1),
            rows_part(plain, [6, 4], 5),
            bags_part(pooled, [[1, 1, 1], [9, 9, 9], [0, 0, 0], [1, 0, 2], *more]),
        ]
        update(group, parts, Step(number, 100 + number), each)
        alone(judges, parts, number, each, 100 + number)
        assert_same(mine, judges)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("combiner", [SUM, MEAN, SQRTN, MAX, FIRSTN])
@pytest.mark.parametrize("padding", [None, 7])
@pytest.mark.parametrize("lengths", [[[1, 1, 1, 1]], [[0, 5, 1, 30]], [[0, 0, 0, 0]]], ids=["one", "some", "none"])
def test_one_feature_of_one_table(combiner, padding, lengths, weights):
    mine, judge = pair(lambda: small("adam"))
    length = 3 if combiner == FIRSTN else 1
    features = Features((0,), (combiner,), (2,), 3 + 5 * length, padding, (length,))
    parts = [bags_part(features, lengths, weights, high=10)]
    update(Tables(mine), parts, Step(4, 9))
    alone([judge], parts, 4, time=9)
    assert_same([mine], [judge])


def test_optimizers_of_all_kinds_share_one_group():
    mine, judges = zip(*(pair(lambda kind=kind: small(kind)) for kind in KINDS), strict=True)
    k = len(KINDS)
    features = Features(tuple(range(k)), (MEAN,) * k, tuple(range(0, 5 * k, 5)), 5 * k)
    for number in range(2):
        parts = [bags_part(features, torch.randint(0, 4, (k, 20)).tolist())]
        update(Tables(*mine), parts, Step(number, 50))
        alone(judges, parts, number, time=50)
    assert_same(mine, judges)


def test_batch_softmax_steps_and_refuses_a_negative_step_for_all():
    mine, judge = pair(lambda: small("batch_softmax", dim=1))
    other = small("sgd", dim=1)
    parts = [rows_part(Features((0, 1)), [4, 4], 1)]
    with pytest.raises(ConfigError, match="global_step"):
        update(Tables(mine, other), parts, Step(-1, 5))
    assert other.size() == mine.size() == 0
    update(Tables(mine, other), parts, Step(3, 5))
    alone([judge], [Part(found(parts[0].found.ids[:4], [4]), Features(), parts[0].grad[:4])], 3, time=5)
    assert_same([mine], [judge])


def segments(dims, rates, name):
    def make():
        config = EmbeddingHashTableConfig(
            entry_config=EntryConfig(
                segments=[
                    CombineAsSegment(dim, table.RandomUniformInitializer(-0.1, 0.1), optimizer, compressor)
                    for dim, optimizer, compressor in dims
                ]
            ),
            cuckoo=table.CuckooEmbeddingHashTableConfig(),
        )
        return HashTable.from_config(HashTableConfigInstance(config, rates), name=name, seed=5)

    return make


def test_segments_stochastic_rounding_and_quantized_lookups_follow_the_batch():
    rounding = table.StochasticRoundingFloat16OptimizerWrapper(table.SgdOptimizer())
    make = segments(
        [(2, rounding, None), (2, table.AdagradOptimizer(), None), (1, table.SgdOptimizer(), table.OneBitCompressor())],
        [0.5, 0.1, 0.2],
        "segments",
    )
    mine, judge = pair(make)
    features = Features((1, 0), (MEAN, SUM), (0, 5), 10, padding=3)
    for number in (0, 200, 201):
        parts = [bags_part(features, [[2, 3, 0], [5, 1, 4]]), bags_part(features, [[1, 1, 1], [2, 0, 9]], weights=True)]
        update(Tables(mine, small()), parts, Step(number))
        alone([judge], parts, number)
        assert_same([mine], [judge])


def test_learning_rates_follow_the_step_and_are_scaled_per_table():
    ids, ones = torch.tensor([1, 1]), torch.ones(2, 1)
    tables = [
        HashTable(1, optimizer=shoal.Sgd(lr=rate), initializer="zeros")
        for rate in (table.PolynomialDecay(0.5, 8, 0.1), 1.0)
    ]
    group = Tables(*tables)
    part = Part(found(ids, [1, 1]), Features((0, 1)), ones)
    update(group, [part], Step(2))
    assert [t.lookup(ids[:1]).item() for t in tables] == pytest.approx([-0.4, -1.0])
    update(group, [part], Step(torch.tensor(2), lr_scale=(0.5, 2)))
    assert [t.lookup(ids[:1]).item() for t in tables] == pytest.approx([-0.6, -3.0])
    update(group, [part], Step(2, lr_scale=torch.tensor([0.0, 1.0])))
    assert [t.lookup(ids[:1]).item() for t in tables] == pytest.approx([-0.6, -4.0])


def test_one_step_is_made_over_all_parts_and_a_part_may_come_twice():
    mine, judge = pair(lambda: small("adagrad"))
    part = rows_part(Features(), [30], 5, high=6)
    update(Tables(mine), [part, part], Step(0, 1))
    judge.apply_gradients(part.found.ids.repeat(2), part.grad.repeat(2, 1), 0, enable_dedup=True, req_time=1)
    assert_same([mine], [judge])


def test_a_table_that_is_given_twice_makes_one_step():
    mine, judge = pair(small)
    part = rows_part(Features((0, 1)), [8, 8], 5, high=4)
    update(Tables(mine, mine), [part], Step(0, 1), "sum")
    judge.apply_gradients(part.found.ids, part.grad, 0, enable_dedup=True, req_time=1)
    assert_same([mine], [judge])


def test_nothing_comes_of_nothing():
    mine, other = small(), small()
    update(Tables(mine, other), [], Step(0, 5))
    assert mine.max_update_time == 0
    parts = [rows_part(Features((1,)), [0], 5), bags_part(Features((1,), (SUM,), (0,), 5), [[]])]
    update(Tables(mine, other), parts, Step(0, 5))
    assert (mine.size(), other.size(), mine.max_update_time, other.max_update_time) == (0, 0, 0, 5)
    only_padding = rows_part(Features((0,), padding=9), [3], 5, ids=torch.full((3,), 9))
    update(Tables(mine, other), [only_padding], Step(0, 5))
    assert mine.size() == 0


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_large_batches_are_the_same_with_any_number_of_threads(threads, monkeypatch):
    before = shoal.num_threads()
    mine, judges = zip(
        *(pair(lambda kind=kind: small(kind, dim=16)) for kind in ("adagrad", "sgd", "adam")), strict=True
    )
    kinds, lengths = (MEAN, SUM, SQRTN, SUM, MAX, FIRSTN), (1, 1, 1, 1, 1, 2)
    features = Features((0, 1, 2, 0, 1, 2), kinds, (0, 16, 32, 48, 64, 80), 112, 5, lengths)
    try:
        for weights in (False, True):
            lengths = torch.stack([torch.randint(0, high, (3000,)) for high in (9, 3, 2, 2, 6, 4)])
            parts = [
                bags_part(features, lengths.tolist(), weights, high=4000, dim=16),
                rows_part(Features((1,)), [9000], 16),
            ]
            shoal.set_num_threads(threads)
            update(Tables(*mine), parts, Step(1, 20))
            shoal.set_num_threads(1)
            alone(judges, parts, 1, time=20)
    finally:
        shoal.set_num_threads(before)
    assert_same(mine, judges, 4100)


def test_gradients_may_be_slices_or_expanded():
    mine, judge = pair(small)
    part = rows_part(Features(), [6], 5)
    wide = torch.randn(6, 12)
    for grad in (wide[:, 3:8], torch.ones(1).expand(6, 5), torch.randn(5, 6).t(), torch.randn(1, 5).expand(6, 5)):
        update(Tables(mine), [Part(part.found, part.features, grad)], Step(0, 1))
        judge.apply_gradients(part.found.ids, grad.contiguous(), 0, enable_dedup=True, req_time=1)
        assert_same([mine], [judge])


# --- times, filters, sync ---------------------------------------------------------------------------------------------


def test_times_are_those_of_apply_gradients():
    mine, judge = pair(small)
    part = rows_part(Features(), [9], 5)
    for time in (1000, 900, Now(950), Now(2000), torch.tensor(1999)):
        update(Tables(mine), [part], Step(0, time))
        judge.apply_gradients(part.found.ids, part.grad, 0, enable_dedup=True, req_time=time)
        assert_same([mine], [judge])
    update(Tables(mine), [part], Step(0))
    assert now() - 60 < mine.max_update_time <= now()
    with pytest.raises(ConfigError, match="day ahead"):
        update(Tables(mine), [part], Step(0, now() + 10**6))


def test_without_a_time_each_table_of_a_group_goes_by_its_own_clock():
    clocked, believing = small(), segments([(5, table.SgdOptimizer(), None)], [0.1], "believing")()
    update(Tables(believing, clocked), [rows_part(Features((0, 1)), [3, 3], 5)], Step())
    assert believing.max_update_time == 0
    assert clocked.max_update_time > 10**9


@pytest.mark.parametrize("each", ["sum", "occurrence"])
def test_filters_count_occurrences_and_keep_rare_ids_out(each):
    def make():
        thresholds = SlotOccurrenceThresholdConfig(default_occurrence_threshold=4)
        return HashTable(
            5, optimizer="adagrad", seed=3, hash_filter=create_hash_filter(1000, 1, thresholds.SerializeToString())
        )

    mine, judge = pair(make)
    other, other_judge = pair(small)
    features = Features((0, 1, 0), (SUM, MEAN, SUM), (0, 5, 10), 15, padding=1)
    for number in range(4):
        parts = [
            bags_part(features, [[1, 4, 2], [3, 3, 3], [2, 0, 1]], high=20),
            rows_part(Features(), [5], 5, high=20),
        ]
        update(Tables(mine, other), parts, Step(number, 8), each)
        alone([judge, other_judge], parts, number, each, 8)
        assert_same([mine, other], [judge, other_judge])
    assert 0 < mine.size() < 20


def test_trained_ids_are_told_to_the_sync_client():
    class Client:
        def __init__(self):
            self.keys = TouchedKeySet()

        def attach_table(self, name, dim, lookup):
            return self.keys, 3

    client = Client()
    make = segments([(5, table.SgdOptimizer(), None)], [0.1], "synced")
    config = make().config
    synced = HashTable.from_config(config, name="synced", sync_client=client, on_bad_gradient="skip")
    part = rows_part(Features((0,), padding=4), [4], 5, ids=torch.tensor([9, 4, 2, 6]))
    part.grad[3, 0] = torch.inf
    update(Tables(synced), [part], Step())
    ids, numbers = client.keys.steal_pairs()
    assert sorted(ids.tolist()) == [2, 9]
    assert numbers.tolist() == [3, 3]


def test_rows_that_an_update_wrote_are_in_the_next_increment(tmp_path):
    mine, restored = pair(lambda: small(name="item"))
    mine.assign(torch.tensor([1, 5]), torch.zeros(2, 5))
    save_incremental(mine, tmp_path)
    update(Tables(mine), [rows_part(Features(), [2], 5, ids=torch.tensor([5, 6]))], Step())
    delta = save_incremental(mine, tmp_path)
    assert (delta.kind, delta.rows) == ("delta", 2)
    restore_incremental(restored, tmp_path)
    assert_same([mine], [restored])


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rows", "bags", "weights", "product"])
def test_a_bad_gradient_in_one_of_three_tables_changes_nothing_anywhere(kind):
    tables = [small() for _ in range(3)]
    features = Features((0, 1, 2), (SUM, MEAN, SUM), (0, 5, 10), 15)
    good = bags_part(features, [[1, 2], [2, 1], [3, 3]], weights=True)
    update(Tables(*tables), [good], Step(0, 5))
    before = [entries(t) for t in tables]
    bad = rows_part(features, [2, 3, 2], 5) if kind == "rows" else bags_part(features, [[1, 2], [2, 1], [3, 3]], True)
    if kind == "rows":
        bad.grad[4, 2] = torch.nan
    elif kind == "bags":
        bad.grad[1, 7] = torch.inf
    elif kind == "weights":
        bad.weights[4] = torch.nan
    else:
        bad.weights[4], bad.grad[0, 6] = 1e30, 1e30
        bad.weights[3], bad.grad[1, 0] = 1.0, 1.0
    with pytest.raises(ConfigError, match="nothing was applied") as caught:
        update(Tables(*tables), [good, bad], Step(1, 9))
    assert f"table {tables[1].name!r}: the gradient of id" in str(caught.value)
    assert [entries(t) for t in tables] == before


def test_skipped_gradients_are_counted_and_ignored_ones_are_applied():
    judges, mine = [[small(on_bad_gradient=what) for what in ("skip", "ignore", "raise")] for _ in range(2)]
    features = Features((0, 1, 2), (SUM, SQRTN, SUM), (0, 5, 10), 15, padding=3)
    parts = [bags_part(features, [[1, 2, 3], [2, 1, 0], [3, 3, 0]], weights=True)]
    parts[0].grad[1, 0] = parts[0].grad[0, 6] = torch.nan
    parts[0].grad[2, 11] = torch.nan  # in an empty bag
    for each in ("sum", "occurrence"):
        update(Tables(*mine), parts, Step(0, 3), each)
        alone(judges, parts, each=each, time=3)
    assert mine[0].skipped_gradients == judges[0].skipped_gradients > 0
    assert mine[1].skipped_gradients == mine[2].skipped_gradients == 0
    assert_same(mine, judges)


def test_parts_that_do_not_fit_are_refused_and_change_nothing():
    mine = small()
    group, features = Tables(mine), Features((0,), (SUM,), (0,), 5)
    ids, grad = torch.arange(4), torch.randn(2, 5)
    offsets = torch.tensor([0, 2, 4])
    empty = torch.empty(0, dtype=torch.int64)

    def refused(match, ids=ids, counts=(4,), features=features, grad=grad, offsets=offsets, weights=None, **step):
        part = Part(Found(ids, torch.tensor(counts), empty, empty), features, grad, offsets, weights)
        with pytest.raises(ConfigError, match=match):
            update(group, [part], Step(**step), "sum")

    refused("add up to 4", counts=(3,))
    refused("counts must be >= 0, got -1", counts=(-1,))
    refused("counts must be", counts=(4, 0))
    refused("must go from 0 to 4", offsets=torch.tensor([0, 2, 3]))
    refused("must never fall", offsets=torch.tensor([0, 7, 4]))
    refused("offsets must be", offsets=torch.tensor([0, 2, 4], dtype=torch.int32))
    refused("the gradient must be", grad=torch.randn(3, 5))
    refused("the gradient must be", grad=torch.randn(2, 5).double())
    refused("the gradient must be", grad=torch.randn(3, 5), offsets=None)
    refused("weights must be", weights=torch.ones(3))
    refused("one of 1 tables", features=Features((1,), (SUM,), (0,), 5))
    refused(r"within 0\.\.5, got 5 columns from 1", features=Features((0,), (SUM,), (1,), 5))
    refused("max needs the marks", features=Features((0,), (MAX,), (0,), 5))
    refused(r"combiner of feature 0 must be 0\.\.4, got 7", features=Features((0,), (7,), (0,), 5))
    refused("length of feature 0 must be", features=Features((0,), (FIRSTN,), (0,), 5, lengths=(0,)))
    refused(r"within 0\.\.5", features=Features((0,), (FIRSTN,), (0,), 5, lengths=(2,)))
    refused("one combiner and one column per feature", features=Features((0,), (), (), 5))
    refused("ids must be", ids=ids.int())
    refused("ids must be", ids=torch.arange(8)[::2])
    refused("lr_scale must have", lr_scale=[1.0, 1.0])
    refused("learning rate", lr_scale=[float("nan")])
    refused("number", number="now")
    refused("seconds", time_s=-1)
    with pytest.raises(ConfigError, match="each must be"):
        update(group, [], Step(), "mean")
    assert mine.size() == 0
    assert mine.max_update_time == 0


def test_serving_entries_are_not_updated():
    with enter_export_mode(ExportMode.STANDALONE):
        serving = segments([(5, table.SgdOptimizer(), table.Fp32Compressor())], [0.1], "serving")()
    with pytest.raises(UnsupportedError, match="serving"):
        update(Tables(serving), [rows_part(Features(), [1], 5)], Step())


# --- tables that change between find and update -----------------------------------------------------------------------


@pytest.mark.parametrize("change", ["erase", "evict", "clear", "restore", "grow"])
def test_rows_that_went_or_moved_since_they_were_found_are_made_again(change, tmp_path):
    mine, judge = pair(lambda: small(expire_after="1d"))
    part = rows_part(Features(), [40], 5)
    for one in (mine, judge):
        one.assign(torch.arange(50), torch.ones(50, 5), req_time=86400)
        one.save(str(tmp_path / one.name))
    where = found(part.found.ids, [40])
    for one in (mine, judge):
        if change == "erase":
            one.erase(torch.arange(0, 50, 3))
        elif change == "evict":
            assert one.evict(10 * 86400) == 50
        elif change == "clear":
            one.clear()
        elif change == "restore":
            one.restore(str(tmp_path / one.name))
        else:
            one.assign(torch.arange(100, 30000), torch.zeros(29900, 5), req_time=86400)
    update(Tables(mine), [Part(where, part.features, part.grad)], Step(0, 86401))
    judge.apply_gradients(part.found.ids, part.grad, 0, enable_dedup=True, req_time=86401)
    assert_same([mine], [judge])


# --- threads ----------------------------------------------------------------------------------------------------------


def test_threads_that_update_the_same_tables_lose_no_step():
    tables = [HashTable(4, optimizer=shoal.Sgd(lr=1.0), initializer="zeros") for _ in range(3)]
    group = Tables(*tables)
    features = Features((0, 1, 2), (SUM,) * 3, (0, 4, 8), 12)
    ids = torch.arange(500).repeat(3)
    offsets = torch.arange(1501)
    errors = []

    def work():
        part = Part(found(ids, [500] * 3), features, torch.full((500, 12), -1.0), offsets)
        try:
            for number in range(20):
                update(group, [part, part], Step(number))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors
    for one in tables:
        assert torch.equal(one.lookup(torch.arange(500)), torch.full((500, 4), 160.0))


def test_readers_see_whole_rows_while_groups_are_updated():
    tables = [HashTable(8, optimizer=shoal.Sgd(lr=1.0), initializer="zeros") for _ in range(2)]
    group, ids = Tables(*tables), torch.arange(3000)
    features = Features((0, 1))
    stop, torn = threading.Event(), []

    def read():
        while not stop.is_set():
            rows = tables[1].lookup(ids)
            if not torch.equal(rows, rows[:, :1].expand(-1, 8)):
                torn.append(rows)
                return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        part = Part(found(ids.repeat(2), [3000] * 2), features, torch.ones(6000, 8))
        for number in range(30):
            update(group, [part], Step(number))
    finally:
        stop.set()
        reader.join(60)
    assert not reader.is_alive()
    assert not torn
    assert torch.equal(tables[0].lookup(ids), torch.full((3000, 8), -30.0))
