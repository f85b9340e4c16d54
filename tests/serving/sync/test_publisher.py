"""Rounds of pushes to real replicas: newer and older values, deletions, refusals, acknowledged ids."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.serving import Feature, ModelExporter, ModelServer
from shoal.serving.export.manifest import Manifest, SignatureSpec
from shoal.serving.server.servable import Servable, Signature
from shoal.serving.status import Code, StatusError
from shoal.serving.sync.history import History
from shoal.serving.sync.monolith.push_client import PushClient
from shoal.serving.sync.publisher import Publisher
from shoal.serving.sync.push import COMMIT, HELLO
from shoal.serving.sync.split import Delta, DeltaBatch
from shoal.serving.sync.target import Layout, Package, Target
from shoal.serving.sync.weights import read_weights, write_weights
from shoal.stamps import Stamp
from shoal.table import test_hash_table
from shoal.table.config.messages import FloatCompressorConfig
from tests.serving.helpers import eventually, flush_fails, free_port
from tests.serving.server.test_server import Client, config_of
from tests.serving.sources import HandSource

LONG = 60.0


class Score(torch.nn.Module):
    """The row's value plus a bias, times a scale."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, user):
        return {"score": (user.sum(-1) + self.bias) * self.scale}


def export(path, version, rows, stamps=None, bias=0.0, dim=2, codec=None, net=None):
    """A standalone version of model m with one table ``user``."""
    table = test_hash_table(dim, name_suffix=f"v{version}_{time.monotonic_ns()}")
    if rows:
        values = torch.tensor(list(rows.values()), dtype=torch.float32)[:, None].expand(-1, dim)
        table.assign(torch.tensor(list(rows)), values.contiguous())
    table.name = "user"
    net = net or Score()
    with torch.no_grad():
        net.bias.fill_(bias)
    tool = ModelExporter(path, model_name="m", net=net, features={"user": Feature(slot="user")}, codec=codec)
    (where,) = tool.export([[table]], global_step=1, timestamp=version).values()
    manifest = Manifest.read(Path(where))
    manifest.stamps = dict(stamps or {})
    manifest.write(Path(where))
    return path / "exported_models"


@pytest.fixture
def serve():
    servers = []

    def start(config=None, port=0, poll=0, **fields):
        server = ModelServer(f"127.0.0.1:{port}", config=config, poll_wait_seconds=poll, **fields).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop(0)


@pytest.fixture
def publish():
    made = []

    def start(source, *servers, **fields):
        targets = [each if isinstance(each, str) else each.address for each in servers]
        made.append(Publisher(source, fields.pop("targets", targets), model="m", **fields))
        return made[-1]

    yield start
    for each in made:
        each.close()


def scores(server, ids):
    return Client(server).predict("m", "", {"user": torch.tensor(ids)[:, None]})["score"].tolist()


def live_table(server, dim=2, name="user"):
    table = test_hash_table(dim, name_suffix=f"live_{time.monotonic_ns()}")
    table.name = name
    server.serve_tables("m", [table])
    return table


# --- rounds -----------------------------------------------------------------------------------------------------------


def test_what_is_learnt_is_served_and_what_is_removed_is_gone(serve, publish):
    server = serve()
    table = live_table(server)
    source = HandSource({"user": 2})
    publisher = publish(source, server)
    source.learn("user", [1, 2, 3], 5.0)
    publisher.flush(LONG)
    assert table.lookup(torch.tensor([1, 2, 3, 4])).tolist() == [[5.0, 5.0]] * 3 + [[0.0, 0.0]]
    source.remove("user", [2])
    source.learn("user", [4], 7.0)
    publisher.flush(LONG)
    assert table.contains(torch.tensor([1, 2, 3, 4])).tolist() == [True, False, True, True]
    (target,) = publisher.status().targets
    assert (target.complete, target.waiting, target.error) == (source.stamp, 0, "")
    assert target.freshness is not None


def test_an_empty_round_sends_nothing(serve, publish):
    server = serve()
    live_table(server)
    source = HandSource({"user": 2})
    publisher = publish(source, server)
    publisher.flush(LONG)
    calls = server.traffic.total
    for _ in range(3):
        publisher.flush(LONG)
    assert server.traffic.total == calls
    source.step += 5  # steps that change nothing
    publisher.flush(LONG)
    assert server.traffic.total == calls


def test_a_round_without_replicas_keeps_ids_for_those_that_come(serve, publish):
    addresses = []
    source = HandSource({"user": 2})
    publisher = publish(source, targets=lambda: list(addresses))
    source.learn("user", [1], 5.0)
    publisher.flush(LONG)
    assert publisher.status().unacknowledged == 1
    server = serve()
    table = live_table(server)
    addresses.append(server.address)
    eventually(lambda: publisher.flush(LONG) or table.size() == 1)
    assert publisher.status().unacknowledged == 0


def test_multi_tables_and_codecs_are_what_the_replica_has(serve, publish, tmp_path):
    codec = FloatCompressorConfig()
    codec.fp16.SetInParent()
    server = serve(config_of(m=(export(tmp_path, 1, {1: 0.5}, codec=codec), "latest")))
    source = HandSource({"user": 2})
    publisher = publish(source, server)
    source.learn("user", [1, 2], 0.1)
    publisher.flush(LONG)
    half = float(torch.tensor(0.1).half())
    assert scores(server, [1, 2]) == pytest.approx([2 * half] * 2, abs=1e-7)


def test_a_table_is_found_by_the_slot_that_features_look_it_up_by(serve, publish, tmp_path):
    table = test_hash_table(2, name_suffix="some")
    tool = ModelExporter(tmp_path, model_name="m", net=Score(), features={"user": Feature(slot="people")})
    tool.export([{"people": table}], global_step=1, timestamp=1)
    server = serve(config_of(m=(tmp_path / "exported_models", "latest")))
    source = HandSource({"people": 2})
    source.learn("people", [1, 2], 3.0)
    publisher = publish(source, server)
    publisher.flush(LONG)
    assert scores(server, [1, 2]) == [6.0, 6.0]
    source.remove("people", [2])
    publisher.flush(LONG)
    assert scores(server, [1, 2]) == [6.0, 0.0]
    again = source.go_on(2000)
    again.learn("people", [3], 1.0)
    publish(again, server).flush(LONG)  # a run that started empty
    assert scores(server, [1, 3]) == [0.0, 2.0]


def test_a_table_that_the_replica_does_not_have_is_named(serve, publish, caplog):
    server = serve()
    live_table(server)
    source = HandSource({"user": 2, "item": 4})
    publisher = publish(source, server)
    source.learn("user", [1], 5.0)
    source.learn("item", [1], 5.0)
    publisher.flush(LONG)
    assert "has no tables ['item'] of these dims" in caplog.text


def test_shards_of_a_table_get_their_ids(serve, publish):
    server = serve()
    tables = []
    for shard in range(2):
        tables.append(test_hash_table(2, name_suffix=f"s{shard}_{time.monotonic_ns()}"))
        tables[-1].name = f"user_{shard}"
    server.serve_tables("m", tables)
    source = HandSource({"user": 2})
    publisher = publish(source, server)
    source.learn("user", range(5), 5.0)
    publisher.flush(LONG)
    source.remove("user", [3])
    publisher.flush(LONG)
    assert [table.size() for table in tables] == [3, 1]


def test_a_hundred_thousand_rows_are_there_after_one_round(serve, publish, tmp_path):
    class Big(HandSource):
        def take(self):
            changes = super().take()
            object.__setattr__(changes, "ids", {"user": torch.arange(100_000)})
            return changes

        def read(self, table, ids):
            return torch.full((len(ids), 16), float(self.step)), torch.ones(len(ids), dtype=torch.bool)

    server = serve(config_of(m=(export(tmp_path, 1, {}, dim=16), "latest")))
    source = Big({"user": 16})
    publisher = publish(source, server)
    publisher.flush(LONG)
    source.step += 1
    publisher.flush(LONG)  # `benchmarks.serving --only push` measures how long it takes
    assert scores(server, [5, 99_999]) == [16.0 * source.step] * 2


# --- acknowledgements -------------------------------------------------------------------------------------------------


def test_an_id_is_acknowledged_when_every_live_replica_has_it(serve, publish, refused):
    server, dead = serve(), refused()
    table = live_table(server)
    addresses = [server.address, dead]
    source = HandSource({"user": 2})
    publisher = publish(source, targets=lambda: list(addresses), timeout_s=2.0)
    source.learn("user", [1, 2], 5.0)

    def only_one_failed():
        targets = publisher.status().targets
        return {each.target: bool(each.error) for each in targets} == {server.address: False, dead: True}

    flush_fails(publisher, dead, until=lambda: table.size() == 2 and only_one_failed())  # the other one has it
    assert publisher.status().unacknowledged == 2
    addresses.remove(dead)  # it has left the registry
    publisher.flush(LONG)
    assert publisher.status().unacknowledged == 0


def test_a_replica_that_comes_back_gets_what_it_missed(serve, publish, tmp_path):
    config = config_of(m=(export(tmp_path, 1, {1: 1.0}, {"trainer": Stamp(1000, 0)}), "latest"))
    server = serve(config, port=free_port())  # it is used again
    source = HandSource({"user": 2}, base=Stamp(999, 0))
    source.rows["user"] = {1: 1.0}
    publisher = publish(source, server, timeout_s=2.0)
    source.learn("user", [2], 5.0)
    publisher.flush(LONG)
    server.stop(0)
    source.learn("user", [3], 6.0)
    with pytest.raises(TimeoutError):
        publisher.flush(0.5)
    again = serve(config, port=server.port)
    publisher.flush(LONG)
    assert scores(again, [1, 2, 3, 4]) == [2.0, 10.0, 12.0, 0.0]
    assert source.scans == 0  # only the changes since its export


def test_a_late_replica_gets_the_export_then_what_changed_since(serve, publish, tmp_path):
    path = export(tmp_path, 1, {1: 1.0}, {"trainer": Stamp(1000, 1)})
    source = HandSource({"user": 2})
    source.learn("user", [1], 1.0)
    addresses = []
    publisher = publish(source, targets=lambda: list(addresses))
    publisher.flush(LONG)
    publisher.exported(1, source.stamp)
    source.learn("user", [2], 2.0)
    source.remove("user", [1])
    publisher.flush(LONG)
    server = serve(config_of(m=(path, "latest")))
    addresses.append(server.address)
    eventually(lambda: publisher.flush(LONG) or publisher.status().targets)
    publisher.flush(LONG)
    assert scores(server, [1, 2]) == [0.0, 4.0]
    assert source.scans == 0


def test_beyond_the_history_every_row_is_sent(serve, publish, tmp_path, caplog):
    path = export(tmp_path, 1, {7: 1.0}, {"trainer": Stamp(1000, 0)})
    addresses = []
    source = HandSource({"user": 2})
    publisher = publish(source, targets=lambda: list(addresses), history=4)
    for each in range(10):
        source.learn("user", [each + 100], 3.0)
        publisher.flush(LONG)
    server = serve(config_of(m=(path, "latest")))
    addresses.append(server.address)
    eventually(lambda: publisher.flush(LONG) or publisher.status().targets)
    publisher.flush(LONG)
    assert scores(server, [7, *range(100, 110)]) == [0.0] + [6.0] * 10  # the source has no row 7
    assert source.scans == 1
    assert "more than 4 ids wait for replicas" in caplog.text


def test_ids_that_are_too_many_for_one_answer_are_asked_for_in_parts(serve, publish, monkeypatch):
    monkeypatch.setattr("shoal.serving.server.rounds.MAX_LISTED", 7)
    server = serve()
    table = live_table(server)
    table.assign(torch.arange(-50, 50), torch.ones(100, 2))
    source = HandSource({"user": 2})
    publisher = publish(source, server)
    source.learn("user", [3], 5.0)
    publisher.flush(LONG)  # the source started empty, so no other row stays
    assert table.size() == 1


def test_an_address_that_cannot_be_used_is_named(serve, publish):
    server = serve()
    live_table(server)
    source = HandSource({"user": 2})
    publisher = publish(source, server, "nowhere.example:1")  # off loopback without a certificate
    source.learn("user", [3], 5.0)
    flush_fails(publisher, r"nowhere\.example")
    assert len(publisher.status().targets) == 2


def test_a_source_that_lost_track_sends_every_row(serve, publish):
    server = serve()
    table = live_table(server)
    source = HandSource({"user": 2})
    publisher = publish(source, server)
    source.learn("user", [1, 2], 5.0)
    publisher.flush(LONG)
    source.learn("user", [3], 6.0)
    source.remove("user", [1])
    source.touched["user"].clear()
    source.lost = True
    publisher.flush(LONG)
    assert table.contains(torch.tensor([1, 2, 3])).tolist() == [False, True, True]


# --- newer and older --------------------------------------------------------------------------------------------------


def package(source, rows, stamp=None, gone=None, weights=None):
    values = {}
    for table, each in rows.items():
        given = np.array(list(each.values()), np.float32)[:, None]
        values[table] = (np.array(list(each), np.int64), np.repeat(given, source.tables[table], 1))
    stamp = stamp or source.stamp
    name, now = f"r{time.monotonic_ns()}", time.time()
    return Package("m", source.name, source.tables, stamp, name, values, gone or {}, weights, now)


def test_the_newer_of_two_values_stays_whatever_comes_first(serve):
    server = serve()
    table = live_table(server)
    source = HandSource({"user": 2})
    target = Target(server.address, "m")
    session = target.hello("trainer", 1000, None, False, LONG)
    target.send(package(source, {"user": {1: 5.0, 2: 5.0}}, Stamp(1000, 5)), session, "", True, 0.0, LONG)
    target.send(package(source, {"user": {2: 4.0, 3: 4.0}}, Stamp(1000, 4)), session, "", True, 0.0, LONG)
    assert table.lookup(torch.tensor([1, 2, 3]))[:, 0].tolist() == [5.0, 5.0, 4.0]
    target.send(
        package(source, {"user": {2: 1.0}}, Stamp(2000, 1)), session, "", True, 0.0, LONG
    )  # a later run, at step 1
    target.send(package(source, {"user": {2: 9.0}}, Stamp(1000, 9)), session, "", True, 0.0, LONG)
    assert table.lookup(torch.tensor([2]))[:, 0].tolist() == [1.0]
    gone = {"user": np.array([1], np.int64)}
    target.send(package(source, {}, Stamp(2000, 2), gone), session, "", True, 0.0, LONG)
    target.send(
        package(source, {"user": {1: 8.0}}, Stamp(2000, 1)), session, "", True, 0.0, LONG
    )  # before the deletion
    assert not table.contains(torch.tensor([1])).any()
    assert target.hello("trainer", 2000, None, False, LONG).complete == Stamp(2000, 2)
    target.close()


def test_an_export_that_is_newer_than_a_push_wins_and_the_other_way_round(serve, publish, tmp_path):
    path = export(tmp_path, 1, {1: 1.0}, {"trainer": Stamp(1000, 0)})
    server = serve(config_of(m=(path, "latest")))
    source = HandSource({"user": 2}, base=Stamp(999, 0))
    source.rows["user"] = {1: 1.0}
    publisher = publish(source, server)
    source.learn("user", [1, 2], 2.0)  # step 1
    source.remove("user", [2])  # step 2
    publisher.flush(LONG)
    source.learn("user", [3], 3.0)  # step 3
    publisher.flush(LONG)
    export(tmp_path, 2, {1: 20.0, 2: 20.0, 3: 20.0}, {"trainer": Stamp(1000, 2)})  # made before step 3
    server.refresh()
    assert scores(server, [1, 2, 3]) == [40.0, 40.0, 6.0]
    source.learn("user", [1], 5.0)
    assert publisher.round()  # it adapts to the new version
    eventually(lambda: scores(server, [1, 2, 3]) == [10.0, 40.0, 6.0])  # in the same round
    publisher.flush(LONG)
    assert publisher.status().targets[0].version == 2


def test_deletions_are_remembered_until_an_export_that_is_newer(serve, publish, tmp_path):
    path = export(tmp_path, 1, {1: 1.0, 2: 1.0}, {"trainer": Stamp(1000, 0)})
    server = serve(config_of(m=(path, "latest")))
    source = HandSource({"user": 2}, base=Stamp(999, 0))
    source.rows["user"] = {1: 1.0, 2: 1.0}
    publisher = publish(source, server)
    source.remove("user", [1])  # step 1
    publisher.flush(LONG)
    export(tmp_path, 2, {1: 1.0, 2: 1.0}, {"trainer": Stamp(1000, 0)})  # another export of the same rows
    server.refresh()
    assert scores(server, [1, 2]) == [0.0, 2.0]
    export(tmp_path, 3, {1: 3.0, 2: 1.0}, {"trainer": Stamp(1000, 1)})
    server.refresh()
    assert scores(server, [1, 2]) == [6.0, 2.0]


@pytest.mark.parametrize("exported", [50, 150], ids=["export before the checkpoint", "export after the checkpoint"])
def test_after_a_roll_back_replicas_are_as_the_trainer(serve, publish, tmp_path, exported):
    """Checkpoint at step 100 with rows 1, 2; the first run goes on, changes 1, adds 3, removes 2, and dies."""
    rows = {1: 1.0, 2: 1.0} if exported == 50 else {1: 9.0, 3: 9.0}
    server = serve(config_of(m=(export(tmp_path, 1, rows, {"trainer": Stamp(1000, exported)}), "latest")))
    first = HandSource({"user": 2}, base=Stamp(999, 99))
    first.rows["user"] = {1: 1.0, 2: 1.0}
    first.step = 160
    publisher = publish(first, server)
    publisher.flush(LONG)
    first.learn("user", [1, 3], 9.0)
    first.remove("user", [2])
    publisher.flush(LONG)
    assert scores(server, [1, 2, 3]) == [18.0, 0.0, 18.0]
    publisher.close()
    second = first.go_on(2000, Stamp(1000, 100), {"user": {1: 1.0, 2: 1.0}})
    publisher = publish(second, server)
    second.learn("user", [4], 4.0)
    publisher.flush(LONG)
    assert scores(server, [1, 2, 3, 4]) == [2.0, 2.0, 0.0, 8.0]
    assert second.scans == (exported > 100)


def owned(shard, ids):
    return ids % 2 == shard


def test_shards_do_not_delete_the_rows_of_others(serve, publish):
    server = serve()
    table = live_table(server)
    publishers = []
    for shard in range(2):
        source = HandSource({"user": 2}, 1000 + shard, name=f"ps_{shard}", owns=partial(owned, shard))
        publishers.append((source, publish(source, server)))
        source.learn("user", [10 + shard], 1.0 + shard)
        publishers[-1][1].flush(LONG)
    again = publishers[0][0].go_on(3000)  # the source has lost its rows
    again.learn("user", [20], 7.0)
    publish(again, server).flush(LONG)
    assert table.lookup(torch.tensor([10, 11, 20]))[:, 0].tolist() == [0.0, 2.0, 7.0]


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_push_for_another_version_is_refused_with_what_it_should_be(serve, tmp_path):
    path = export(tmp_path, 1, {1: 1.0})
    server = serve(config_of(m=(path, "latest")))
    source = HandSource({"user": 2})
    target = Target(server.address, "m")
    session = target.hello("trainer", 1000, None, False, LONG)
    export(tmp_path, 2, {1: 2.0})
    server.refresh()
    with pytest.raises(StatusError, match=r"the push is for version 1; this replica has version 2") as error:
        target.send(package(source, {"user": {1: 5.0}}), session, "", True, 0.0, LONG)
    assert error.value.code == Code.FAILED_PRECONDITION
    assert dict(error.value.metadata)["shoal-version"] == "2"
    assert scores(server, [1]) == [4.0]
    again = target.hello("trainer", 1000, None, False, LONG)
    target.send(package(source, {"user": {1: 5.0}}, Stamp(1000, 1)), again, "", True, 0.0, LONG)
    assert scores(server, [1]) == [10.0]
    target.close()


def test_a_round_that_is_not_whole_changes_nothing(serve, tmp_path):
    server = serve(config_of(m=(export(tmp_path, 1, {1: 1.0}, bias=1.0), "latest")))
    source = HandSource({"user": 2})
    target = Target(server.address, "m")
    session = target.hello("trainer", 1000, None, False, LONG)
    whole = package(source, {"user": {1: 5.0}}, weights={"bias": torch.ones(1) * 9, "scale": torch.ones(1)})
    ((payload, mark, gone, total),) = whole.parts(session.layouts)
    whole._parts[session.layouts] = [(payload, mark, gone, total + 1)]
    with pytest.raises(StatusError, match="1 and 0 have come") as error:
        target.send(whole, session, "", True, 0.0, LONG)
    assert error.value.code == Code.DATA_LOSS
    whole._parts.clear()
    blob, _ = whole.blob(session)
    whole._blobs = dict.fromkeys(whole._blobs, (blob, "0" * 64))
    with pytest.raises(StatusError, match="not 0000") as error:
        target.send(whole, session, "", True, 0.0, LONG)
    assert error.value.code == Code.DATA_LOSS
    assert scores(server, [1]) == [3.0]  # neither rows nor weights
    whole._blobs.clear()
    target.send(whole, session, "", True, 0.0, LONG)
    assert scores(server, [1]) == [19.0]
    target.close()


BASE = "base in the message must be [run, step] or null, got"


@pytest.mark.parametrize(
    ("signature", "message", "error"),
    [
        (HELLO, b"{", "the message is not JSON"),
        (HELLO, b"[" * 100_000, "the message is not JSON"),
        (HELLO, b"[]", "it must be an object, got list"),
        (HELLO, b'{"base": 7}', f"{BASE} 7"),
        (HELLO, b'{"base": [1]}', f"{BASE} [1]"),
        (HELLO, b'{"base": [1, "x"]}', f'{BASE} [1, "x"]'),
        (HELLO, b'{"all": 1}', "all in the message must be true or false, got 1"),
        (HELLO, b'{"parts": "x"}', 'parts in the message must be an integer of 0 or more, got "x"'),
        (HELLO, b'{"parts": true}', "parts in the message must be an integer of 0 or more, got true"),
        (HELLO, b'{"parts": -2}', "parts in the message must be an integer of 0 or more, got -2"),
        (HELLO, b'{"part": 2, "parts": 2}', "part must be less than parts, which is at most 4294967296, got 2 of 2"),
        (HELLO, b'{"parts": 99999999999999999999}', "got 0 of 99999999999999999999"),
        (COMMIT, b"{}", "rows in the message must be an integer of 0 or more, got null"),
        (COMMIT, b'{"rows": 1, "deleted": 0, "weights": 5}', "weights in the message must be a string, got 5"),
        (
            COMMIT,
            b'{"rows": 1, "deleted": 0, "weights": ""}',
            "complete in the message must be true or false, got null",
        ),
    ],
)
def test_a_malformed_message_is_refused_and_the_round_goes_on(serve, tmp_path, signature, message, error):
    server = serve(config_of(m=(export(tmp_path, 1, {1: 1.0}), "latest")))
    source = HandSource({"user": 2})
    target = Target(server.address, "m")
    session = target.hello("trainer", 1000, None, False, LONG)
    whole = package(source, {"user": {1: 5.0}})
    sent = []

    def and_a_malformed_one(called, inputs, info, timeout):
        if called == COMMIT:
            with pytest.raises(StatusError) as refused:
                real(signature, {"message": torch.frombuffer(bytearray(message), dtype=torch.uint8)}, info, timeout)
            sent.append(refused.value)
        return real(called, inputs, info, timeout)

    real, target._call = target._call, and_a_malformed_one
    target.send(whole, session, "", True, 0.0, LONG)
    assert [one.code for one in sent] == [Code.INVALID_ARGUMENT]
    assert error in sent[0].message
    assert scores(server, [1]) == [10.0]
    target.close()


def test_weights_that_do_not_fit_are_named_and_rows_go_on(serve, publish, tmp_path, caplog):
    server = serve(config_of(m=(export(tmp_path, 1, {1: 1.0}), "latest")))
    source = HandSource({"user": 2})
    source.set_weights({"bias": torch.ones(3), "scale": torch.ones(1)})
    publisher = publish(source, server)
    source.learn("user", [1], 5.0)
    publisher.flush(LONG)
    assert scores(server, [1]) == [10.0]
    assert "the replica's net has 'bias' of shape [1], the source [3]; export the model again" in caplog.text


def test_an_old_sender_works_as_before(serve, tmp_path):
    server = serve(config_of(m=(export(tmp_path, 1, {1: 1.0}), "latest")))
    delta = Delta("user", 2, np.array([1, 2]), np.full((2, 2), 5.0, np.float32))
    answer = PushClient(server.address).push(DeltaBatch("m", "hashtable_assign", 60_000, False, [delta]))
    assert (answer.status_code, answer.update_num) == (0, 2)
    assert scores(server, [1, 2]) == [10.0, 10.0]


def without_rounds(server):
    """A replica as versions before rounds of pushes were, and other servers of the protocol are."""
    version = server.model("m").current()
    version.servable.rounds.signatures.clear()


def test_a_replica_of_an_older_version_gets_all_rows_then_changes_as_plain_pushes(serve, publish, tmp_path, caplog):
    server = serve(config_of(m=(export(tmp_path, 1, {1: 1.0}, bias=1.0), "latest")))
    without_rounds(server)
    source = HandSource({"user": 2})
    source.learn("user", [2], 2.0)
    source.learn("user", [3], 3.0)
    source.set_weights({"bias": torch.ones(1) * 9, "scale": torch.ones(1)})
    publisher = publish(source, server)
    publisher.flush(LONG)
    assert scores(server, [1, 2, 3]) == [3.0, 5.0, 7.0]  # the replica's own weights
    assert "is sent rows" in caplog.text
    assert "serve the model with this version of shoal" in caplog.text
    (target,) = publisher.status().targets
    assert (target.plain, target.error, target.waiting) == (True, "", 0)
    source.learn("user", [3], 5.0)
    source.remove("user", [2])
    publisher.flush(LONG)
    assert scores(server, [1, 2, 3]) == [3.0, 1.0, 11.0]


def test_a_server_that_takes_no_rows_is_named_with_what_to_do(serve, publish):
    server = serve()
    server.publish("m", Servable({"serving_default": Signature(SignatureSpec(), lambda inputs: inputs)}))
    publisher = publish(HandSource({"user": 2}), server)
    flush_fails(publisher, r"takes neither rounds of pushes .* serve the model with this version")


def test_a_publisher_says_what_it_cannot_use(serve, publish):
    source = HandSource({"user": 2})

    def broken():
        raise OSError("the registry is away")

    publisher = publish(source, targets=broken)
    source.learn("user", [1], 5.0)
    flush_fails(publisher, "the registry is away")


# --- dense weights ----------------------------------------------------------------------------------------------------


def test_weights_as_bytes():
    weights = {
        "b": torch.arange(5, dtype=torch.float64),
        "a": torch.ones(2, 3, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(7),
    }
    blob, digest = write_weights(weights)
    found = read_weights(blob)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in weights.items())
    assert write_weights(dict(reversed(weights.items())))[1] == digest
    assert write_weights(weights | {"a": torch.zeros(2, 3, dtype=torch.bfloat16)})[1] != digest
    assert write_weights({"x": torch.zeros(2, 3)})[1] != write_weights({"x": torch.zeros(3, 2)})[1]
    for bad in (blob[:4], blob[: len(blob) // 2], torch.zeros(0, dtype=torch.uint8)):
        with pytest.raises(Exception, match="these bytes are not dense weights"):
            read_weights(bad)


def test_rows_and_weights_are_switched_together(serve, publish, tmp_path):
    """In every round the row plus the bias is 0; a batch that saw a mix would answer something else."""
    net = Score()
    server = serve(config_of(m=(export(tmp_path, 1, dict.fromkeys(range(2000), 0.0), net=net), "latest")))
    source = HandSource({"user": 2})
    source.rows["user"] = dict.fromkeys(range(2000), 0.0)
    publisher = publish(source, server)
    stop, wrong, answers = threading.Event(), [], []

    def ask():
        client = Client(server)
        ids = torch.randint(0, 2000, (64, 1))
        while not stop.is_set():
            found = client.predict("m", "", {"user": ids})["score"]
            answers.append(1)
            if bool((found != 0).any()):
                wrong.append(found.unique().tolist())

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for each in threads:
        each.start()
    try:
        for value in range(1, 16):
            source.learn("user", range(2000), float(value))
            source.set_weights({"bias": torch.tensor([-2.0 * value]), "scale": torch.ones(1)})
            publisher.flush(LONG)
    finally:
        stop.set()
        for each in threads:
            each.join(LONG)
    assert answers
    assert wrong == []
    assert scores(server, [1, 5000]) == [0.0, -30.0]


def test_weights_are_kept_by_a_new_version_unless_its_export_is_newer(serve, publish, tmp_path):
    path = export(tmp_path, 1, {1: 1.0}, {"trainer": Stamp(1000, 0)})
    server = serve(config_of(m=(path, "latest")))
    source = HandSource({"user": 2}, base=Stamp(999, 0))
    source.rows["user"] = {1: 1.0}
    publisher = publish(source, server)
    source.learn("user", [1], 1.0)
    source.set_weights({"bias": torch.tensor([3.0]), "scale": torch.ones(1)})
    publisher.flush(LONG)
    assert scores(server, [1]) == [5.0]
    export(tmp_path, 2, {1: 1.0}, {"trainer": Stamp(1000, 0)}, bias=7.0)  # from before the push
    server.refresh()
    assert scores(server, [1]) == [5.0]
    export(tmp_path, 3, {1: 1.0}, {"trainer": Stamp(1000, 9)}, bias=7.0)
    server.refresh()
    assert scores(server, [1]) == [9.0]


# --- ids that changed -------------------------------------------------------------------------------------------------


def test_a_history_knows_what_changed_since():
    history = History(Stamp(1, -1), 100)
    for step in range(50):
        assert history.add(Stamp(1, step), {"t": np.array([step % 7, step])}) == 0
    assert sorted(history.since(Stamp(1, 47))["t"]) == [0, 6, 48, 49]
    assert set(history.since(Stamp(1, -1))["t"]) == set(range(50))
    history.forget(Stamp(1, 40))
    assert history.since(Stamp(1, 39)) is None
    assert history.since(Stamp(1, 49)) == {}
    assert history.add(Stamp(1, 50), {"t": np.arange(1000)}) > 0
    assert history.floor == Stamp(1, 49)
    assert len(history.since(Stamp(1, 49))["t"]) == 1000


def test_replicas_that_are_sent_a_round_at_once_get_all_of_it():
    rows = 60_000
    layouts = (Layout("hashtable_assign", (("user", 2),), ()),)
    for name in map(str, range(10)):
        values = {"user": (np.arange(rows), np.ones((rows, 2), np.float32))}
        package = Package("m", "trainer", {"user": 2}, Stamp(1, 1), name, values, {}, None, 0)
        begin = threading.Barrier(4)

        def sent(_, package=package, begin=begin):
            begin.wait(60)
            return sum(total for *_, total in package.parts(layouts))

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(sent, range(4))) == [rows] * 4
