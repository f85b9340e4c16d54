"""Admission filters and touched keys: rules, worked examples, native against reference, threads."""

import threading
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import table
from shoal.table import (
    HashFilter,
    ProbabilisticFilter,
    SlidingHashFilter,
    SlotOccurrenceThresholdConfig,
    TouchedKeySet,
    create_dummy_hash_filter,
    create_hash_filters,
    intercept_gradient,
)
from shoal.table.reference.filters import (
    ReferenceHashFilter,
    ReferenceSlidingHashFilter,
    ReferenceTouchedKeySet,
)


def thresholds(default=0, **slots):
    config = SlotOccurrenceThresholdConfig(default_occurrence_threshold=default)
    for slot, threshold in slots.items():
        config.slot_occurrence_thresholds.add(slot=int(slot[1:]), occurrence_threshold=threshold)
    return config.SerializeToString()


def test_the_first_t_occurrences_are_dropped_and_the_next_is_admitted():
    f = SlidingHashFilter(1000, 7, thresholds(2))
    assert [f.should_be_filtered(9, 1) for _ in range(4)] == [True, True, False, False]


def test_a_batched_count_is_dropped_the_first_time_whatever_it_is():
    f = SlidingHashFilter(1000, 7, thresholds(2))
    assert f.should_be_filtered(9, 3)
    assert not f.should_be_filtered(9, 1)


def test_threshold_zero_admits_and_counts_nothing():
    f = SlidingHashFilter(1000, 7, thresholds(0, s3=1))
    assert not f.should_be_filtered(5, 1)
    assert f.num_elements == 0
    in_slot_3 = (3 << 48) | 5
    assert f.should_be_filtered(in_slot_3)
    assert not f.should_be_filtered(in_slot_3)
    assert f.should_be_filtered(6, 1, threshold=1)


def test_minus_one_is_in_the_last_slot():
    f = SlidingHashFilter(1000, 7, thresholds(0, s32767=1))
    assert f.should_be_filtered(-1)
    assert not f.should_be_filtered(0)


def test_thresholds_that_could_never_pass_are_refused():
    with pytest.raises(ValueError, match="16"):
        SlidingHashFilter(1000, 7, thresholds(16))
    with pytest.raises(ValueError, match="20"):
        SlidingHashFilter(1000, 7, thresholds(1, s4=20))
    with pytest.raises(ValueError, match="32768"):
        SlidingHashFilter(1000, 7, thresholds(1, s32768=2))
    with pytest.raises(ValueError, match="serialized"):
        SlidingHashFilter(1000, 7, b"\xff\xff")
    ProbabilisticFilter(config=thresholds(1000))


def test_sizes_of_blocks():
    assert HashFilter(100).total_size == 150
    f = SlidingHashFilter(10, 2)
    assert (f.capacity, f.split_num) == (300, 5)
    assert f.get_block(0).total_size == 90
    assert len(f.get_block(4).cells) == 154
    with pytest.raises(ValueError, match="block"):
        f.get_block(5)
    with pytest.raises(ValueError, match="capacity"):
        HashFilter(0)


def test_a_block_may_have_fewer_home_positions_than_ids():
    block, reference = HashFilter(100, 0.25), ReferenceHashFilter(100, 0.25)
    assert block.total_size == 25
    ids = [i << 17 for i in range(200)]
    assert [block.add(i) for i in ids] == [reference.add(i) for i in ids]
    assert block.failure_count == reference.failure_count > 0
    with pytest.raises(ValueError, match="fill_rate"):
        HashFilter(1, 0.5)


def test_a_block_saturates_and_reports_full():
    f = HashFilter(3)
    assert f.add(1, 20) == 0
    assert f.get(1) == 15
    assert f.add(1, 1) == 15
    assert not f.full
    f.add(1 << 40, 1)
    assert f.full
    assert f.num_elements == 2


ids = st.one_of(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 40))


@given(st.integers(1, 40), st.lists(st.tuples(ids, st.integers(1, 20)), max_size=300), st.integers(1, 64))
def test_a_block_matches_its_reference(capacity, adds, max_step):
    ours, reference = HashFilter(capacity, 1.0, max_step), ReferenceHashFilter(capacity, 1.0, max_step)
    for id, count in adds:
        assert ours.add(id, count) == reference.add(id, count)
        assert ours.get(id) == reference.get(id)
    assert ours.num_elements == reference.num_elements
    assert ours.failure_count == reference.failure_count
    assert ours.full == reference.full


@given(st.integers(1, 9), st.integers(0, 400), st.integers(0, 1 << 32))
def test_the_sliding_filter_matches_its_reference(split_num, spread, seed):
    random = Random(seed)
    ours, reference = SlidingHashFilter(300, split_num), ReferenceSlidingHashFilter(300, split_num)
    for _ in range(1500):
        id = random.randrange(-spread * 5, spread * 20 + 1) * 0x9E3779B97F4
        assert ours.get(id) == reference.get(id)
        count = random.randrange(1, 18)
        assert ours.add(id, count) == reference.add(id, count)
    assert (ours.head, ours.head_increment) == (reference.head, reference.head_increment)
    assert ours.failure_count == reference.failure_count
    assert ours.num_elements == reference.num_elements


def test_the_sliding_filter_forgets_what_is_old():
    f = SlidingHashFilter(300, 5)
    f.add(-7, 5)
    for i in range(120):
        f.add(i << 17, 1)
    assert f.get(-7) == 5  # one or two blocks back
    for i in range(120, 2000):
        f.add(i << 17, 1)
    assert f.get(-7) == 0


def test_state_moves_to_another_filter():
    one, two = SlidingHashFilter(1000, 6), SlidingHashFilter(300, 6)
    random = np.random.default_rng(3)
    keys = random.integers(-(1 << 60), 1 << 60, 900).tolist()
    for key in keys:
        one.add(key, 3)
    for block in range(one.split_num):
        two.set_block(block, one.get_block(block))
    two.set_head(one.head, one.head_increment, one.failure_count)
    assert [two.get(key) for key in keys] == [one.get(key) for key in keys]
    assert two.num_elements == one.num_elements
    assert [two.add(key, 1) for key in keys] == [one.add(key, 1) for key in keys]
    with pytest.raises(ValueError, match="head"):
        two.set_head(6, 0, 0)
    state = one.get_block(0)
    state.cells = state.cells[:-1]
    with pytest.raises(ValueError, match="cells"):
        two.set_block(0, state)


class Fake:
    def __init__(self, *known):
        self.known = known

    def contains(self, ids):
        return torch.tensor([id in self.known for id in ids.tolist()])


@pytest.mark.parametrize(
    ("equal", "count", "threshold", "rate"),
    [(False, 1, 4, 0.25), (False, 9, 4, 1.0), (True, 1, 4, 1 - 0.05**0.25), (True, 4, 4, 0.95), (False, 1, 0, 1.0)],
)
def test_probabilistic_admission_rates(equal, count, threshold, rate):
    f = ProbabilisticFilter(equal, thresholds(threshold), seed=5)
    admitted = np.mean([not f.should_be_filtered(7, count, table=Fake()) for _ in range(20000)])
    assert admitted == pytest.approx(rate, abs=0.01)


def test_probabilistic_filter_lets_known_ids_and_tableless_questions_pass():
    f = ProbabilisticFilter(False, thresholds(10**6))
    assert not any(f.should_be_filtered(7, 1) for _ in range(50))
    assert not any(f.should_be_filtered(7, 1, table=Fake(7)) for _ in range(50))
    assert any(f.should_be_filtered(7, 1, table=Fake(8)) for _ in range(50))


def test_created_filters_have_kinds_and_names():
    kinds = [type(f).__name__ for f in create_hash_filters(2, True)]
    assert kinds == ["SlidingHashFilter"] * 2
    assert [f.name for f in create_hash_filters(2, True)] == ["MonolithHashFilter_0", "MonolithHashFilter_1"]
    assert [f.name for f in create_hash_filters(0, True)] == ["MonolithHashFilter"]
    (random,) = create_hash_filters(0, True, filter_type="probabilistic_filter", filter_equal_probability=True)
    assert random.equal_probability
    assert isinstance(create_hash_filters(0, True, filter_type="no_filter")[0], table.DummyHashFilter)
    dummies = create_hash_filters(3, False, thresholds(5), filter_type="whatever")
    assert len(dummies) == 3
    assert not dummies[0].should_be_filtered(1, 1)
    with pytest.raises(ValueError, match="bloom"):
        create_hash_filters(0, True, filter_type="bloom")


def test_default_sliding_filter_takes_no_memory_before_use():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (f,) = create_hash_filters(0, True)
    f.add(1, 1)
    assert f.get_block(3).total_size == 60_000_000
    del f
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


def test_intercepted_gradients_of_dropped_ids_are_zero():
    f = SlidingHashFilter(1000, 7, thresholds(1))
    rows = torch.ones(3, 2, requires_grad=True)
    out = intercept_gradient(f, torch.tensor([4, 4, 5]), rows)
    assert torch.equal(out, rows)
    (out * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
    assert rows.grad.tolist() == [[0, 0], [2, 2], [0, 0]]
    assert f.get(4) == 2
    with pytest.raises(ValueError, match="int64"):
        intercept_gradient(f, torch.tensor([1.0]), rows)


class OddIds:
    """A filter of a user's own."""

    def should_be_filtered(self, id, count):
        return id % 2 == 1


@pytest.mark.parametrize(
    ("own", "passed"),
    [
        (OddIds(), [True, False, True]),
        (ProbabilisticFilter(False, thresholds(10**6)), [True] * 3),
        (create_dummy_hash_filter(), [True] * 3),
    ],
    ids=["own", "probabilistic", "dummy"],
)
def test_any_filter_intercepts_gradients_as_it_answers_without_a_table(own, passed):
    rows = torch.ones(3, 2, requires_grad=True)
    intercept_gradient(filter=own, ids=torch.tensor([4, 5, 6]), embeddings=rows).sum().backward()
    assert rows.grad[:, 0].bool().tolist() == passed


def test_touched_keys_worked_example():
    keys = TouchedKeySet(capacity=3)
    assert keys.insert(torch.tensor([1, 2, 3, 4, 5, 6])) == 4
    assert set(keys.steal().tolist()) == {5, 6}
    assert len(keys) == 0
    assert keys.steal().tolist() == []
    assert keys.insert([1]) == 0


@given(st.integers(0, 20), st.lists(st.lists(ids, max_size=30), max_size=20), st.data())
def test_touched_keys_match_their_reference(capacity, batches, data):
    ours, reference = TouchedKeySet(capacity), ReferenceTouchedKeySet(capacity)
    for batch in batches:
        assert ours.insert(batch) == reference.insert(batch)
        if data.draw(st.booleans()):
            assert set(ours.steal().tolist()) == reference.steal()
    assert len(ours) == len(reference.keys)


def test_touched_keys_hold_pairs_of_id_and_table():
    keys = TouchedKeySet()
    keys.insert([1, 2], table=0)
    keys.insert([2, 2], table=7)
    stolen, tables = keys.steal_pairs()
    assert sorted(zip(stolen.tolist(), tables.tolist(), strict=True)) == [(1, 0), (2, 0), (2, 7)]


def test_filters_and_touched_keys_are_safe_under_threads():
    f, keys = SlidingHashFilter(100_000, 7, thresholds(15)), TouchedKeySet()

    def work(part):
        for i in range(200):
            f.add(i * 131072, 1)
        keys.insert(torch.arange(part * 1000, part * 1000 + 2000))

    threads = [threading.Thread(target=work, args=(part,)) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {f.get(i * 131072) for i in range(200)} == {8}
    assert sorted(keys.steal().tolist()) == list(range(9000))
