"""Updates that are identified by their records: applied once on every shard, whoever sends them."""

import pytest
import torch

from shoal.errors import ConfigError, DataError
from shoal.sharded import Engine, ParameterServer, PsClient, Shard, ps_table
from shoal.sharded.ps.protocol import RECORDS, Op, Request, Status
from shoal.sharded.ps.reshard import reshard_servers
from shoal.sharded.ps.server.streams import Streams, Verdict

pytest.importorskip("zmq")

IDS = torch.arange(8)


@pytest.fixture
def servers(tmp_path):
    """Two shards with a log; `again` stops one and starts it from its disk."""
    started = {}

    def start(shard, port=0):
        engine = Engine(Shard(shard, 2), "log", tmp_path / f"shard-{shard:05d}")
        started[shard] = ParameterServer(engine, port=port).start()
        return started[shard].address

    addresses = [start(0), start(1)]

    def again(shard):
        started[shard].stop()
        start(shard, int(addresses[shard].rpartition(":")[2]))

    yield addresses, again
    for server in started.values():
        server.stop()


def tables(client, dims=(1, 2)):
    return [ps_table(client, dim, name=f"t{dim}", optimizer="sgd", lr=1.0, initializer="zeros") for dim in dims]


def learn(client, made, partition, upto):
    """One step: every row of every table gets 1 less."""
    with client.records(partition, upto):
        for table in made:
            table.apply_gradients(IDS, torch.ones(len(IDS), table.dim_size))


def rows(made):
    return [table.lookup(IDS).unique().tolist() for table in made]


def test_verdicts():
    streams, stream = Streams(), bytes(16)
    assert streams.judge_records(stream, 5, 0) is Verdict.NEW
    assert streams.judge_records(stream, 9, 5) is Verdict.GAP
    streams.remember(stream, 5, streams.answer(stream, 1))
    assert streams.judge_records(stream, 5, 0) is Verdict.DONE
    assert streams.judge_records(stream, 3, 0) is Verdict.DONE
    assert streams.judge_records(stream, 9, 5) is Verdict.NEW
    assert streams.judge_records(stream, 9, 4) is Verdict.OVERLAP


def test_a_step_is_one_write_and_is_applied_once_whoever_sends_it(servers):
    addresses, again = servers
    with PsClient(addresses) as a, PsClient(addresses) as b:
        mine, theirs = tables(a), tables(b)
        learn(a, mine, "p", 64)
        learn(a, mine, "p", 128)
        learn(a, mine, "q", 64)
        assert rows(mine) == [[-3.0], [-3.0]]
        assert b.learnt(["p", "q", "r"]) == {"p": [128, 128], "q": [64, 64], "r": [0, 0]}
        before = [info["version"] for info in b.info()]
        for upto in (64, 128):  # it took over and sends them again
            learn(b, theirs, "p", upto)
        assert rows(theirs) == [[-3.0], [-3.0]]
        learn(b, theirs, "p", 200)
        assert rows(theirs) == [[-4.0], [-4.0]]
        assert [info["version"] for info in b.info()] == [version + 1 for version in before]
        again(0), again(1)
        learn(b, theirs, "p", 200)
        learn(b, theirs, "p", 210)
        assert rows(theirs) == [[-5.0], [-5.0]]


def test_a_partition_that_somebody_else_learns_is_an_error(servers):
    with PsClient(servers[0]) as a, PsClient(servers[0]) as b:
        mine, theirs = tables(a), tables(b)
        learn(a, mine, "p", 64)
        learn(b, theirs, "p", 100)
        with pytest.raises(ConfigError, match="another trainer has learnt this partition up to record 100"):
            learn(a, mine, "p", 128)
        assert rows(mine) == [[-2.0], [-2.0]]


def test_a_partition_begins_on_all_shards_where_the_first_trainer_began(servers):
    with PsClient(servers[0]) as client:
        client.begin_records("p", 1000)
        client.begin_records("p", 5)
        assert client.learnt(["p"]) == {"p": [1000, 1000]}
        with client.records("p", 1001), pytest.raises(ConfigError, match="nested"), client.records("p", 1002):
            pass


def test_shards_that_were_left_at_different_records_meet_again(servers):
    """A trainer was killed between two shards: the next one makes the batch again, and one shard leaves it out."""
    with PsClient(servers[0]) as client:
        made = tables(client)
        learn(client, made, "p", 64)
        learn(client, made, "p", 128)
        ids = IDS[IDS % 2 == 0]
        half = Request(Op.APPLY, counts=[4], rates=[1.0], names=("t1",), ids=ids, values=torch.ones(4))
        with client.records("p", 192):
            client.write({0: half}, wait=False)
        client.flush()
        assert client.learnt(["p"]) == {"p": [192, 128]}
        learn(client, made[:1], "p", 192)
        assert rows(made[:1]) == [[-3.0]]
        assert client.learnt(["p"]) == {"p": [192, 192]}


def test_what_was_learnt_outlives_checkpoints(servers):
    addresses, again = servers
    with PsClient(addresses) as client:
        made = tables(client)
        learn(client, made, "p", 64)
        client.checkpoint()
        again(0), again(1)
        assert client.learnt(["p"]) == {"p": [64, 64]}


def test_shards_that_learnt_up_to_different_records_are_not_resharded(tmp_path):
    for shard, seq in ((0, 5), (1, 5)):
        engine = Engine(Shard(shard, 2), "checkpoint", tmp_path / "old" / f"shard-{shard:05d}")
        engine.recover()
        engine.apply([Request(Op.APPLY, stream=b"part" + bytes(12), seq=seq, flags=RECORDS)])
        engine.checkpoint()
        engine.close()
    reshard_servers(tmp_path / "old", tmp_path / "new", 3)
    engine = Engine(Shard(2, 3), "checkpoint", tmp_path / "new" / "shard-00002")
    engine.recover()
    assert engine.streams.last(b"part" + bytes(12)) == 5
    (reply,) = engine.apply([Request(Op.APPLY, stream=b"part" + bytes(12), seq=9, acked=5, flags=RECORDS)])
    assert reply.status == Status.OK
    engine.checkpoint()
    engine.close()
    with pytest.raises(DataError, match="up to different records"):
        reshard_servers(tmp_path / "new", tmp_path / "newer", 2)
