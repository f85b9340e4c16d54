"""Budgets of CPU tables: plain values, then large tables, threads, checkpoints and trackers."""

import threading

import numpy as np
import pytest
import torch

import shoal
from shoal import _core
from shoal.errors import ConfigError
from shoal.table import HashTable, restore_incremental, save_incremental
from shoal.table.checkpoint.tensors import load_table_state, table_state
from shoal.table.tracking import TableTracker

POLICIES = ["lru", "slru", "lfu", "epoch_lru", "epoch_lfu", "score"]


def make(**options):
    given = {"dim": 2, "optimizer": shoal.Sgd(lr=1.0), "initializer": "zeros", **options}
    return shoal.HashTable(given.pop("dim"), **given)


def put(table, *ids, **options):
    ids = torch.tensor(ids)
    table.assign(ids, ids.float().view(-1, 1).repeat(1, table.dim_size), **options)


def held(table):
    return sorted(torch.cat(list(table.all_ids())).tolist())


def check_rows(table):
    """Every row belongs to its id."""
    ids = torch.tensor(held(table))
    assert torch.equal(table.lookup(ids), ids.float().view(-1, 1).repeat(1, table.dim_size))


def test_lru_lets_the_row_go_that_was_written_longest_ago():
    table = make(max_rows=3)
    for id in (1, 2, 3, 1, 4):
        put(table, id)
    assert held(table) == [1, 3, 4]
    assert table.lookup(torch.tensor([2])).tolist() == [[0, 0]]


def test_lfu_lets_the_row_go_that_was_written_least_often_and_of_equal_ones_the_older():
    table = make(max_rows=3, evict=shoal.Lfu())
    put(table, 1)
    for _ in range(5):
        put(table, 2)
    for id in range(10, 14):
        put(table, id)
    assert held(table) == [2, 12, 13]


def test_rows_of_earlier_epochs_leave_first():
    table = make(max_rows=3, evict=shoal.EpochLfu())
    for _ in range(9):
        put(table, 1)
    assert table.next_eviction_epoch() == 2
    put(table, 2, 3)
    put(table, 4)
    assert held(table) == [2, 3, 4]
    daily = make(max_rows=2, evict=shoal.EpochLru(every="1d"))
    put(daily, 1, req_time=1_000_000)
    put(daily, 2, req_time=1_100_000)
    put(daily, 3, req_time=1_100_000)
    assert held(daily) == [2, 3]


def test_scores_decide_and_a_lower_one_can_be_refused():
    table = make(max_rows=3, evict=shoal.Score(admit="if_better"))
    put(table, 1, 2, 3, scores=torch.tensor([1.0, -2.0, 3.0]))
    put(table, 4, scores=-5)
    assert held(table) == [1, 2, 3]
    assert table.eviction_stats().refused == 1
    put(table, 5, scores=0.5)
    assert held(table) == [1, 3, 5]
    table.set_score(9.0)
    put(table, 1)
    put(table, 6)
    put(table, 7)
    assert held(table) == [1, 6, 7]


def test_a_policy_of_ones_own_numbers_the_rows():
    class MostlyEven:
        def scores(self, ids, before, known, *, time_s):
            assert known.dtype is torch.bool
            assert time_s > 0
            return (ids % 2 == 0).float() + before / 100

    table = make(max_rows=4, evict=MostlyEven())
    bag = shoal.nn.HashEmbeddingBag(table, combiner="sum")
    for id in range(12):
        bag(torch.tensor([[id]])).sum().backward()
    assert [id for id in held(table) if id % 2 == 0] == held(table)[:3]


def test_slru_lets_rows_go_first_that_were_written_once():
    table = make(max_rows=4, evict="slru")
    put(table, 1)
    put(table, 1)  # in two calls
    put(table, 2, 2)  # in one
    put(table, 3)
    put(table, 4)
    put(table, 5)
    assert held(table) == [1, 3, 4, 5]  # 2 is 3 calls old and counts as 12, 1 is 4
    for id in range(6, 12):
        put(table, id)
    assert held(table) == [1, 9, 10, 11]  # 9 counts as 12, 1 is 11
    put(table, 12)
    put(table, 10)
    put(table, 13)
    assert held(table) == [10, 11, 12, 13]  # 11 counts as 12, 1 is 13


def test_slru_goes_on_after_a_restore(tmp_path):
    def fill(table, ids):
        for id in ids:
            put(table, id)

    table = make(max_rows=6, evict="slru", name="t")
    fill(table, (1, 2, 1, 2, 3, 4, 5, 6))
    save_incremental(table, tmp_path)
    twin = make(max_rows=6, evict="slru", name="t")
    restore_incremental(twin, tmp_path)
    for id in range(7, 20):
        put(table, id)
        put(twin, id)
        assert held(twin) == held(table)


class Latest:
    """The newest rows are the best, and a new id is better than all before it."""

    admit = "if_better"

    def __init__(self):
        self.now = 0.0

    def scores(self, ids, before, known, *, time_s):
        self.now += 1.0
        return torch.full_like(before, self.now)


@pytest.mark.parametrize("padding", [None, 0])
def test_new_ids_of_a_module_have_the_numbers_of_ones_own_policy(padding):
    table = make(max_rows=21, evict=Latest())
    bag = shoal.nn.HashEmbeddingBag(table, combiner="sum", padding_idx=padding)
    for step in range(5):
        bag([[0, 10 * step + id, 10 * step + id] for id in range(1, 11)]).sum().backward()
    assert table.eviction_stats().refused == 0
    assert held(table)[-20:] == list(range(31, 51))


def test_tables_of_one_module_have_numbers_by_their_own_policies():
    tables = {"a": make(max_rows=10, evict=Latest()), "b": make(max_rows=10), "c": make(max_rows=10, evict=Latest())}
    bag = shoal.nn.HashEmbeddingBag(tables, combiner="sum")
    for step in range(3):
        ids = torch.arange(10 * step, 10 * step + 10).unsqueeze(1)
        bag({"a": ids, "b": ids + 100, "c": ids + 200}).sum().backward()
    assert held(tables["a"]) == list(range(20, 30))
    assert held(tables["b"]) == list(range(120, 130))
    assert held(tables["c"]) == list(range(220, 230))


def test_a_small_budget_of_bytes_is_used_up():
    table = shoal.HashTable(16, max_bytes="5MiB")
    for start in range(0, 60_000, 2_000):
        table.assign(torch.arange(start, start + 2_000), torch.zeros(2_000, 16))
        assert table.memory_bytes() <= 5 << 20
    assert len(table) * 128 > 0.65 * (5 << 20)  # weights and accumulators


def test_numbers_that_mean_nothing_are_refused():
    table = make(max_rows=4, evict=shoal.Score())
    for score in (float("nan"), "high"):
        with pytest.raises(ConfigError, match="must be a number and not NaN"):
            table.set_score(score)
    with pytest.raises(ConfigError, match="every must be at least a second"):
        shoal.EpochLru(every="0d")


def test_pinned_and_young_rows_stay():
    table = make(max_rows=3)
    table.pin(torch.tensor([1, 50]))
    put(table, 1, 2, 3)
    for id in range(4, 9):
        put(table, id)
    assert held(table) == [1, 7, 8]
    assert table.pinned().tolist() == [1, 50]
    table.unpin(torch.tensor([1]))
    put(table, 9)
    assert held(table) == [7, 8, 9]
    young = make(max_rows=2, evict=shoal.Lru(min_age="1h"))
    put(young, 1, req_time=1000)
    put(young, 2, req_time=5000)
    put(young, 3, req_time=5000)
    assert held(young) == [2, 3]
    put(young, 4, req_time=5001)
    assert held(young) == [2, 3]
    assert young.eviction_stats().refused == 1


def test_what_leaves_can_be_had():
    table = make(max_rows=2, optimizer=shoal.Adagrad(lr=1.0))
    put(table, 1, req_time=10)
    put(table, 2, req_time=20)
    with table.collect_evicted(limit=2) as evicted:
        for id in (3, 4, 5):
            put(table, id, req_time=30)
        left = evicted.take()
    assert left.ids.tolist() == [1, 2]
    assert left.lost == 1
    assert left.times.tolist() == [10, 20]
    assert left.values.tolist() == [[1, 1], [2, 2]]
    assert left.states.shape == (2, 2)
    assert len(evicted.take().ids) == 0
    stats = table.eviction_stats()
    assert (stats.evicted, stats.created, stats.hits, stats.age_max_s, stats.age_min_s) == (3, 5, 0, 20, 0)


def test_a_call_that_brings_more_than_fits_keeps_the_budget():
    table = make(max_rows=10)
    put(table, *range(100))
    put(table, *range(200, 250))
    assert table.size() == 10
    assert min(held(table)) >= 200
    assert table.eviction_stats().refused == 130


def test_an_evicted_id_starts_as_new():
    table = make(max_rows=1, optimizer=shoal.Adagrad(lr=1.0), initializer="uniform", seed=3)
    first = table.initial_rows(torch.tensor([7]))
    for id in (7, 8):
        table.apply_gradients(torch.tensor([id]), torch.ones(1, 2))
    assert torch.equal(table.lookup(torch.tensor([7])), torch.zeros(1, 2))
    assert torch.equal(table.lookup(torch.tensor([7]), insert_missing=True), first)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_rows": 0}, r"max_rows must be 1\.\.4294967280, got 0"),
        ({"max_bytes": "8XB"}, "text such as '8GiB' or '500MB', got '8XB'"),
        ({"max_bytes": 0}, "max_bytes must be above 0 and below 4611686018427387904 bytes, got 0"),
        ({"max_bytes": "9999999TiB"}, "below 4611686018427387904 bytes, got '9999999TiB'"),
        ({"max_bytes": "10KiB"}, "max_bytes must be at least 160 KiB"),
        ({"evict": "lru"}, "needs max_rows or max_bytes"),
        ({"max_rows": 1, "evict": "mru"}, "evict must be one of .*, got 'mru'"),
        ({"max_rows": 1, "evict": shoal.Lru}, "a policy such as shoal.Lru"),
        ({"expire_after": "90m"}, "whole number of hours"),
    ],
)
def test_mistakes_are_explained(options, text):
    with pytest.raises(ConfigError, match=text):
        make(**options)


def test_calls_for_budgets_and_scores_are_refused_without_them():
    with pytest.raises(ConfigError, match="pin needs a table with max_rows or max_bytes"):
        make().pin(torch.tensor([1]))
    with pytest.raises(ConfigError, match=r"scores need a budget with evict=Score\(\)"):
        put(make(max_rows=1), 1, scores=1.0)
    with pytest.raises(ConfigError, match="one number per id, 1"):
        put(make(max_rows=1, evict="score"), 1, scores=torch.zeros(2))


def test_expiry_counts_hours():
    table = make(expire_after="12h")
    put(table, 1, req_time=1000)
    put(table, 2, req_time=1000 + 12 * 3600 - 1)
    assert table.evict(1000 + 12 * 3600) == 1
    assert held(table) == [2]


# --- large tables: stripes keep their own rows ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_large_table_keeps_its_limit_and_its_rows(policy):
    table, rng = make(max_rows=20_000, evict=policy), np.random.default_rng(0)
    for _ in range(12):
        ids = torch.from_numpy((rng.zipf(1.2, 10_000) % 200_000).astype(np.int64))
        table.assign(ids, ids.float().view(-1, 1).repeat(1, 2))
        assert table.size() <= 20_000
    assert table.size() > 19_000
    assert table.eviction_stats().evicted > 1000
    check_rows(table)


@pytest.mark.parametrize("max_bytes", ["200KiB", "3MiB"])
def test_bytes_never_pass_the_budget(max_bytes):
    budget = shoal.MemoryBudget(max_bytes)
    table = make(max_bytes=budget)
    for seed in range(20):
        ids = torch.randint(0, 10**6, (7000,), generator=torch.Generator().manual_seed(seed))
        table.assign(ids, ids.float().view(-1, 1).repeat(1, 2))
        assert table.memory_bytes() == budget.memory_bytes() <= budget.max_bytes
    assert budget.memory_bytes() > 0.7 * budget.max_bytes
    check_rows(table)
    table.evict(10**10)
    table.clear()
    assert table.size() == 0
    assert table.memory_bytes() == budget.memory_bytes() < 400 << 10


def test_tables_share_a_budget():
    budget = shoal.MemoryBudget("2MiB")
    tables = [make(max_bytes=budget) for _ in range(3)]
    for seed in range(20):
        for table in tables:
            put(table, *range(seed * 2000, seed * 2000 + 2000))
            assert sum(table.memory_bytes() for table in tables) == budget.memory_bytes() <= 2 << 20
    assert all(table.size() > 1000 for table in tables)
    del table, tables
    assert budget.memory_bytes() == 0


def test_a_table_that_fills_a_shared_budget_is_restored_and_cleared_within_it(tmp_path):
    budget = shoal.MemoryBudget("4MiB")
    table, other = make(max_bytes=budget), make(max_bytes=budget)
    put(other, *range(1000))
    for begin in range(0, 100_000, 5000):
        put(table, *range(begin, begin + 5000))
    kept = held(table)
    assert budget.memory_bytes() > 0.9 * budget.max_bytes
    table.save(tmp_path / "t")
    state = table_state(table)
    put(table, *range(200_000, 205_000))
    for restore, source in ((HashTable.restore, tmp_path / "t"), (load_table_state, state)):
        restore(table, source)
        assert held(table) == kept
        assert table.memory_bytes() + other.memory_bytes() == budget.memory_bytes() <= budget.max_bytes
    check_rows(table)
    put(table, *range(300_000, 305_000))
    assert table.memory_bytes() + other.memory_bytes() == budget.memory_bytes() <= budget.max_bytes
    table.clear()
    assert table.memory_bytes() + other.memory_bytes() == budget.memory_bytes() < 1 << 20
    assert other.restore(tmp_path / "t").size() == len(kept)  # there is room now
    del table, other
    assert budget.memory_bytes() == 0


def test_a_restore_takes_only_what_other_tables_leave_of_a_shared_budget(tmp_path):
    large = make(max_bytes="4MiB")
    for begin in range(0, 100_000, 5000):
        put(large, *range(begin, begin + 5000))
    large.save(tmp_path / "t")
    budget = shoal.MemoryBudget("4MiB")
    table, other = make(max_bytes=budget), make(max_bytes=budget)
    put(other, *range(20_000))
    table.restore(tmp_path / "t")
    assert 1000 < table.size() < large.size()
    assert table.eviction_stats().refused == large.size() - table.size()
    assert table.memory_bytes() + other.memory_bytes() == budget.memory_bytes() <= budget.max_bytes
    check_rows(table)
    check_rows(other)


def hit_rates(policy, stream, capacity):
    """Of a table, and of the exact policy, over the second half of batches of distinct ids."""
    table, hits, exact_hits, seen = make(dim=1, max_rows=capacity, evict=policy), 0, 0, 0
    scores, clock = {}, 0
    for number, ids in enumerate(stream):
        counted = number >= len(stream) // 2
        before = table.eviction_stats().hits
        table.assign(torch.from_numpy(ids), torch.zeros(len(ids), 1))
        known = [id for id in ids.tolist() if id in scores]
        for id in ids.tolist():
            clock += 1
            scores[id] = (scores[id][0] + 1 if id in scores and policy != "lru" else 1, number, clock)
        if policy == "slru":
            order = sorted(scores, key=lambda id: (scores[id][1] - number) * (1 if scores[id][0] > 1 else 4))
        else:
            order = sorted(scores, key=scores.__getitem__)
        for id in order[: max(0, len(scores) - capacity)]:
            del scores[id]
        if counted:
            hits += table.eviction_stats().hits - before
            exact_hits += len(known)
            seen += len(ids)
    return hits / seen, exact_hits / seen


@pytest.mark.parametrize("policy", ["lru", "slru", "lfu"])
def test_hit_rates_are_near_those_of_the_exact_policy(policy):
    rng = np.random.default_rng(1)
    shares = np.arange(1, 100_001) ** -1.05
    stream = [np.unique(rng.choice(100_000, 2000, p=shares / shares.sum())) for _ in range(60)]
    ours, exact = hit_rates(policy, stream, 10_000)
    assert abs(ours - exact) < 0.015, (ours, exact)


def test_the_miss_ratio_curve_agrees_with_what_tables_miss():
    rng = np.random.default_rng(2)
    shares = np.arange(1, 20_001) ** -1.0
    stream = [torch.from_numpy(rng.choice(20_000, 2000, p=shares / shares.sum())) for _ in range(60)]
    tables = {rows: make(dim=1, max_rows=rows) for rows in (2000, 12_000)}
    for ids in stream:
        for table in tables.values():
            table.assign(ids, torch.zeros(len(ids), 1))
    curve = tables[12_000].miss_ratio_curve()
    for rows, table in tables.items():
        assert abs(curve.at(rows) - (1 - table.eviction_stats().hit_rate)) < 0.08
    assert curve.misses == sorted(curve.misses, reverse=True)


def test_threads_write_and_read_a_full_table():
    table, errors = make(max_rows=9000), []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(20):
                ids = torch.randint(0, 50_000, (5000,), generator=generator)
                table.assign(ids, ids.float().view(-1, 1).repeat(1, 2))
                rows, found = table.find(ids)
                assert torch.equal(rows[found], ids[found].float().view(-1, 1).repeat(1, 2))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert table.size() <= 9000
    check_rows(table)


# --- checkpoints and followers ----------------------------------------------------------------------------------------


def test_evicted_rows_leave_incremental_checkpoints(tmp_path):
    table = make(max_rows=3, name="t")
    for id in (1, 2, 3):
        put(table, id)
    save_incremental(table, tmp_path)
    put(table, 4)
    put(table, 5)
    save_incremental(table, tmp_path)
    other = make(max_rows=3, name="t")
    restore_incremental(other, tmp_path)
    assert held(other) == [3, 4, 5]
    put(other, 6)
    assert other.size() == 3


def test_a_smaller_budget_restores_the_newest_rows(tmp_path):
    table = make(max_rows=1000, name="t")
    for id in range(1000):
        put(table, id, req_time=1000 + id)
    table.save(str(tmp_path / "t"))
    small = make(max_rows=100, name="t")
    small.restore(str(tmp_path / "t"))
    assert held(small) == list(range(900, 1000))
    put(small, 5000)
    assert 900 not in held(small)
    assert 901 in held(small)


def test_followers_hear_of_evicted_rows():
    table = make(max_rows=2)
    tracker = TableTracker(table)
    put(table, 1)
    put(table, 2)
    tracker.take()
    put(table, 3)
    assert sorted(tracker.take().ids.tolist()) == [1, 3]


def test_counters_and_pins_come_back_with_the_training_state():
    table = make(max_rows=2, evict="epoch_lru")
    table.next_eviction_epoch()
    table.pin(torch.tensor([9]))
    for id in range(4):
        put(table, id)
    other = make(max_rows=2, evict="epoch_lru")
    other.set_training_state(table.training_state())
    assert other.eviction_stats() == table.eviction_stats()
    assert other.pinned().tolist() == [9]
    assert _core.eviction_epoch(other._native) == 2


def test_limits_reach_servers_and_ranks_and_shoal_train(tmp_path):
    from shoal.sharded import AllToAllHashTable
    from shoal.sharded.ps.client.tables import load_tables
    from shoal.train.loop.table_config import TableConfig

    (tmp_path / "tables.toml").write_text('[tables.item]\ndim = 4\nmax_bytes = "2MiB"\nevict = "lfu"\n')
    config, _ = load_tables(tmp_path / "tables.toml")["item"]
    served = shoal.HashTable.from_config(config, name="item")
    put(served, *range(1000))
    assert (served.max_bytes, served.has_budget) == (2 << 20, True)
    trained = make(**{**TableConfig(max_rows=5, evict="epoch_lru").arguments(), "dim": 4})
    put(trained, *range(4))
    put(trained, *range(10, 14))
    assert trained.size() == 5
    with pytest.raises(ConfigError, match=r"\[table\] evict must be one of"):
        TableConfig(max_rows=5, evict="mru")
    with pytest.raises(ConfigError, match="spread by row"):
        AllToAllHashTable(4, way="data", max_rows=5)


def test_shoal_table_and_shoal_plan_know_budgets(tmp_path, capsys):
    from shoal.cli.main import main
    from shoal.plan.config import TablePlan

    table = make(max_rows=20, name="t")
    for start in range(0, 9000, 10):
        put(table, 1, *range(start, start + 10), req_time=1000 + start)
    save_incremental(table, tmp_path)
    assert main(["table", "stat", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "budget 20 rows; 20 rows are held" in shown
    assert "rows evicted" in shown
    assert "would miss" in shown
    plan = TablePlan(name="t", dim=4, ids_per_sample=1, ids_per_day=100, expire_days=30, max_rows=500)
    assert plan.rows == 500


def test_a_full_table_comes_back_whole(tmp_path):
    table, generator = make(max_rows=10_000, name="t"), torch.Generator().manual_seed(0)
    for _ in range(4):
        for _ in range(3):
            put(table, *torch.randint(0, 100_000, (4000,), generator=generator).tolist())
        save_incremental(table, tmp_path)
    other = make(max_rows=10_000, name="t")
    restore_incremental(other, tmp_path)
    assert held(other) == held(table)
    put(other, *range(200_000, 204_000))
    assert other.size() <= 10_000
    check_rows(other)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", ["save", "incremental", "state_dict"])
def test_a_restored_table_evicts_in_the_same_order_as_before(policy, way, tmp_path):
    table, other = (make(max_rows=40, evict=policy, name="t") for _ in range(2))
    rng, scores = np.random.default_rng(0), None
    for step in range(30):
        ids = rng.integers(0, 60, 9).tolist()
        if policy == "score":
            scores = torch.from_numpy(rng.random(9).astype(np.float32))
        put(table, *ids, req_time=1000 + step, **({} if scores is None else {"scores": scores}))
        if step == 15 and way == "incremental":
            save_incremental(table, tmp_path)
        if step == 20 and "epoch" in policy:
            table.next_eviction_epoch()
    if way == "save":
        table.save(str(tmp_path / "t"))
        other.restore(str(tmp_path / "t"))
    elif way == "incremental":
        save_incremental(table, tmp_path)
        restore_incremental(other, tmp_path)
    else:
        shoal.nn.HashEmbeddingBag(other).load_state_dict(shoal.nn.HashEmbeddingBag(table).state_dict())
    assert held(other) == held(table)
    for step in range(10):
        ids = rng.integers(100, 200, 5).tolist()
        for one in (table, other):
            put(one, *ids, req_time=2000 + step, **({"scores": 0.5} if policy == "score" else {}))
        assert held(other) == held(table)


def test_rows_of_another_policy_or_of_no_budget_count_as_written_at_their_times(tmp_path):
    for evict, budget in (("lfu", {"max_rows": 40, "evict": "lfu"}), ("none", {})):
        table = make(name="t", **budget)
        for id in range(40):
            put(table, id, req_time=1000 + id)
        table.save(str(tmp_path / evict))
        other = make(max_rows=40, name="t")
        other.restore(str(tmp_path / evict))
        put(other, *range(100, 110))
        assert held(other) == [*range(10, 40), *range(100, 110)]


def test_a_state_dict_does_not_pass_the_budget():
    table, small = make(), make(max_rows=10)
    for id in range(30):
        put(table, id, req_time=1000 + id)
    shoal.nn.HashEmbeddingBag(small).load_state_dict(shoal.nn.HashEmbeddingBag(table).state_dict())
    assert held(small) == list(range(20, 30))
    assert small.eviction_stats().refused == 20
    put(small, 100)
    assert held(small) == [*range(21, 30), 100]


def test_rows_of_ids_that_a_call_brings_stay():
    table = make(max_rows=4, evict="score")
    put(table, 1, 2, 3, 4, scores=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    put(table, 9, 8, 1, scores=torch.tensor([0.0, 0.0, 0.5]))
    assert held(table) == [1, 4, 8, 9]
