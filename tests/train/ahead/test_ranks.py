"""Pipelines over tables that span ranks, as threads and as processes, and over parameter servers."""

import contextlib
import threading
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import nn

import shoal
from shoal.comm import InProcessRanks
from shoal.errors import ConfigError, PeerError
from shoal.nn import EmbeddingBagCollection, HashEmbedding, HashEmbeddingBag
from shoal.sharded import AllToAllHashTable, Engine, ParameterServer, PsClient, Shard, ps_table
from shoal.testing import run_ranks
from shoal.train import Pipeline
from tests.sharded.ranks import in_ranks, raised, together

pytestmark = pytest.mark.timeout(300)

DEADLINE_S = 60
OPTIONS = {"optimizer": shoal.Adagrad(lr=0.1), "initializer": "uniform", "seed": 5}
PAIRS = torch.arange(0, 11, 2)
WAYS = {"user": "row", "item": "table:1", "hour": "data", "words": "row"}


class Spread(nn.Module):
    """Tables of all ways in two modules, and a net of this rank's own."""

    def __init__(self, make, rank):
        super().__init__()
        self.tables = {name: make(name, way) for name, way in WAYS.items()}
        self.bags = EmbeddingBagCollection({name: self.tables[name] for name in ("user", "item", "hour")})
        self.words = HashEmbedding(self.tables["words"])
        self.net = nn.Linear(8, 1)
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.linspace(-1, 1 + rank, parameter.numel()).view(parameter.shape))

    def forward(self, batch):
        rows = torch.cat([self.bags(batch["bags"]), self.words(batch["words"])], 1)
        return nn.functional.mse_loss(self.net(rows).squeeze(-1), batch["label"], reduction="sum")

    def state(self):
        found = [table.lookup(torch.arange(40)) for table in self.tables.values()]
        return [*found, *(parameter.detach().clone() for parameter in self.net.parameters())]


def make_batches(rank, n, size=5):
    g = torch.Generator().manual_seed(100 + rank)

    def ids(*shape):
        return torch.randint(40, shape, generator=g)

    return [
        {
            "bags": {"user": ids(size, 1), "item": (ids(2 * size), PAIRS), "hour": ids(size, 2)},
            "words": ids(size),
            "label": torch.rand(size, generator=g),
        }
        for _ in range(n)
    ]


NOTHING = {
    "bags": {name: (torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)) for name in list(WAYS)[:3]},
    "words": torch.empty(0, dtype=torch.int64),
    "label": torch.empty(0),
}


def over(ranks):
    return lambda name, way: AllToAllHashTable(2, name=name, way=way, backend=ranks, **OPTIONS)


def plain(ranks, counts):
    """The loop without a pipeline, in which a rank that has run out takes part without samples."""
    model = Spread(over(ranks), ranks.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = make_batches(ranks.rank, counts[ranks.rank])
    for number in range(max(counts)):
        optimizer.zero_grad()
        model(batches[number] if number < len(batches) else NOTHING).backward()
        optimizer.step()
    return model.state()


def piped(ranks, counts, **options):
    model = Spread(over(ranks), ranks.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pipeline = Pipeline(model, optimizer, **options)
    outs = list(pipeline(make_batches(ranks.rank, counts[ranks.rank])))
    return model.state(), len(outs), pipeline.report()


@pytest.mark.parametrize("counts", [(6, 6), (7, 4), (1, 5)], ids=str)
def test_without_staleness_ranks_end_in_the_same_bits_as_without_a_pipeline(counts):
    expected = raised(in_ranks(2, plain, counts))
    for rank, (state, outs, report) in enumerate(raised(in_ranks(2, piped, counts))):
        assert all(map(torch.equal, state, expected[rank]))
        assert outs == counts[rank]
        assert report["located"] == 2 * (max(counts) - 1)  # all but the first, including those without samples
        assert report["not_located"] == 0


@pytest.mark.parametrize("staleness", [1, 2])
def test_stale_runs_are_equal_to_each_other_on_all_ranks(staleness):
    first, second = (raised(in_ranks(2, partial(piped, staleness=staleness), (7, 5))) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(map(torch.equal, one[0], other[0]))


def stale_counts(ranks, staleness):
    table = AllToAllHashTable(1, backend=ranks, optimizer=shoal.Sgd(lr=1.0), initializer="zeros")
    bag = HashEmbeddingBag(table)

    def step(batch):
        out = bag(batch)
        out.sum().backward()
        return -out.item()

    seen = list(Pipeline(bag, step=step, staleness=staleness)([torch.tensor([[7]])] * 8))
    return seen, table.lookup(torch.tensor([7])).item()


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_ranks_read_rows_after_the_update_that_the_staleness_says(staleness):
    for seen, last in raised(in_ranks(2, stale_counts, staleness)):
        assert seen == [0, *(2 * max(1, n - staleness) for n in range(1, 8))]  # the steps of both ranks count
        assert last == -16


def overlapped(ranks, staleness):
    """A step waits until the ids of the next batch, and with a staleness its rows, came from the other rank."""
    bag = HashEmbeddingBag(over(ranks)("user", "row"))
    group, counted, changed = bag.groups()[0], {"find_steps": 0, "_rows_of": 0}, threading.Condition()

    def count(name):
        inner = getattr(group, name)

        def steps(*args, **kwargs):
            result = yield from inner(*args, **kwargs)
            with changed:
                counted[name] += 1
                changed.notify_all()
            return result

        setattr(group, name, steps)

    count("find_steps"), count("_rows_of")
    numbers = iter(range(6))

    def step(batch):
        number = next(numbers)
        out = bag(batch)
        if 0 < number < 5:
            with changed:
                assert changed.wait_for(lambda: counted["find_steps"] >= number + 2, DEADLINE_S)
                if staleness:
                    assert changed.wait_for(lambda: counted["_rows_of"] >= number + 2, DEADLINE_S)
                else:
                    assert counted["_rows_of"] == number + 1  # rows are read late
        out.sum().backward()

    list(Pipeline(bag, step=step, staleness=staleness)([torch.arange(6).view(2, 3) + n for n in range(6)]))
    return counted


@pytest.mark.parametrize("staleness", [0, 1])
def test_ids_are_exchanged_while_a_step_computes(staleness):
    assert raised(in_ranks(2, overlapped, staleness)) == [{"find_steps": 6, "_rows_of": 6}] * 2


def evaluates(ranks):
    """Batch 3 is located while rank 0 evaluates, after its second step, and while rank 1 is in training mode."""
    model = Spread(over(ranks), ranks.rank)
    ask, asked, numbers = model.words.ask, [], iter(range(6))
    before, evaluating, located = threading.Event(), threading.Event(), threading.Event()

    def slow(*args, **kwargs):
        if len(asked) == 3:
            assert evaluating.wait(DEADLINE_S)
        asked.append(model.training)
        if len(asked) == 3:
            before.set()
        found = ask(*args, **kwargs)
        if len(asked) == 4:
            located.set()
        return found

    model.words.ask = slow

    def step(batch):
        model(batch).backward()
        if next(numbers) == 1:
            assert before.wait(DEADLINE_S)
            model.train(ranks.rank == 1)
            evaluating.set()
            assert located.wait(DEADLINE_S)
            model.train()

    pipeline = Pipeline(model, step=step)
    list(pipeline(make_batches(ranks.rank, 6)))
    return pipeline.report()["located"], asked


def test_an_evaluation_between_steps_does_not_change_how_ids_are_located():
    (first, modes), (second, others) = raised(in_ranks(2, evaluates))
    assert first == second == 2 * 5
    assert modes == [True, True, True, False, True, True]
    assert others == [True] * 6


# --- errors -----------------------------------------------------------------------------------------------------------


def test_ranks_can_stop_together_or_refuse_to_differ():
    for _, outs, _ in raised(in_ranks(2, partial(piped, on_uneven="stop"), (5, 3))):
        assert outs == 3
    for result in in_ranks(2, partial(piped, on_uneven="error"), (5, 3)):
        assert isinstance(result, ConfigError)
        assert "ran out after 3 batches" in str(result)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_rank_without_any_batch_is_named(staleness):
    for result in in_ranks(2, partial(piped, staleness=staleness), (4, 0)):
        assert isinstance(result, ConfigError)
        assert "rank(s) [1] have no batch at all" in str(result)


def broken(ranks, where, staleness):
    model = Spread(over(ranks), ranks.rank)

    def source():
        for number, batch in enumerate(make_batches(ranks.rank, 6)):
            if number == 3 and ranks.rank == 1 and where == "source":
                raise OSError("the disk burns")
            if number == 3 and ranks.rank == 1 and where == "ids":
                batch["words"] = batch["words"].float()
            yield batch

    done = []
    try:
        for _ in Pipeline(model, torch.optim.SGD(model.parameters()), staleness=staleness)(source()):
            done.append(1)
            if where == "step" and ranks.rank == 1 and len(done) == 3:
                raise ValueError("a mistake in the loop")
    finally:
        if where == "step":
            ranks.close()  # as at the end of the process
    return done


@pytest.mark.parametrize("where", ["source", "ids", "step"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_what_one_rank_meets_ends_all_of_them(where, staleness):
    other, own = in_ranks(2, broken, where, staleness)
    kinds = {"source": OSError, "ids": ConfigError, "step": ValueError}
    assert isinstance(own, kinds[where])
    assert isinstance(other, PeerError)
    assert "1" in str(other)


def test_ranks_that_stop_together_end_at_once_and_one_that_goes_on_alone_is_told():
    def stops(ranks):
        pipeline = Pipeline(Spread(over(ranks), ranks.rank), step=lambda batch: None)
        return [number for number, _ in zip(range(3), pipeline(make_batches(ranks.rank, 50)), strict=False)]

    assert raised(in_ranks(2, stops)) == [[0, 1, 2]] * 2
    group = InProcessRanks.create_group(2, timeout_s=200)

    def goes_on(ranks):
        left = 3 if ranks.rank == 0 else 50
        pipeline = Pipeline(Spread(over(ranks), ranks.rank), step=lambda batch: None)
        with pipeline:
            return [number for number, _ in zip(range(left), pipeline(make_batches(ranks.rank, 50)), strict=False)]

    first, second = together([lambda ranks=ranks: goes_on(ranks) for ranks in group])
    assert first == [0, 1, 2]
    assert isinstance(second, PeerError)
    assert "rank(s) [0] stopped before batch" in str(second)


class Own:
    """A network of one's own, without a second channel."""

    def __init__(self, ranks):
        self._ranks, self.rank, self.world_size = ranks, ranks.rank, ranks.world_size

    def all_to_all(self, flat, send_splits, recv_splits=None):
        return self._ranks.all_to_all(flat, send_splits, recv_splits)

    def gather_totals(self, value):
        return self._ranks.gather_totals(value)


def piped_over_own(ranks, counts, staleness):
    backend = Own(ranks)
    model = Spread(over(backend), ranks.rank)
    pipeline = Pipeline(model, torch.optim.SGD(model.parameters(), lr=0.01), staleness=staleness)
    list(pipeline(make_batches(ranks.rank, counts[ranks.rank])))
    return model.state(), pipeline.report()


def test_ranks_without_a_second_channel_locate_in_their_forwards():
    expected = raised(in_ranks(2, plain, (5, 5)))
    for rank, (state, report) in enumerate(raised(in_ranks(2, piped_over_own, (5, 5), 0))):
        assert all(map(torch.equal, state, expected[rank]))
        assert report["located"] == 0
    raised(in_ranks(2, piped_over_own, (5, 5), 1))


# --- processes --------------------------------------------------------------------------------------------------------


def in_processes(rank, world, counts, staleness, pipeline):
    """A net under DistributedDataParallel; a rank that has run out takes part in its reductions, too."""
    from torch.nn.parallel import DistributedDataParallel

    model = Spread(lambda name, way: AllToAllHashTable(2, name=name, way=way, **OPTIONS), 0)
    model.net = DistributedDataParallel(model.net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = make_batches(rank, counts[rank])
    if pipeline:
        list(Pipeline(model, optimizer, staleness=staleness)(batches))
    else:
        for number in range(max(counts)):
            optimizer.zero_grad()
            model(batches[number] if number < len(batches) else NOTHING).backward()
            optimizer.step()
    return model.state()


def test_processes_end_in_the_same_bits_as_without_a_pipeline_also_where_data_is_uneven():
    counts = (6, 3)
    expected = run_ranks(2, in_processes, counts, 0, False)
    found = run_ranks(2, in_processes, counts, 0, True)
    for one, other in zip(expected, found, strict=True):
        assert all(map(torch.equal, one, other))
    stale = [run_ranks(2, in_processes, counts, 1, True) for _ in range(2)]
    assert all(torch.equal(a, b) for one, other in zip(*stale, strict=True) for a, b in zip(one, other, strict=True))


# --- parameter servers ------------------------------------------------------------------------------------------------


@pytest.fixture
def client():
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ParameterServer(Engine(Shard(i, 2)))) for i in range(2)]
        yield stack.enter_context(PsClient([one.address for one in servers], deadline=timedelta(seconds=60)))


def train_on(client, run, name):
    """The rows after ``run(model, optimizer, batches)``; the tables have names of their own."""
    model = Spread(lambda table, way: ps_table(client, 2, name=f"{name}-{table}", **OPTIONS), 0)
    run(model, torch.optim.SGD(model.parameters(), lr=0.01), make_batches(0, 8))
    return model.state()


def test_rows_on_servers_are_those_of_a_plain_loop(client):
    def loop(model, optimizer, batches):
        for batch in batches:
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()

    expected = train_on(client, loop, "plain")
    found = train_on(client, lambda model, optimizer, batches: list(Pipeline(model, optimizer)(batches)), "piped")
    assert all(map(torch.equal, expected, found))
    stale = [
        train_on(client, lambda m, o, b: list(Pipeline(m, o, staleness=2)(b)), f"stale-{number}") for number in range(2)
    ]
    assert all(map(torch.equal, *stale))
    assert not all(map(torch.equal, stale[0], expected))


def test_requests_to_servers_are_under_way_while_a_step_computes(client):
    """Step t ends only after the servers answered for the rows of t + 1 and took the update of t - 1."""
    table = ps_table(client, 1, name="under-way", optimizer=shoal.Sgd(lr=1.0), initializer="zeros")
    bag, changed, counted = HashEmbeddingBag(table), threading.Condition(), {"read": 0, "write": 0}

    def count(name):
        inner = getattr(client, name)

        def call(*args, **kwargs):
            result = inner(*args, **kwargs)
            with changed:
                counted[name] += 1
                changed.notify_all()
            return result

        setattr(client, name, call)

    count("read"), count("write")
    numbers = iter(range(6))

    def step(batch):
        number = next(numbers)
        out = bag(batch)
        if 0 < number < 5:
            with changed:
                assert changed.wait_for(
                    lambda: counted["read"] >= number + 2 and counted["write"] >= number, DEADLINE_S
                )
        out.sum().backward()
        return -out.item()

    seen = list(Pipeline(bag, step=step, staleness=1)([torch.tensor([[7]])] * 6))
    assert seen == [0, 1, 1, 2, 3, 4]
    assert table.lookup(torch.tensor([7])).item() == -6
