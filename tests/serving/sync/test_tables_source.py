"""What a source reports to its publisher: local tables, weights, and a parameter server that restarts."""

import itertools

import pytest
import torch

import shoal
from shoal.errors import ConfigError
from shoal.serving.sync.publish import seconds_of, tables_of
from shoal.serving.sync.shard_publish import ShardPublishing
from shoal.serving.sync.tables_source import TablesSource, dense_weights
from shoal.sharded.ps import Engine, Shard
from shoal.sharded.ps.client.remote import create_request
from shoal.sharded.ps.protocol import Op, Request
from shoal.stamps import Stamp


def make(name="t", dim=2):
    return shoal.HashTable(dim, optimizer=shoal.Sgd(lr=1.0), initializer="zeros", name=name)


def write(table, *ids):
    table.assign(torch.tensor(ids), torch.ones(len(ids), table.dim_size))


def rising():
    """A stamp that is newer each time."""
    steps = itertools.count(1)
    return lambda: Stamp(1, next(steps))


def ids_of(changes):
    return {name: sorted(ids.tolist()) for name, ids in changes.ids.items()}


def test_tables_and_weights_are_told_when_they_change():
    a, b, net, steps = make("a"), make("b", 3), torch.nn.Linear(2, 1), itertools.count(7)
    source = TablesSource(
        {"a": a, "b": b}, lambda: Stamp(5, next(steps)), base=Stamp(4, 2), weights=lambda: dense_weights(net)
    )
    assert (source.name, source.base, source.tables) == ("trainer", Stamp(4, 2), {"a": 2, "b": 3})
    first = source.take()
    assert (first.stamp, ids_of(first), first.lost) == (Stamp(5, 7), {}, False)
    assert sorted(first.weights) == ["bias", "weight"]
    again = source.take()
    assert again.weights is None
    assert again.since == 0
    write(a, 1, 2)
    a.erase(torch.tensor([2]))
    with torch.no_grad():
        net.weight.add_(1)
    changes = source.take()
    assert ids_of(changes) == {"a": [1, 2]}
    assert changes.since > 0
    assert torch.equal(changes.weights["weight"], net.weight)
    assert changes.weights["weight"].data_ptr() != net.weight.data_ptr()
    rows, found = source.read("a", torch.tensor([1, 2]))
    assert (rows[0].tolist(), found.tolist()) == ([1, 1], [True, False])
    assert torch.cat(list(source.scan("a"))).tolist() == [1]
    source.close()
    write(b, 1)
    assert source.take().ids == {}


def test_changes_wait_until_the_stamp_rises():
    table, at = make(), [1]
    source = TablesSource({"t": table}, lambda: Stamp(1, at[0]))
    assert ids_of(source.take()) == {}
    write(table, 1)
    waiting = source.take()
    assert (waiting.stamp, ids_of(waiting)) == (Stamp(1, 1), {})
    at[0] = 2
    write(table, 2)
    assert ids_of(source.take()) == {"t": [1, 2]}


def test_a_part_owns_its_ids():
    source = TablesSource({}, lambda: Stamp(1, 1), part=(1, 3))
    assert source.owns("t", torch.tensor([-2, -1, 0, 1, 4, 5])).tolist() == [True, False, False, True, True, False]


def test_a_table_that_is_replaced_or_comes_later_is_told_whole():
    tables = {"a": make("a")}
    write(tables["a"], 1, 2)
    source = TablesSource(lambda: tables, rising())
    assert ids_of(source.take()) == {}
    tables["a"] = make("a")
    write(tables["a"], 2, 3)
    tables["b"] = make("b")
    write(tables["b"], 9)
    assert ids_of(source.take()) == {"a": [1, 2, 3], "b": [9]}
    assert source.read("a", torch.tensor([1, 2]))[1].tolist() == [False, True]
    write(tables["a"], 4)
    assert ids_of(source.take()) == {"a": [4]}


def test_more_changes_than_are_kept_are_told_as_lost():
    table = make()
    source = TablesSource({"t": table}, rising())
    table.clear()
    changes = source.take()
    assert changes.lost
    assert changes.since > 0
    assert not source.take().lost


def test_dense_weights_are_those_of_the_state_dict_without_rows():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    net.register_buffer("passing", torch.zeros(1), persistent=False)
    assert dense_weights(net).keys() == net.state_dict().keys()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = shoal.nn.HashEmbedding(make("rows"))
            self.head = torch.nn.Linear(2, 1)

    model = Model()
    assert sorted(dense_weights(model)) == ["head.bias", "head.weight"]
    assert list(tables_of(model)) == ["rows"]


def test_tables_are_found_in_what_people_give():
    a, b = make("a"), make("b")
    assert tables_of(a) == {"a": a}
    assert tables_of([a, b]) == {"a": a, "b": b}
    assert tables_of({"x": a}) == {"x": a}
    with pytest.raises(ConfigError, match="model_or_tables must be a model"):
        tables_of(3)


@pytest.mark.parametrize(("text", "seconds"), [("1s", 1.0), ("200ms", 0.2), ("2m", 120.0), (0.5, 0.5), ("3", 3.0)])
def test_times_between_rounds(text, seconds):
    assert seconds_of(text, "every") == seconds


@pytest.mark.parametrize("text", ["", "x", "-1s", 0, "0s", float("inf")])
def test_bad_times_are_refused(text):
    with pytest.raises(ConfigError, match="above 0"):
        seconds_of(text, "every")


# --- a parameter server ---------------------------------------------------------------------------------------------


def start(directory, durability="log"):
    engine = Engine(Shard(0, 1), durability, directory)
    settings = {"targets": ["127.0.0.1:1"], "model": "m"}
    publishing = ShardPublishing(engine, settings)
    engine.recover()
    return engine, publishing._source


def assign(engine, number, *ids):
    values = torch.full((len(ids), 2), float(number))
    request = Request(
        Op.ASSIGN, stream=b"w" * 16, seq=number, req_time=1, counts=[len(ids)], names=("t",),
        ids=torch.tensor(ids).numpy(), values=values.numpy(),
    )  # fmt: skip
    assert engine.apply([request])[0].status == 0


def test_a_server_that_comes_back_tells_what_its_log_has_since_the_checkpoint(tmp_path):
    engine, source = start(tmp_path)
    assert source.base is None
    first_run = engine.shard.run
    assert engine.apply([create_request(make().config, {"name": "t"})])[0].status == 0
    assign(engine, 1, 1, 2)
    assert ids_of(source.take()) == {"t": [1, 2]}
    engine.checkpoint()
    at_checkpoint = engine.shard.stamp
    assign(engine, 2, 2, 3)
    assert source.take().stamp == Stamp(first_run, at_checkpoint.step + 1)
    engine.close()

    engine, source = start(tmp_path)
    assert engine.shard.run > first_run
    assert source.base == at_checkpoint
    changes = source.take()
    assert ids_of(changes) == {"t": [2, 3]}
    assert changes.stamp == Stamp(engine.shard.run, at_checkpoint.step + 1)
    assert source.read("t", torch.tensor([3]))[0].tolist() == [[2, 2]]
    second_run = engine.shard.run
    engine.close()

    engine, source = start(tmp_path)  # nothing was saved meanwhile
    assert engine.shard.run > second_run
    assert source.base == at_checkpoint
    engine.close()


def test_a_run_is_later_than_the_last_whatever_the_clock_says(tmp_path):
    engine, _ = start(tmp_path)
    engine.close()
    ahead = engine.shard.run + 10**18
    (tmp_path / "run").write_text(str(ahead))
    engine, _ = start(tmp_path)
    assert engine.shard.run == ahead + 1
    engine.close()


def test_what_a_worker_asks_a_server_is_checked():
    publishing = ShardPublishing(Engine(Shard(0, 1)))
    assert publishing.ask({})["publishing"] is False
    for wish, why in [
        ({"model": "m"}, "exactly one of registry and targets must be given"),
        ({"targets": ["a:1"]}, "model must be the name"),
        ({"targets": ["a:1"], "model": "m", "every_s": 0}, "every_s must be"),
        ({"what": 1}, "settings of PUBLISH must be among"),
    ]:
        with pytest.raises(ValueError, match=why):
            publishing.ask(wish)
    assert publishing.ask({})["publishing"] is False


def test_a_server_goes_on_with_what_a_worker_asked_for(tmp_path):
    engine = Engine(Shard(0, 1), "log", tmp_path)
    (tmp_path / "publish.json").write_text('{"targets": ["127.0.0.1:1"], "model": "m", "every_s": 2}')
    assert ShardPublishing(engine).settings["every_s"] == 2
    (tmp_path / "publish.json").write_text('{"targ')
    assert ShardPublishing(engine).settings is None
