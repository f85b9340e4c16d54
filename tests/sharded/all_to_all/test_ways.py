"""Tables by table, by column and as copies: the rules of a group in threads, then models, checkpoints, processes."""

import functools

import pytest
import torch

import shoal
from shoal.errors import ConfigError, DataError, PeerError
from shoal.nn import EmbeddingBagCollection, HashEmbedding
from shoal.sharded import AllToAllHashTable
from tests.sharded.ranks import in_ranks, raised, two_ranks
from tests.table.group_conformance import CASES, Kind

T = torch.tensor
HAS = frozenset({"raises", "schedule", "initial", "lr_scale"})
WAYS = {"table": ("table:0", "table:1"), "mixed": ("column", "table:1"), "data": ("data",)}


def kind(name, bags):
    return Kind(functools.partial(two_ranks, ways=WAYS[name]), exact=False, has=HAS, bags=bags)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize(("name", "bags"), [("table", True), ("mixed", False), ("mixed", True), ("data", False)])
def test_two_ranks_of_which_one_has_no_ids(case, name, bags):
    case(kind(name, bags))


# --- models -----------------------------------------------------------------------------------------------------------

DIMS = {"a": 4, "b": 8, "c": 8, "d": 3, "e": 8}
SPREAD = {"a": "row", "b": "table:1", "c": "column", "d": "data", "e": "column:2,0"}
FEATURES = {"x": "a", "y": "b", "z": "b", "v": "c", "w": "d", "u": "e"}
COMBINERS = {"x": "sum", "y": "mean", "z": "sqrtn", "v": "sum", "w": "mean", "u": "sum"}


def tables_of(ranks, spread, **options):
    options = {"optimizer": shoal.Adam(lr=0.1), "seed": 5, **options}
    return {
        name: AllToAllHashTable(dim, backend=ranks, name=name, way=spread[name], **options)
        for name, dim in DIMS.items()
    }


def batch(rank, step):
    """Bags of all features; rank 1 has none in step 1."""
    make = torch.Generator().manual_seed(100 * step + rank)
    bags = 0 if (rank, step) == (1, 1) else 3 + rank
    return {name: [torch.randint(0, 30, (n,), generator=make).tolist() for n in
                   torch.randint(0, 5, (bags,), generator=make).tolist()] for name in FEATURES}  # fmt: skip


def loss_of(out, rank, step):
    weights = torch.rand(out.shape, generator=torch.Generator().manual_seed(7 * step + rank))
    return (out * weights).sum()


def train(ranks, spread, steps=3, folder=None):
    """The outputs of each step, all rows in the end, and the exchanges of each step."""
    tables = tables_of(ranks, spread)
    model = EmbeddingBagCollection(tables, FEATURES, combiner=COMBINERS)
    seen, made = [], []
    for step in range(steps):
        before = ranks.exchanges
        out = model(batch(ranks.rank, step))
        middle = ranks.exchanges
        loss_of(out, ranks.rank, step).backward()
        made.append((middle - before, ranks.exchanges - middle))
        seen.append(out.detach())
    if folder is not None:
        for name, table in tables.items():
            table.save(folder / name)
    every = torch.arange(30)
    return seen, {name: table.lookup(every) for name, table in tables.items()}, made


@functools.cache
def one_process(world, steps=3):
    """The same with plain tables: forwards of all ranks, then their updates one after another."""
    tables = {name: shoal.HashTable(dim, name=name, optimizer=shoal.Adam(lr=0.1), seed=5) for name, dim in DIMS.items()}
    model = EmbeddingBagCollection(tables, FEATURES, combiner=COMBINERS)
    seen = [[] for _ in range(world)]
    for step in range(steps):
        outs = [model(batch(rank, step)) for rank in range(world)]
        for rank, out in enumerate(outs):
            seen[rank].append(out.detach())
            loss_of(out, rank, step).backward()
    every = torch.arange(30)
    return seen, {name: table.lookup(every) for name, table in tables.items()}


@pytest.mark.parametrize("spread", [SPREAD, dict.fromkeys(DIMS, "column"), dict.fromkeys(DIMS, "data")],
                         ids=["mixed", "column", "data"])  # fmt: skip
def test_ranks_give_what_one_process_gives_with_three_exchanges_forward_and_one_backward(spread):
    world = 3
    want, rows = one_process(world)
    for rank, (seen, all_rows, made) in enumerate(raised(in_ranks(world, train, spread))):
        torch.testing.assert_close(seen, want[rank], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(all_rows, rows, rtol=1e-5, atol=1e-6)
        assert made == [(1 if set(spread.values()) == {"data"} else 3, 1)] * 3


def test_copies_are_the_same_to_the_last_bit():
    def rows(ranks):
        table = AllToAllHashTable(3, backend=ranks, way="data", optimizer="adagrad", seed=1)
        for step in range(4):
            make = torch.Generator().manual_seed(step + 10 * ranks.rank)
            table.apply_gradients(torch.randint(9, (20,), generator=make), torch.randn(20, 3, generator=make), step)
        return table.table.lookup(torch.arange(9)), table.size()

    first, *others = raised(in_ranks(3, rows))
    assert all(torch.equal(first[0], other[0]) for other in others)
    assert {size for _, size in (first, *others)} == {9}


def test_sequences_weights_and_inserted_rows():
    def read(ranks, way):
        table = AllToAllHashTable(6, backend=ranks, way=way, seed=3, optimizer=shoal.Sgd(lr=1.0), name=way)
        ids = T([[5, 7, 5], [9, 9, 9]]) + ranks.rank
        sequences = HashEmbedding(table)
        rows = sequences(ids)
        rows.sum().backward()
        bags = EmbeddingBagCollection({"t": table})
        weights = torch.arange(6.0).view(2, 3)
        pooled = bags({"t": ids}, {"t": weights})
        pooled.sum().backward()
        table.lookup(T([100 + ranks.rank]), insert_missing=True)
        return rows.detach(), pooled.detach(), table.lookup(torch.arange(5, 12)), table.size()

    want = raised(in_ranks(2, read, "row"))
    for way in ("table:1", "column", "data"):
        for own, judge in zip(raised(in_ranks(2, read, way)), want, strict=True):
            torch.testing.assert_close(own, judge, rtol=1e-5, atol=1e-6)


# --- bad gradients ----------------------------------------------------------------------------------------------------


def bad_step(ranks, way, combiner, modes, folder):
    """A step with ids of each rank's own; one number of rank 0's gradient of table "b" is NaN."""
    tables = {
        name: AllToAllHashTable(
            4, backend=ranks, name=name, way=way, optimizer="sgd", lr=1.0, initializer="zeros", on_bad_gradient=mode
        )
        for name, mode in modes.items()
    }
    model = EmbeddingBagCollection(tables, combiner=combiner)
    out = model(dict.fromkeys(tables, T([[1], [2]]) + 2 * ranks.rank))
    grad = torch.ones_like(out)
    grad[0, 5] = float("nan") if ranks.rank == 0 else 1.0
    out.backward(grad)
    for name, table in tables.items():
        table.save(folder / name)
    return [table.lookup(T([1, 2, 3, 4])) for table in tables.values()]


@pytest.mark.parametrize("combiner", ["sum", "max"])
@pytest.mark.parametrize("way", ["row", "table:1", "column", "data"])
def test_a_bad_gradient_is_left_to_the_table_that_skips_it(way, combiner, tmp_path):
    for a, b in raised(in_ranks(2, bad_step, way, combiner, {"a": "raise", "b": "skip"}, tmp_path)):
        assert torch.equal(a, torch.full((4, 4), -1.0))
        assert torch.equal(b, T([0.0, -1.0, -1.0, -1.0])[:, None].expand(4, 4))


@pytest.mark.parametrize("way", ["row", "table:1", "column", "data"])
def test_a_bad_gradient_is_refused_by_the_name_of_its_table(way, tmp_path):
    refusal, other = in_ranks(2, bad_step, way, "sum", {"a": "raise", "b": "raise"}, tmp_path)
    assert isinstance(refusal, ConfigError)
    assert "table 'b': a gradient holds NaN" in str(refusal)
    assert isinstance(other, PeerError)


@pytest.mark.parametrize("mode", ["raise", "skip"])
@pytest.mark.parametrize("way", ["row", "table:1", "column", "data"])
def test_a_gradient_that_float16_cannot_hold_on_the_way_is_a_bad_one(way, mode, tmp_path):
    def step(ranks):
        table = AllToAllHashTable(
            4, backend=ranks, way=way, name="t", optimizer="sgd", lr=1.0, initializer="zeros", on_bad_gradient=mode
        )
        table.exchange.backward_dtype = torch.float16
        grads = torch.ones(2, 4)
        if ranks.rank == 0:
            grads[0, 1] = 1e6
        try:
            table.apply_gradients(T([1, 2]) + 2 * ranks.rank, grads)
            failed = None
        except (ConfigError, PeerError) as error:
            failed = type(error)
        table.save(tmp_path)
        return failed, table.lookup(T([1, 2, 3, 4]))

    results = raised(in_ranks(2, step))
    assert [failed for failed, _ in results] == ([ConfigError, PeerError] if mode == "raise" else [None, None])
    want = T([0.0, 0.0, 0.0, 0.0] if mode == "raise" else [0.0, -1.0, -1.0, -1.0])[:, None].expand(4, 4)
    assert all(torch.equal(rows, want) for _, rows in results)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def restored(ranks, spread, folder):
    tables = tables_of(ranks, spread)
    for name, table in tables.items():
        table.restore(folder / name)
    every = torch.arange(30)
    rows = {name: table.lookup(every) for name, table in tables.items()}
    for table in tables.values():  # state and weights
        ids = every if ranks.rank == 0 else every[:0]
        table.apply_gradients(ids, torch.ones(ids.numel(), table.dim_size), 9)
    return rows, {name: table.lookup(every) for name, table in tables.items()}, [t.size() for t in tables.values()]


def test_all_ways_restore_from_each_others_checkpoints_on_another_number_of_ranks(tmp_path):
    results = raised(in_ranks(3, train, SPREAD, 3, tmp_path))
    rows = results[0][1]
    after = None
    for world, spread in [(2, {"a": "column", "b": "data", "c": "row", "d": "table:1", "e": "column:1"}),
                          (1, dict.fromkeys(DIMS, "row")), (3, dict.fromkeys(DIMS, "column")),
                          (2, dict.fromkeys(DIMS, "table:0"))]:  # fmt: skip
        for found, then, sizes in raised(in_ranks(world, restored, spread, tmp_path)):
            for name in DIMS:
                assert torch.equal(found[name], rows[name]), (name, world)
            after = then if after is None else after
            torch.testing.assert_close(then, after, rtol=0, atol=0)
            assert min(sizes) > 20


def test_slices_with_different_ids_are_refused_on_all_ranks(tmp_path):
    def save(ranks):
        table = AllToAllHashTable(4, backend=ranks, way="column", name="t")
        table.assign(T([7]), torch.ones(1, 4))
        if ranks.rank == 1:
            table.table.clear()
        table.save(tmp_path)

    errors = in_ranks(2, save)
    assert {type(error) for error in errors} == {DataError, PeerError}
    assert "save failed on rank(s) 1; see their logs" in " ".join(map(str, errors))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "options", "says"), [
    ("colum", {}, "did you mean 'column'"), ("table:2", {}, "0..1"), ("column:0,0", {}, "distinct"),
    ("table:0,1", {}, "one rank"), ("table:x", {}, "numbers"), ("data:1", {}, "all ranks"),
    ("data", {"max_rows": 9}, "max_rows or max_bytes"),
    ("column", {"optimizer": shoal.RowwiseAdagrad(lr=0.1)}, "the whole row"), ("column", {"dim": 1}, "1 columns"),
])  # fmt: skip
def test_ways_that_cannot_be_are_refused(way, options, says):
    def build(ranks):
        AllToAllHashTable(backend=ranks, way=way, **{"dim": 4, **options})

    for error in in_ranks(2, build):
        assert isinstance(error, ConfigError)
        assert says in str(error)
