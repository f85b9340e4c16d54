"""`LocalGroup`: CPU tables that are read in one call. The suite of every group, then its own tests."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

import shoal
from shoal import table
from shoal.errors import ConfigError
from shoal.table.local import LocalGroup
from shoal.table.pooling import pool_columns, row_gradients
from shoal.table.protocol import (
    FIRSTN,
    MAX,
    MEAN,
    SQRTN,
    SUM,
    Features,
    Found,
    Part,
    group_of,
    groups_of,
    marks_shape,
)
from tests.table.group_conformance import CASES, DIM, Kind


@pytest.fixture(autouse=True)
def fresh_registry():
    table.reset_registry()
    yield
    table.reset_registry()


def make(count: int, **options: object) -> list[shoal.HashTable]:
    return [shoal.HashTable(DIM, **options) for _ in range(count)]  # type: ignore[arg-type]


def config(dim: int, compressor: object = None, serving: bool = False) -> table.HashTableConfigInstance:
    segment = table.CombineAsSegment(dim, table.RandomUniformInitializer(-1, 1), table.SgdOptimizer(), compressor)
    entry = table.EntryConfig(segments=[segment])
    if serving:
        entry.entry_type = table.EntryConfig.SERVING
    message = table.EmbeddingHashTableConfig(entry_config=entry, cuckoo=table.CuckooEmbeddingHashTableConfig())
    return table.HashTableConfigInstance(message, [1.0])


class Read:
    """Bags of some lengths of every feature, over tables of any dim."""

    def __init__(self, tables: list[shoal.HashTable], features: Features, lengths: Tensor, upto: int = 50):
        self.group, self.features = group_of(tables), features
        self.ids = torch.randint(0, upto, (int(lengths.sum()),))
        self.counts = lengths.sum(1)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
        self.bags = lengths.shape[1]

    def found(self) -> Found:
        return self.group.find(self.ids, self.counts, self.features, missing="zeros")

    def rows(self, missing="zeros") -> Tensor:
        return self.group.rows(self.found(), self.features, missing=missing)

    def pooled(self, weights=None, missing="zeros", marks=None) -> Tensor:
        out = torch.full((self.bags, self.features.width), 9.0)
        self.group.pooled(self.found(), self.features, self.offsets, weights, out, missing=missing, marks=marks)
        return out


def features_of(dim: int, count: int, padding: int | None = None) -> Features:
    kinds = tuple((SUM, MEAN, SQRTN)[number % 3] for number in range(count))
    columns = tuple(dim * number for number in range(count))
    return Features(tuple(range(count)), kinds, columns, dim * count, padding)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance(case):
    case(Kind(make))


def test_tables_of_one_dim_are_one_group_whatever_else_they_differ_in():
    keeper = table.SlidingHashFilter(1000, 2, table.SlotOccurrenceThresholdConfig(default_occurrence_threshold=2))
    tables = [
        shoal.HashTable(4, optimizer=shoal.Sgd(lr=1.0), seed=1),
        shoal.HashTable(8),
        shoal.HashTable(4, optimizer="adam", seed=2, on_bad_gradient="skip", hash_filter=keeper),
    ]
    (first, places), (second, others) = groups_of(tables)
    assert isinstance(first, LocalGroup)
    assert isinstance(second, LocalGroup)
    assert (places, others) == ([0, 2], [1])
    assert first.traits.trains
    assert first.traits.local_state
    assert group_of([tables[0], tables[2]]) is first


def test_the_tables_of_a_multi_table_are_one_group():
    multi = table.MultiHashTable.from_configs({"a": config(4), "b": config(4)})
    ((group, places),) = groups_of(list(multi.tables.values()))
    assert isinstance(group, LocalGroup)
    assert places == [0, 1]


def test_tables_with_serving_rows_are_read_and_do_not_train():
    served = table.HashTable.from_config(config(4, table.Fp16Compressor(), serving=True), name="served")
    plain = table.HashTable.from_config(config(4), name="plain")
    (group, _), (other, _) = groups_of([served, plain])
    assert not group.traits.trains
    assert other.traits.trains


@pytest.mark.parametrize("dim", [1, 7, 8, 16, 32, 50, 64, 130])
@pytest.mark.parametrize("padding", [None, 3])
def test_a_group_reads_what_its_tables_read_alone_to_the_last_bit(dim, padding):
    tables = [shoal.HashTable(dim, seed=number) for number in range(3)]
    for one in tables:
        one.assign(torch.arange(0, 50, 2), torch.randn(25, dim))
    lengths = torch.randint(0, 7, (3, 40))
    lengths[1, :5] = lengths[2, -5:] = 0
    features = features_of(dim, 3, padding)
    read = Read(tables, features, lengths)
    weights = torch.rand(read.ids.numel())
    parts = read.ids.split(read.counts.tolist())
    for missing in ("zeros", "initial"):
        rows = read.rows(missing)
        for given in (None, weights):
            ours = read.pooled(given, missing)
            begin = 0
            for number, (one, own) in enumerate(zip(tables, parts, strict=True)):
                single = Features((0,), (features.combiners[number],), (0,), dim, padding)
                alone = Read([one], single, lengths[number : number + 1])
                alone.ids = own
                here = slice(begin, begin + own.numel())
                begin = here.stop
                assert torch.equal(alone.rows(missing), rows[here])
                part = None if given is None else given[here].contiguous()
                assert torch.equal(alone.pooled(part, missing), ours[:, dim * number : dim * (number + 1)])
            want = torch.full_like(ours, 9.0)
            pool_columns(rows, read.found(), features, read.offsets, given, want)
            torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 3])
def test_large_batches_and_bags_longer_than_a_piece(threads):
    before = shoal.num_threads()
    shoal.set_num_threads(threads)
    try:
        tables = [shoal.HashTable(16, seed=number) for number in range(2)]
        for one in tables:
            one.assign(torch.arange(5000), torch.randint(-8, 8, (5000, 16)).float())
        lengths = torch.randint(0, 30, (2, 3000))
        lengths[0, 7] = 20_000
        features = Features((1, 0), (SUM, SUM), (16, 0), 32)
        read = Read(tables, features, lengths, upto=6000)
        rows = read.rows()
        assert torch.equal(rows[: read.counts[0]], tables[1].lookup(read.ids[: read.counts[0]]))
        want = torch.empty(3000, 32)
        pool_columns(rows, read.found(), features, read.offsets, None, want)  # integers, so sums are exact
        assert torch.equal(read.pooled(), want)
    finally:
        shoal.set_num_threads(before)


COMPRESSORS = [
    table.Fp32Compressor(),
    table.Fp16Compressor(),
    table.FixedR8Compressor(2.0),
    table.OneBitCompressor(),
]


@pytest.mark.parametrize("serving", [False, True], ids=["training", "serving"])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda compressor: type(compressor).__name__)
def test_quantized_rows_are_read_as_lookups_show_them(compressor, serving):
    one = table.HashTable.from_config(config(6, compressor, serving), name="one", seed=5)
    one.assign(torch.arange(0, 40, 2), torch.randn(20, 6))
    read = Read([one], Features((0,), (SUM,), (0,), 6), torch.randint(0, 9, (1, 30)), upto=40)
    assert torch.equal(read.rows(), one.lookup(read.ids))
    want = torch.empty(30, 6)
    pool_columns(one.lookup(read.ids), read.found(), read.features, read.offsets, None, want)
    torch.testing.assert_close(read.pooled(), want, rtol=1e-5, atol=1e-5)
    initial = read.rows("initial")
    assert one.size() == 20
    if serving:
        assert torch.equal(initial, read.rows())
    else:
        assert torch.equal(initial, one.lookup(read.ids, insert_missing=True))


def test_an_active_filter_keeps_initial_rows_back_and_counts_nothing():
    keeper = table.SlidingHashFilter(1000, 2, table.SlotOccurrenceThresholdConfig(default_occurrence_threshold=2))
    filtered, free = shoal.HashTable(4, hash_filter=keeper, seed=1), shoal.HashTable(4, seed=1)
    read = Read([filtered, free], features_of(4, 2), torch.full((2, 3), 4))
    for _ in range(5):
        rows = read.rows("initial")
    assert not rows[:12].any()
    assert rows[12:].all()
    filtered.apply_gradients(read.ids[:1], torch.ones(1, 4))
    assert filtered.size() == 0  # its first occurrence, because reading does not count


def test_bad_arguments_are_refused():
    tables = make(2)
    read = Read(tables, features_of(DIM, 2), torch.full((2, 3), 2))
    group, found, features = read.group, read.found(), read.features
    out = torch.empty(3, 2 * DIM)

    def pooled(offsets=read.offsets, weights=None, out=out, features=features, marks=None):
        group.pooled(found, features, offsets, weights, out, missing="zeros", marks=marks)

    for ids in (read.ids.int(), read.ids[::2], read.ids.view(2, -1)):
        with pytest.raises(ConfigError, match="ids must be"):
            group.find(ids, read.counts, features, missing="zeros")
    with pytest.raises(ConfigError, match="counts must be"):
        group.find(read.ids, read.counts[:1], features, missing="zeros")
    with pytest.raises(ConfigError, match="counts must add up"):
        group.rows(group.find(read.ids, read.counts + 1, features, missing="zeros"), features, missing="zeros")
    negative = group.find(read.ids, torch.tensor([-1, 13]), features, missing="zeros")
    with pytest.raises(ConfigError, match="counts must be >= 0"):
        group.rows(negative, features, missing="zeros")
    with pytest.raises(ConfigError, match="offsets must be"):
        pooled(read.offsets[:-1])
    for wrong, message in (
        ([0, 2, 1, 6, 8, 10, 12], "never fall"),
        ([1, 2, 4, 6, 8, 10, 12], "start at 0"),
        ([0, 2, 4, 6, 8, 10, 11], "end at"),
        ([0, 2, 4, 99, 99, 99, 12], "never fall"),
        ([0, -5, 4, 6, 8, 10, 12], "never fall"),
    ):
        with pytest.raises(ConfigError, match=message):
            pooled(torch.tensor(wrong))
    with pytest.raises(ConfigError, match="weights must be"):
        pooled(weights=torch.ones(5))
    for wrong_out in (torch.empty(3, DIM), torch.empty(3, 2 * DIM).double(), torch.empty(2 * DIM, 3).T):
        with pytest.raises(ConfigError, match="out must be"):
            pooled(out=wrong_out)
    with pytest.raises(ConfigError, match=r"combiner must be 0\.\.4, got 5"):
        pooled(features=Features((0, 1), (SUM, 5), (0, DIM), 2 * DIM))
    for lengths, message in (((1, 0), "length of a feature must be .*, got 0"), ((2, 1), "length of a feature")):
        with pytest.raises(ConfigError, match=message):
            pooled(features=Features((0, 1), (SUM, FIRSTN), (0, DIM), 2 * DIM, lengths=lengths))
    with pytest.raises(ConfigError, match="first column of a feature must be"):
        pooled(features=Features((0, 1), (SUM, FIRSTN), (0, DIM), 2 * DIM, lengths=(1, 2)))
    with pytest.raises(ConfigError, match=r"marks must be contiguous uint8 \[12, 1\], got torch.uint8 \[11, 1\]"):
        pooled(features=Features((0, 1), (SUM, MAX), (0, DIM), 2 * DIM), marks=torch.empty(11, 1, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="first column of a feature must be"):
        pooled(features=Features((0, 1), (SUM, SUM), (0, DIM + 1), 2 * DIM))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dim", [1, 7, 8, 16, 21, 64])
@pytest.mark.parametrize("padding", [None, 3])
def test_largest_and_first_rows_of_bags_of_any_length_are_those_of_plain_torch(dim, padding, threads):
    before = shoal.num_threads()
    shoal.set_num_threads(threads)
    try:
        tables = [shoal.HashTable(dim, seed=number) for number in range(2)]
        for one in tables:  # few values, so that many rows share a maximum
            one.assign(torch.arange(500), torch.randint(-8, 8, (500, dim)).float())
        lengths = torch.randint(0, 30, (3, 400))
        lengths[0, 7], lengths[1, 9], lengths[2, 399] = 3000, 2000, 1000
        columns = (0, 5 * dim, 6 * dim)
        features = Features((1, 0, 1), (FIRSTN, MAX, MAX), columns, 7 * dim, padding, lengths=(5, 1, 1))
        read = Read(tables, features, lengths, upto=600)
        weights = torch.randint(-2, 3, read.ids.shape).float()
        grad = torch.randn(400, features.width)
        for given in (None, weights):
            want = torch.full((400, features.width), 9.0)
            marks, ours = (torch.zeros(marks_shape(read.ids.numel(), dim), dtype=torch.uint8) for _ in range(2))
            pool_columns(read.rows(), read.found(), features, read.offsets, given, want, marks)
            assert torch.equal(read.pooled(given), want)
            assert torch.equal(read.pooled(given, marks=ours), want)
            part = Part(read.found(), features, grad, read.offsets, given, ours)
            assert torch.equal(row_gradients(part, dim), row_gradients(part._replace(marks=marks), dim))
    finally:
        shoal.set_num_threads(before)


def test_rates_are_those_of_the_schedule():
    one = shoal.HashTable(2, optimizer=shoal.Sgd(lr=table.PolynomialDecay(1.0, 10, 0.0)))
    assert one.rates(0) == [1.0]
    assert one.rates(5) == [0.5]


def test_rows_are_read_whole_while_others_write_and_erase():
    tables = make(2)
    ids = torch.arange(2000)
    read = Read(tables, Features((0, 1), (MEAN, MEAN), (0, DIM), 2 * DIM), torch.full((2, 2000), 1), upto=2000)
    stop, failed = threading.Event(), []

    def write() -> None:
        value = 0.0
        while not stop.is_set():
            value += 1
            for one in tables:
                one.assign(ids, torch.full((2000, DIM), value))
            tables[0].erase(ids[:100])

    def look() -> None:
        try:
            for _ in range(200):
                out = read.pooled().view(-1, DIM)
                assert (out == out[:, :1]).all()
        except BaseException as error:
            failed.append(error)

    writer = threading.Thread(target=write, daemon=True)
    readers = [threading.Thread(target=look, daemon=True) for _ in range(3)]
    [thread.start() for thread in (writer, *readers)]
    [thread.join(120) for thread in readers]
    stop.set()
    writer.join(120)
    assert not failed
    assert not any(thread.is_alive() for thread in (writer, *readers))
