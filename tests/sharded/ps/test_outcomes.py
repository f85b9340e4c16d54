"""Tables with budgets on a server: rows that a write evicts are in the log, and recovery evicts the same ones."""

import pytest
import torch

from shoal.errors import ConfigError
from shoal.sharded import Engine, Shard
from shoal.sharded.ps.client.remote import create_request
from shoal.sharded.ps.protocol import Op, Request, Status
from shoal.sharded.ps.server.log import replay
from tests.sharded.helpers import config

STREAM = b"one worker......"
ROWS = 20_000  # more rows than a table with exact eviction has


def engine(folder, durability="log"):
    made = Engine(Shard(0, 1), durability, folder)
    made.recover()
    return made


def create(of, max_rows=ROWS, **eviction):
    table = config(2)
    table.table_config.eviction.max_rows = max_rows
    for name, value in eviction.items():
        setattr(table.table_config.eviction, name, value)
    [reply] = of.apply([create_request(table, {"name": "t"})])
    assert reply.status == Status.OK, reply.text()


def write(of, seq, ids, op=Op.ASSIGN):
    fields = {"values": ids.float().repeat_interleave(2)} if op != Op.INSERT else {}
    fields |= {"rates": [0.5]} if op == Op.APPLY else {}
    request = Request(op, stream=STREAM, seq=seq, acked=seq - 1, names=("t",), counts=[ids.numel()], ids=ids,
                      req_time=1000 + seq, **fields)  # fmt: skip
    [reply] = of.apply([request])
    assert reply.status == Status.OK, reply.text()


def contents(of):
    table = of.shard.tables["t"]
    ids = torch.cat(list(table.all_ids())).sort().values
    return ids.tolist(), table.lookup(ids).tolist(), table.fetch_times(ids).tolist()


def batches(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 4 * ROWS, (3000,), generator=generator).unique() for _ in range(count)]


@pytest.mark.parametrize("policy", [0, 1], ids=["lru", "lfu"])
def test_a_server_that_comes_back_from_its_log_has_the_same_rows(tmp_path, policy):
    first = engine(tmp_path)
    create(first, policy=policy)
    for seq, ids in enumerate(batches(0, 14), 1):
        write(first, seq, ids, (Op.ASSIGN, Op.APPLY, Op.INSERT)[seq % 3])
        if seq == 9:
            first.checkpoint()
    stats = first.shard.tables["t"].eviction_stats()
    assert stats.evicted > 5000
    assert first.shard.tables["t"].size() <= ROWS
    again = engine(tmp_path)
    assert contents(again) == contents(first)
    assert again.shard.version == first.shard.version
    third = engine(tmp_path)  # the same after it has recovered and continued
    for seq, ids in enumerate(batches(1, 3), 15):
        write(third, seq, ids)
    assert contents(engine(tmp_path)) == contents(third)


def test_refused_ids_are_refused_again(tmp_path):
    first = engine(tmp_path)
    create(first, max_rows=50)
    write(first, 1, torch.arange(50))
    write(first, 2, torch.arange(20, 120))  # rows of a call are not evicted for it
    write(first, 3, torch.arange(200, 300), Op.INSERT)
    refused = first.shard.tables["t"].eviction_stats().refused
    assert refused >= 50
    again = engine(tmp_path)
    assert contents(again) == contents(first)
    assert again.shard.tables["t"].eviction_stats().refused == refused


def test_a_write_whose_outcome_is_not_in_the_log_decides_again(tmp_path):
    first = engine(tmp_path)
    create(first)
    made = batches(2, 10)
    for seq, ids in enumerate(made, 1):
        write(first, seq, ids)
    first.log.append(
        Request(Op.ASSIGN, stream=STREAM, seq=11, acked=10, names=("t",), counts=[2], ids=torch.tensor([-1, -2]),
                values=torch.ones(4), req_time=2000).frames()
    )  # fmt: skip
    first.log.sync()
    again = engine(tmp_path)
    assert contents(again) == contents(first)  # the write was not acknowledged
    write(again, 12, torch.tensor([-3]))
    assert again.shard.tables["t"].contains(torch.tensor([-1, -2, -3])).all()
    assert contents(engine(tmp_path)) == contents(again)


def test_a_follower_has_the_rows_of_its_leader(tmp_path):
    leader, follower = engine(tmp_path / "a"), engine(tmp_path / "b")
    create(leader)
    for seq, ids in enumerate(batches(3, 12), 1):
        write(leader, seq, ids)
    leader.log.sync()
    records = [(number, bytes(h), memoryview(bytes(i)), memoryview(bytes(v)))
               for number, h, i, v in replay(tmp_path / "a", 0)]  # fmt: skip
    assert follower.take(records[:-1], lambda request: None) == len(records) - 1
    with pytest.raises(ConfigError, match="the leader's next record must come first"):
        follower.begin_checkpoint()
    assert follower.take(records[-1:], lambda request: None) == 1
    assert contents(follower) == contents(leader)
    follower.checkpoint()
    write(follower, 13, torch.arange(5 * ROWS, 5 * ROWS + 100))  # the follower leads now
    assert contents(engine(tmp_path / "b")) == contents(follower)
    assert follower.log.next_number == leader.log.next_number + 2


def test_a_client_cannot_send_an_outcome(tmp_path):
    of = engine(tmp_path)
    create(of)
    [reply] = of.apply([Request(Op.OUTCOME, stream=STREAM, seq=1, names=("t",), counts=[0])])
    assert reply.status == Status.BAD_REQUEST


def test_a_server_without_a_log_keeps_no_outcomes(tmp_path):
    first = engine(tmp_path)
    create(first)
    for seq, ids in enumerate(batches(4, 9), 1):
        write(first, seq, ids)
    again = engine(tmp_path, "checkpoint")
    assert contents(again) == contents(first)
    write(again, 10, torch.arange(10 * ROWS, 10 * ROWS + 500))
    assert again.shard.tables["t"].size() <= ROWS
