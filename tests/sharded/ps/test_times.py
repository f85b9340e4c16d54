"""The time of a write on servers: the server's if none is given, taken before the log is written."""

import json
import time

import pytest
import torch

from shoal.errors import ConfigError
from shoal.sharded import Engine, ParameterServer, PsClient, Shard, create_native_multi_hash_table, ps_table
from shoal.sharded.ps.protocol import NOW, Op, Request, Status
from shoal.table import EntryDump, HashTable
from shoal.table.clock import Now
from tests.sharded.helpers import LONG, config

T = torch.tensor
IDS = T([1, 2, 3])
ONES = torch.ones(3, 2)
DAY = 86400


def stamps(table, ids=IDS):
    parts = table.tables if hasattr(table, "tables") else [table]
    found = {}
    for part in parts:
        for number, entry in zip(ids.tolist(), part.lookup_entry(ids), strict=True):
            if entry:
                found[number] = EntryDump.FromString(entry).last_update_ts_sec
    return [found[number] for number in ids.tolist()]


WRITES = {
    "assign": lambda table: table.assign(IDS, ONES),
    "assign_add": lambda table: table.assign_add(IDS, ONES),
    "apply_gradients": lambda table: table.apply_gradients(IDS, ONES),
    "lookup": lambda table: table.lookup(IDS, insert_missing=True),
    "reinitialize": lambda table: table.reinitialize(IDS),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_without_a_time_is_stamped_now_and_never_moves_a_stamp_back(ps, write):
    table = ps_table(ps(2), 2, name="t", expire_after="30d")
    before = int(time.time())
    write(table)
    assert all(before <= stamp <= time.time() for stamp in stamps(table))
    ahead = int(time.time()) + DAY // 2
    table.assign(IDS, ONES, req_time=ahead)
    write(table)
    assert stamps(table) == [ahead] * 3


def test_a_time_that_is_given_is_kept_also_an_older_one(ps):
    table = ps_table(ps(2), 2, name="t", expire_after="30d")
    for given in (int(time.time()), 1000, 0):
        table.apply_gradients(IDS, ONES, req_time=given)
        assert stamps(table) == [given] * 3


def test_a_time_far_ahead_is_refused_by_worker_and_server(servers):
    [server] = servers(1)
    far = int(time.time()) + 2 * DAY
    with PsClient([server.address], deadline=LONG) as client:
        table = ps_table(client, 2, name="t", expire_after="30d")
        table.assign(IDS, ONES)
        with pytest.raises(ConfigError, match="a day ahead of the clock"):
            table.assign(IDS, 2 * ONES, req_time=far)
        with pytest.raises(ConfigError, match="a day ahead of the clock"):  # from a worker with a wrong clock
            client.write({0: Request(Op.ASSIGN, counts=[3], names=("t",), ids=IDS, values=2 * ONES, req_time=far)})
        assert table.lookup(IDS).tolist() == [[1, 1]] * 3
        assert [part.evict() for part in table.tables] == [0]


def test_rows_written_without_a_time_outlive_those_that_were_not_written(ps):
    table = ps_table(ps(2), 2, name="t", expire_after="2d")
    table.assign(IDS, ONES, req_time=int(time.time()) - 3 * DAY)
    table.apply_gradients(IDS[:1], ONES[:1])
    assert sum(part.evict() for part in table.tables) == 2
    assert table.contains(IDS).tolist() == [True, False, False]


def test_a_module_stamps_rows_by_the_server_s_clock(ps):
    from shoal.nn import HashEmbedding

    table = ps_table(ps(1), 2, name="t", expire_after="2d")
    before = int(time.time())
    HashEmbedding(table)(IDS).sum().backward()
    assert all(before <= stamp <= time.time() for stamp in stamps(table))


def test_tables_of_the_factories_keep_their_rule(ps):
    client = ps(2)
    table = create_native_multi_hash_table(2, {"a": config(2)}, None, client=client)
    table.assign({"a": (IDS, ONES)})
    table.assign({"a": (IDS[:1], ONES[:1])}, req_time=int(time.time()) + 100 * DAY)
    replies = client.read({s: Request(Op.ENTRIES, names=("a",), counts=[3], ids=IDS) for s in (0, 1)})
    found = [EntryDump.FromString(bytes(e)) for reply in replies.values() for e in reply.payload if bytes(e)]
    assert sorted(e.last_update_ts_sec for e in found)[:2] == [0, 0]


def test_a_replay_gives_the_same_stamps_whatever_the_clock_says(tmp_path, monkeypatch):
    server = ParameterServer(Engine(Shard(0, 1), "log", tmp_path)).start()
    with PsClient([server.address], deadline=LONG) as client:
        table = ps_table(client, 2, name="t", expire_after="2d")
        for write in WRITES.values():
            write(table)
        client.write(
            {0: Request(Op.ASSIGN, counts=[3], names=("t",), ids=IDS + 10, values=ONES, flags=NOW, req_time=7)}
        )
    expected = server.engine.shard.tables["t"].lookup_entry(torch.arange(20))
    assert EntryDump.FromString(expected[11]).last_update_ts_sec > 7  # the worker's clock does not matter
    server.stop()
    monkeypatch.setattr(time, "time", lambda: 5.0)
    again = Engine(Shard(0, 1), "log", tmp_path)
    again.recover()
    assert again.shard.tables["t"].lookup_entry(torch.arange(20)) == expected
    assert again.shard.tables["t"].max_update_time == server.engine.shard.tables["t"].max_update_time


def test_a_table_of_before_goes_by_the_clock_once_it_is_asked_for_again(tmp_path):
    made = HashTable(2, name="t", optimizer="sgd", initializer="zeros")
    options = json.dumps({"name": "t", "seed": 0, "on_bad_gradient": "raise"}).encode()
    subject = Engine(Shard(0, 1), "log", tmp_path)
    subject.recover()
    create = Request(Op.CREATE, ids=made.table_config.SerializeToString(deterministic=True), values=options)
    assert subject.apply([create])[0].status == Status.OK
    subject.close()
    with (
        ParameterServer(Engine(Shard(0, 1), "log", tmp_path)) as server,
        PsClient([server.address], deadline=LONG) as client,
    ):
        assert not server.engine.shard.tables["t"].clocked
        ps_table(client, 2, name="t", optimizer="sgd", initializer="zeros")
        assert server.engine.shard.tables["t"].clocked


def test_values_that_are_not_numbers_are_refused_before_the_log(ps):
    table = ps_table(ps(2), 2, name="t")
    for bad in (float("nan"), float("inf")):
        for verb in ("assign", "assign_add"):
            with pytest.raises(ConfigError, match=r"table 't': values must be finite"):
                getattr(table, verb)(IDS, torch.full((3, 2), bad))
    assert table.size() == 0
    assert isinstance(Request(Op.ASSIGN, flags=NOW, req_time=3).time, Now)
