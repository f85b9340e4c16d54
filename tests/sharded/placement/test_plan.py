"""Plans for sharding tables, the loads from which they are made, and `shard`: one rank, threads, processes."""

import json
from dataclasses import replace

import pytest
import torch

import shoal
from shoal.errors import ConfigError, DataError, UnsupportedError
from shoal.nn import EmbeddingBagCollection, HashEmbedding, HashEmbeddingBag, SparseOptimizer
from shoal.sharded import AllToAllHashTable, Plan, PlanError, TableLoad, Way, loads_of, plan, shard
from shoal.sharded.placement.costs import USUAL
from shoal.sharded.placement.model import spread
from tests.sharded.helpers import run_ranks
from tests.sharded.ranks import in_ranks, raised

LOADS = [
    TableLoad(name="hour", dim=4, rows=24, ids=1000, distinct=24, bags=1000),
    TableLoad(name="user", dim=64, rows=1e6, ids=1000, distinct=990, bags=1000),
    TableLoad(name="tags", dim=32, rows=1e5, ids=20_000, distinct=15_000, bags=1000),
    TableLoad(name="text", dim=256, rows=2e4, ids=1000, distinct=900, bags=1000),
    TableLoad(name="lamb", dim=16, rows=1e5, ids=1000, distinct=900, bags=1000, optimizer="lamb"),
]


@pytest.mark.parametrize("ranks", [2, 8, 1000])
def test_the_plan_is_at_least_as_good_as_plans_of_one_way(ranks):
    best = plan(LOADS, ranks, USUAL)
    singles = {way: plan(LOADS, ranks, USUAL, ways=(way,)) for way in ("row", "table", "column", "data")}
    assert best.step.seconds <= 1.001 * min(one.step.seconds for one in singles.values())
    assert {str(placed.way) for placed in singles["data"].tables} == {"data"}
    assert singles["column"].way_of("lamb").kind == "row"  # a step of lamb depends on the entire row
    text = str(best)
    for word in ("hour", "tags", f"{ranks} ranks", "memory per rank", "sent per rank", " ms"):
        assert word in text
    best.show()


def test_loads_add_up():
    """Memory and bytes against sums made by hand."""
    load, ranks = LOADS[2], 4
    row = 4 * 32 * 2 + USUAL.row_overhead_bytes
    assert spread(load, Way("row"), ranks, USUAL).memory.tolist() == [load.rows * row / 4] * 4
    assert spread(load, Way("data"), ranks, USUAL).memory.tolist() == [load.rows * row] * 4
    table = spread(load, Way("table", (2,)), ranks, USUAL)
    assert table.memory.tolist() == [0, 0, load.rows * row, 0]
    bags, ids = 1000 * 32 * 4, 8 * (20_000 + 1000)
    assert table.sent.tolist() == [bags + ids, bags + ids, 3 * bags, bags + ids]
    assert table.received.tolist() == [bags, bags, 3 * (bags + ids), bags]
    for way in ("row", "table:1", "column", "data"):
        found = spread(load, Way.parse(way), ranks, USUAL)
        assert found.sent.sum() == pytest.approx(found.received.sum())


def test_plans_are_kept_edited_and_compared(tmp_path):
    made = plan(LOADS, 4, USUAL, memory_gb=2)
    again = Plan.load(made.save(tmp_path / "plan.json") and tmp_path / "plan.json")
    assert again == made
    other = made.edited(user="table:3", text="column:0,1")
    assert str(other.way_of("user")) == "table:3"
    assert other.step.seconds >= made.step.seconds * 0.999
    assert "user: " in made.compared(other)
    assert " ms" in made.compared(other)
    content = json.loads((tmp_path / "plan.json").read_text())
    content["tables"][0]["way"] = "table:9"
    (tmp_path / "bad.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"'hour': the ranks of its way must be in 0\.\.3, got table:9"):
        Plan.load(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match="not a sharding plan"):
        Plan.load(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="did you mean 'user'"):
        made.edited(usr="row")
    with pytest.raises(ConfigError, match="by column"):
        made.edited(lamb="column")


def test_what_does_not_fit_is_named_with_the_nearest_plan_that_does():
    fits = plan(LOADS, 4, USUAL, memory_gb=0.3)
    assert fits.fits
    assert float(fits.total.memory.max()) <= 0.3e9
    with pytest.raises(PlanError, match=r"do not fit on 4 ranks of 0\.05 GB.*'user' .* GB \(row\).*nearest") as caught:
        plan(LOADS, 4, USUAL, memory_gb=0.05)
    assert caught.value.nearest.fits
    assert caught.value.nearest.ranks > 4
    with pytest.raises(ConfigError, match="distinct names"):
        plan([LOADS[0]] * 2, 2)
    assert plan([], 4, USUAL).tables == ()


def test_budgets_are_planned_as_full_and_without_copies():
    limited = [replace(LOADS[0], max_rows=24.0), replace(LOADS[2], max_bytes=2e9)]
    made = plan(limited, 4, USUAL, memory_gb=10)
    assert {placed.way.kind for placed in made.tables} <= {"row", "table"}
    assert "cannot have copies or slices" in made.tables[1].why
    assert 2e9 <= made.total.memory.max() <= 2.1e9
    with pytest.raises(ConfigError, match="'hour' has max_rows or max_bytes, so it must be spread by row"):
        made.edited(hour="data")
    with pytest.raises(
        PlanError, match=r"More ranks do not help, because max_rows and max_bytes.*lower them for .*'tags'"
    ) as caught:
        plan(limited, 4, USUAL, memory_gb=1)
    assert caught.value.nearest is None
    with pytest.raises(PlanError, match=r"has 14 ranks; or give each rank 1\.34 GB") as caught:
        plan([replace(LOADS[1], rows=1e7)], 4, USUAL, memory_gb=0.4)  # 5.36 GB in all
    assert caught.value.nearest.ranks == 14


# --- models -----------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Three kinds of modules; one table in two of them."""

    def __init__(self, optimizer=None):
        super().__init__()
        options = {"optimizer": optimizer or shoal.Adam(lr=0.1), "seed": 3}
        item = shoal.HashTable(8, name="item", **options)
        self.bags = EmbeddingBagCollection({"user": shoal.HashTable(6, name="user", **options), "item": item},
                                           {"user": "user", "seen": "item"}, combiner="mean")  # fmt: skip
        self.one = HashEmbeddingBag(shoal.HashTable(4, name="hour", **options))
        self.rows = HashEmbedding(item)

    def forward(self, batch):
        pooled = self.bags({"user": batch["user"], "seen": batch["seen"]})
        return torch.cat([pooled, self.one(batch["hour"]), self.rows(batch["next"])], 1)


def batch_of(rank, step):
    make = torch.Generator().manual_seed(10 * step + rank)
    pick = lambda *shape: torch.randint(0, 40, shape, generator=make)  # noqa: E731
    return {"user": pick(5, 1), "seen": pick(5, 3), "hour": pick(5, 2), "next": pick(5)}


def learn(model, rank, steps):
    for step in steps:
        model(batch_of(rank, step)).square().sum().backward()


def tables_in(model):
    return {"user": model.bags.tables["user"], "item": model.bags.tables["item"], "hour": model.one.table}


def rows_in(model):
    return {name: table.lookup(torch.arange(40)) for name, table in tables_in(model).items()}


def test_loads_are_counted_in_steps_of_the_model():
    model = Model()
    loads = {load.name: load for load in loads_of(model, lambda: learn(model, 0, [0]), steps=2)}
    assert (loads["user"].ids, loads["user"].bags, loads["user"].optimizer) == (5, 5, "adam")
    assert (loads["item"].ids, loads["item"].bags) == (20, 10)  # from two modules
    assert loads["hour"].distinct == batch_of(0, 0)["hour"].unique().numel()
    assert loads["item"].rows == tables_in(model)["item"].size()
    with pytest.raises(ConfigError, match="must run the model"):
        loads_of(model, lambda: None)
    with pytest.raises(ConfigError, match="has no tables"):
        loads_of(torch.nn.Linear(1, 1))


def sharded(ranks, ways):
    """Trains alone, then over ranks; every rank has the same batches before."""
    model = Model()
    learn(model, 0, range(3))
    steps = model.bags.keepers()[0].global_step
    made = plan(loads_of(model), ranks.world_size, USUAL).edited(**ways) if ways else None
    shard(model, made, backend=ranks)
    assert model.bags.keepers()[0].global_step == steps
    assert model.rows.table is tables_in(model)["item"]
    before = rows_in(model)
    learn(model, ranks.rank, range(3, 5))
    after = rows_in(model)
    shard(model, plan(loads_of(model), ranks.world_size, USUAL, ways=("row",)), backend=ranks)  # another way
    moved = rows_in(model)
    return before, after, moved, [str(table.way) for table in tables_in(model).values()]


def check(results):
    model = Model()
    learn(model, 0, range(3))
    start = rows_in(model)
    for step in range(3, 5):
        outs = [model(batch_of(rank, step)) for rank in range(len(results))]
        for out in outs:
            out.square().sum().backward()
    for before, after, moved, ways in results:
        assert all(torch.equal(before[name], start[name]) for name in start)
        torch.testing.assert_close(after, rows_in(model), rtol=1e-4, atol=1e-5)
        assert all(torch.equal(after[name], moved[name]) for name in start)
        assert set(ways) == {"row"}


def test_a_trained_model_is_sharded_trained_and_sharded_otherwise():
    check(raised(in_ranks(3, sharded, {"user": "column", "item": "table:1", "hour": "data"})))
    check(raised(in_ranks(2, sharded, None)))
    check(raised(in_ranks(1, sharded, {"user": "table:0"})))


def test_rows_without_optimizer_state_are_moved():
    def rows(ranks):
        table = shoal.HashTable(4, name="t", optimizer=shoal.Sgd(lr=1.0), seed=1)
        table.assign(torch.arange(9), torch.randn(9, 4, generator=torch.Generator().manual_seed(0)))
        model = HashEmbeddingBag(table)
        before, found = table.lookup(torch.arange(9)), []
        for way in ("table:1", "column", "data", "row"):
            shard(model, plan(loads_of(model), 2, USUAL).edited(t=way), backend=ranks)
            found.append(model.table.lookup(torch.arange(9)))
        return before, found

    for before, found in raised(in_ranks(2, rows)):
        assert all(torch.equal(before, after) for after in found)


def test_what_cannot_be_sharded_is_refused_and_nothing_is_replaced():
    def refused(ranks):
        model = Model(shoal.RowwiseAdagrad(lr=0.1))
        own = dict(tables_in(model))
        texts = []
        loads = loads_of(model)
        plans = [
            plan(loads, 2, USUAL, ways=("row",)),
            plan(loads[:1], 3, USUAL),
            plan(loads, 3, USUAL, ways=("row",) if ranks.rank else ("data",)),
        ]
        for bad in plans:
            with pytest.raises(ConfigError) as caught:
                shard(model, bad, backend=ranks)
            texts.append(str(caught.value))
        held = Model()
        keep = SparseOptimizer(held)
        with pytest.raises(UnsupportedError, match="make the optimizer after shard"):
            shard(held, backend=ranks)
        assert all(tables_in(model)[name] is table for name, table in own.items())
        assert isinstance(own["user"], shoal.HashTable)
        return texts, keep is None

    for texts, _ in raised(in_ranks(3, refused)):
        assert "for 2 ranks, but there are 3" in texts[0]
        assert "no table 'item'" in texts[1]
        assert "different plans" in texts[2]


def on_gloo(rank, world):
    from shoal.comm.ranks.torch_ranks import default_ranks

    result = sharded(default_ranks(), {"user": "column", "item": "table:1", "hour": "data"})
    assert isinstance(AllToAllHashTable(4, way="data").table, shoal.HashTable)
    return result


def test_two_processes_on_gloo():
    check(run_ranks(2, on_gloo))
