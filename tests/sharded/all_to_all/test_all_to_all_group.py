"""Tables over ranks as a group: in threads first, then in processes on gloo."""

import itertools
import os

import pytest
import torch

import shoal
from shoal.comm import InProcessRanks
from shoal.errors import ConfigError, DeadlineError, PeerError
from shoal.sharded import AllToAllHashTable
from shoal.table.protocol import MEAN, SUM, Features, Found, Part, Step, group_of, groups_of
from tests.sharded.helpers import run_ranks
from tests.sharded.ranks import in_ranks, raised, two_ranks
from tests.table.group_conformance import CASES, DIM, Kind

pytestmark = pytest.mark.timeout(600)

T = torch.tensor
TWO = Features(tables=(0, 1), combiners=(SUM, MEAN), columns=(0, DIM), width=2 * DIM)
# over ranks an id is sent once, however often it occurs
KIND = Kind(two_ranks, exact=False, has=frozenset({"raises", "schedule", "initial", "lr_scale"}))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks_of_which_one_has_no_ids(case):
    case(KIND)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_one_rank(case):
    case(Kind(lambda count, **options: [AllToAllHashTable(DIM, name=f"t{k}", **options) for k in range(count)]))


def tables_of(ranks, count=2, **options):
    options = {"optimizer": "sgd", "lr": 1.0, "initializer": "zeros", **options}
    return [AllToAllHashTable(DIM, backend=ranks, name=f"t{k}", **options) for k in range(count)]


def batch(rank, seed):
    """Bags of two features; rank 2 has none, rank 3 has empty bags alone."""
    make = torch.Generator().manual_seed(10 * seed + rank)
    bags = 0 if rank == 2 else 4
    lengths = torch.randint(0, 4, (2, bags), generator=make) * (0 if rank == 3 else 1)
    n = int(lengths.sum())
    return (
        torch.randint(-8, 8, (n,), generator=make),
        lengths.sum(1),
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)]),
        torch.randn(bags, 2 * DIM, generator=make),
    )


def train(ranks, steps=3):
    """The pooled rows of each step, and all rows in the end."""
    tables = tables_of(ranks)
    ((group, _),) = groups_of(tables)
    seen = []
    for step in range(steps):
        ids, counts, offsets, grad = batch(ranks.rank, step)
        found = group.find(ids, counts, TWO, missing="initial")
        out = torch.empty(grad.shape)
        group.pooled(found, TWO, offsets, None, out, missing="initial")
        seen.append(out)
        group.update([Part(found, TWO, grad, offsets)], step=Step(step))
    every = torch.arange(-8, 8)
    return seen, [table.lookup(every) for table in tables], [table.size() for table in tables]


def one_process(world, steps=3):
    """The same with plain tables: with SGD the order of ranks does not matter."""
    from shoal.table.pooling import pool_columns, row_gradients
    from shoal.table.protocol import Found

    plain = [shoal.HashTable(DIM, optimizer="sgd", lr=1.0, initializer="zeros") for _ in range(2)]
    seen = [[] for _ in range(world)]
    for step in range(steps):
        batches = [batch(rank, step) for rank in range(world)]
        for rank, (ids, counts, offsets, grad) in enumerate(batches):
            rows = torch.cat([t.lookup(i) for t, i in zip(plain, ids.split(counts.tolist()), strict=True)])
            out = torch.zeros(grad.shape)
            if out.numel():
                pool_columns(rows, Found(ids, counts, ids[:0], ids[:0]), TWO, offsets, None, out)
            seen[rank].append(out)
        for ids, counts, offsets, grad in batches:
            if ids.numel():
                found = Found(ids, counts, ids[:0], ids[:0])
                rows = row_gradients(Part(found, TWO, grad, offsets), DIM)
                sizes = counts.tolist()
                for table, own, grads in zip(plain, ids.split(sizes), rows.split(sizes), strict=True):
                    table.apply_gradients(own, grads, enable_dedup=True)
    every = torch.arange(-8, 8)
    return seen, [table.lookup(every) for table in plain], [table.size() for table in plain]


def check(results):
    seen, rows, sizes = one_process(len(results))
    for rank, (own, all_rows, all_sizes) in enumerate(results):
        torch.testing.assert_close(own, seen[rank], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(all_rows, rows, rtol=1e-5, atol=1e-5)
        assert all_sizes == sizes


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_give_what_one_process_gives(world):
    check(raised(in_ranks(world, train)))


def test_a_step_has_three_exchanges_forward_and_one_backward():
    def step(ranks):
        group = group_of(tuple(tables_of(ranks, 3)))
        features = Features((0, 1, 2), (SUM,) * 3, (0, DIM, 2 * DIM), 3 * DIM)
        ids, offsets = torch.arange(6) + ranks.rank, T([0, 1, 2, 3, 4, 5, 6])
        made = [ranks.exchanges]
        found = group.find(ids, T([2, 2, 2]), features, missing="initial")
        made.append(ranks.exchanges)
        group.pooled(found, features, offsets, None, torch.empty(2, 3 * DIM), missing="initial")
        made.append(ranks.exchanges)
        group.update([Part(found, features, torch.ones(2, 3 * DIM), offsets)], step=Step())
        made.append(ranks.exchanges)
        return [b - a for a, b in itertools.pairwise(made)]

    assert raised(in_ranks(2, step)) == [[2, 1, 1]] * 2


def test_an_id_of_several_ranks_makes_a_step_per_rank():
    def step(ranks):
        (table,) = tables_of(ranks, 1, optimizer="adagrad")
        found = group_of((table,)).find(T([5, 5]), T([2]), Features(), missing="initial")
        grads = torch.full((2, DIM), 1.0 + ranks.rank)
        group_of((table,)).update([Part(found, Features(), grads)], step=Step())
        return table.lookup(T([5]))

    plain = shoal.HashTable(DIM, optimizer="adagrad", lr=1.0, initializer="zeros")
    for rank in range(3):
        plain.apply_gradients(T([5]), torch.full((1, DIM), 2.0 + 2 * rank))
    for rows in raised(in_ranks(3, step)):
        assert torch.equal(rows, plain.lookup(T([5])))


def test_parts_of_two_finds_make_one_step_per_rank():
    def step(ranks):
        (table,) = tables_of(ranks, 1, optimizer="adagrad")
        group = group_of((table,))
        ids = [T([5, 6]), T([6, 7, 5])]
        founds = [group.find(own, T([own.numel()]), Features(), missing="initial") for own in ids]
        parts = [Part(found, Features(), torch.ones(found.ids.numel(), DIM)) for found in (*founds, founds[0])]
        group.update(parts if ranks.rank else parts[::-1], step=Step())
        return table.lookup(T([5, 6, 7]))

    plain = shoal.HashTable(DIM, optimizer="adagrad", lr=1.0, initializer="zeros")
    for _ in range(2):
        plain.apply_gradients(T([5, 6, 7]), torch.ones(3, DIM) * T([[3.0], [3.0], [1.0]]))
    for rows in raised(in_ranks(2, step)):
        torch.testing.assert_close(rows, plain.lookup(T([5, 6, 7])))


# --- ranks that differ ------------------------------------------------------------------------------------------------


def all_told(results, *matches):
    for result in results:
        assert isinstance(result, PeerError), result
        for match in matches:
            assert match in str(result), f"{match!r} is not in {result}"


def test_finds_of_different_tables_are_refused_on_all_ranks():
    def step(ranks):
        a, b = tables_of(ranks)
        for table in (a, b) if ranks.rank else (b, a):
            table.lookup(T([1, 2, 3]))

    all_told(in_ranks(3, step), "'t0'", "'t1'", "same order")


@pytest.mark.parametrize("sizes", [(3, 3), (3, 40_000)], ids=str)
def test_updates_in_different_order_are_refused_on_all_ranks_and_change_nothing(sizes):
    tables = {}

    def step(ranks):
        (table,) = tables_of(ranks, 1)
        tables[ranks.rank] = table
        group = group_of((table,))
        founds = [group.find(torch.arange(n), T([n]), Features(), missing="initial") for n in sizes]
        for found in founds if ranks.rank else founds[::-1]:
            part = Part(found, Features(), torch.ones(found.ids.numel(), DIM))
            group.update([part], step=Step())

    all_told(in_ranks(2, step), "the update of find 1", "the update of find 2")
    assert [tables[rank].table.size() for rank in range(2)] == [0, 0]


def test_reading_on_one_rank_and_updating_on_another_is_refused():
    def step(ranks):
        (table,) = tables_of(ranks, 1)
        group = group_of((table,))
        found = group.find(torch.arange(50), T([50]), Features(), missing="initial")
        if ranks.rank:
            return group.rows(found, Features(), missing="initial")
        return group.update([Part(found, Features(), torch.ones(50, DIM))], step=Step())

    all_told(in_ranks(2, step), "the update of find 1", "the rows of find 1")


def test_another_missing_is_refused():
    def step(ranks):
        (table,) = tables_of(ranks, 1)
        group_of((table,)).find(T([1]), T([1]), Features(), missing=("initial", "zeros")[ranks.rank])

    all_told(in_ranks(2, step), "same arguments")


def bad_ids(table):
    table.lookup(torch.ones(3))


def bad_counts(table):
    group_of((table,)).find(T([1, 2]), T([3]), Features(), missing="zeros")


def bad_gradients(table):
    table.apply_gradients(T([1, 2]), torch.ones(3, DIM))


def bad_values(table):
    table.assign(T([1, 2]), torch.ones(3, DIM))


def not_a_number(table):
    table.apply_gradients(T([1, 2]), torch.full((2, DIM), float("nan")))


def of_this_group(table, came=slice(None)):
    group = group_of((table,))
    found = group.find(T([1, 2]), T([2]), Features(), missing="zeros")
    found = Found(found.ids, found.counts, found.where, found.came[came])
    group.update([Part(found, Features(), torch.ones(2, DIM))], step=Step())


def of_another_group(table):
    of_this_group(table, slice(0, 0))


CALLS = [
    (bad_ids, lambda t: t.lookup(T([1]))),
    (bad_counts, lambda t: t.lookup(T([1]))),
    (bad_gradients, lambda t: t.apply_gradients(T([1]), torch.ones(1, DIM))),
    (bad_values, lambda t: t.assign(T([1]), torch.ones(1, DIM))),
    (not_a_number, lambda t: t.apply_gradients(T([1, 2]), torch.ones(2, DIM))),
    (of_another_group, of_this_group),
]


def refused(table, rank, bad, good):
    """What was raised, and whether the ranks still understand each other."""
    try:
        (bad if rank == 1 else good)(table)
        text = "nothing was raised"
    except (ConfigError, PeerError) as error:
        text = f"{type(error).__name__}: {error}"
    size = table.size()
    table.assign(T([7]), torch.full((1, DIM), 2.0))
    return text, size, table.lookup(T([7])).tolist()


@pytest.mark.parametrize(("bad", "good"), CALLS, ids=lambda call: call.__name__)
def test_a_rank_that_refuses_its_input_tells_the_others(bad, good):
    def step(ranks):
        (table,) = tables_of(ranks, 1)
        return refused(table, ranks.rank, bad, good)

    results = raised(in_ranks(3, step))
    for rank, (text, size, rows) in enumerate(results):
        assert text.startswith("ConfigError" if rank == 1 else "PeerError"), text
        assert rank == 1 or "rank(s) [1] refused" in text
        assert size == 0
        assert rows == [[2.0] * DIM]


def test_a_rank_that_does_not_come_is_named():
    def step(ranks):
        (table,) = tables_of(ranks, 1)
        if ranks.rank == 0:
            table.lookup(T([1]))

    first, second = in_ranks(2, step, timeout_s=0.5)
    assert isinstance(first, DeadlineError)
    assert "rank(s) [1]" in str(first)
    assert second is None


def test_rows_may_go_and_come_between_find_and_update(tmp_path):
    def step(ranks):
        (table,) = tables_of(ranks, 1)
        group = group_of((table,))
        ids = torch.arange(10)
        table.assign(ids[:0] if ranks.rank else ids, torch.ones(0 if ranks.rank else 10, DIM))
        table.save(tmp_path)
        found = group.find(ids, T([10]), Features(), missing="initial")
        table.table.erase(ids[:5])
        group.update([Part(found, Features(), torch.ones(10, DIM))], step=Step())
        after = table.lookup(ids)[:, 0].tolist()
        table.restore(tmp_path)
        group.update([Part(found, Features(), torch.ones(10, DIM))], step=Step())
        return after, table.lookup(ids)[:, 0].tolist()

    for after, restored in raised(in_ranks(2, step)):
        assert after == [-2.0] * 5 + [-1.0] * 5
        assert restored == [-1.0] * 10


def test_reading_writes_nothing():
    def step(ranks):
        tables = tables_of(ranks, initializer="uniform", seed=3)
        ((group, _),) = groups_of(tables)
        found = group.find(torch.arange(20), T([10, 10]), TWO, missing="initial")
        rows = [group.rows(found, TWO, missing="initial") for _ in range(2)]
        assert torch.equal(*rows)
        return [table.size() for table in tables]

    assert raised(in_ranks(2, step)) == [[0, 0]] * 2


def test_tables_of_other_ranks_or_widths_are_other_groups():
    a, b = InProcessRanks.create_group(1), InProcessRanks.create_group(2)
    tables = [*tables_of(b[0], 2), AllToAllHashTable(7, backend=b[0]), AllToAllHashTable(DIM, backend=b[1])]
    assert [places for _, places in groups_of(tables)] == [[0, 1], [2], [3]]
    assert groups_of(tables)[0][0].traits.collective
    assert AllToAllHashTable(DIM, backend=a[0]).world_size == 1


class Network:
    """A user's own network: nothing but the two methods that are asked of one."""

    def __init__(self, ranks):
        self.rank, self.world_size, self._ranks = ranks.rank, ranks.world_size, ranks

    def all_to_all(self, flat, send_splits, recv_splits=None):
        return self._ranks.all_to_all(flat, send_splits, recv_splits)

    def gather_totals(self, value):
        return self._ranks.gather_totals(value)


def test_a_network_of_the_users_own_will_do():
    check(raised(in_ranks(2, lambda ranks: train(Network(ranks)))))


# --- processes --------------------------------------------------------------------------------------------------------


def in_processes(rank, world, shared):
    os.environ["SHOAL_SHARED_MEMORY"] = shared
    from shoal.comm.ranks.torch_ranks import default_ranks

    ranks = default_ranks()
    trained = train(ranks)
    (table,) = tables_of(ranks, 1)
    texts = [refused(table, rank, bad, good)[0] for bad, good in CALLS]
    group = group_of((table,))
    founds = [group.find(torch.arange(n), T([n]), Features(), missing="initial") for n in (3, 500_000)]
    for found in founds if rank else founds[::-1]:
        part = Part(found, Features(), torch.ones(found.ids.numel(), DIM))
        try:
            group.update([part], step=Step())
        except PeerError as error:
            texts.append(str(error))
    ranks.barrier()
    assert ranks.broadcast(T([rank + 5.0])).tolist() == [5.0]
    return trained, texts


@pytest.mark.parametrize("shared", ["1", "0"], ids=["shared memory", "gloo"])
def test_processes_do_what_threads_do(shared):
    results = run_ranks(2, in_processes, shared)
    check([trained for trained, _ in results])
    for rank, (_, texts) in enumerate(results):
        *refusals, first, second = texts
        assert len(refusals) == len(CALLS)
        assert all(text.startswith("ConfigError" if rank == 1 else "PeerError: rank 0") for text in refusals)
        for text in (first, second):
            assert "the update of find" in text
            assert "same order" in text
