"""Failures in a round that must not lose rows or affect other targets and later rounds; servers on loopback."""

import json
import logging

import pytest

from shoal.serving import ClientConfig, DummySyncServer, SyncClientManager, parameter_sync_client_from_config
from shoal.serving.sync.monolith import push_client
from shoal.serving.sync.monolith.push_client import PushClient
from shoal.table import test_hash_table
from tests.serving.sync.test_sync_client import FakeClient, address, config_of, push_of, step, sync


@pytest.fixture
def server():
    server = DummySyncServer("127.0.0.1:0")
    yield server
    server.shutdown()


def test_a_round_that_breaks_in_the_middle_keeps_its_ids(server, monkeypatch):
    handle = parameter_sync_client_from_config()
    table = test_hash_table(1, name_suffix="t", sync_client=handle)
    step(table, [1, 2])

    def broken(*args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(handle.manager, "push_to", broken)
    with pytest.raises(RuntimeError, match="new thread"):
        handle.sync(config_of(address(server)))
    monkeypatch.undo()
    assert handle.waiting() == {"": 0, address(server): 2}
    assert sync(handle, config_of(address(server)))["responses"][0]["update_num"] == 2


def test_a_target_that_vanishes_during_the_round_keeps_its_ids(server):
    handle = parameter_sync_client_from_config()
    table = test_hash_table(1, name_suffix="t", sync_client=handle)
    real = handle.manager.push_to

    def push_to(*args):
        handle.manager.try_replace([])  # by another thread
        return real(*args)

    handle.manager.push_to = push_to
    step(table, [1, 2])
    assert not handle.sync(config_of(address(server))).responses
    handle.manager.push_to = real
    assert sync(handle, config_of(address(server)))["responses"][0]["update_num"] == 2


def test_a_target_without_a_client_fails_alone_and_is_tried_again(server):
    broken = [True]

    def make(target):
        if target == "bad:1" and broken[0]:
            raise OSError("no such certificate")
        return PushClient(address(server)) if target == "bad:1" else PushClient(target)

    handle = parameter_sync_client_from_config()
    handle.manager = SyncClientManager(make)
    table = test_hash_table(1, name_suffix="t", sync_client=handle)
    step(table, [1])
    config = config_of(address(server), "bad:1")
    answers = {each["target"]: each for each in sync(handle, config)["responses"]}
    assert answers[address(server)]["update_num"] == 1
    assert answers["bad:1"]["status_code"] == 14
    assert "no such certificate" in answers["bad:1"]["error_message"]
    assert handle.waiting() == {"": 0, address(server): 0, "bad:1": 1}
    broken[0] = False
    assert sync(handle, config)["responses"] == [
        {"status_code": 0, "error_message": "", "target": "bad:1", "update_num": 1}
    ]


def test_a_client_that_cannot_be_closed_does_not_keep_others_from_coming(caplog):
    class Stuck(FakeClient):
        def close(self):
            raise RuntimeError("it does not close")

    manager = SyncClientManager(Stuck)
    manager.try_replace(["a:1", "b:1"])
    with caplog.at_level(logging.WARNING):
        assert manager.try_replace(["c:1"])
    assert manager.targets == ["c:1"]
    assert "it does not close" in caplog.text
    assert [each.update_num for each in manager.push(push_of(3), "m", "s").responses] == [3]


def test_a_channel_that_cannot_be_opened_again_is_no_end(server, monkeypatch, refused):
    client = PushClient(refused())
    real, name = push_client.open_channel, "open_channel"
    monkeypatch.setattr(push_client, name, lambda *args: 1 / 0)
    assert client.push(push_of(1)).status_code == 14
    monkeypatch.setattr(push_client, name, lambda target, *args: real(address(server), *args))
    assert client.push(push_of(1)).status_code == 0
    client.close()


def test_ids_of_a_target_that_leaves_are_counted(server, refused, metrics, caplog):
    handle = parameter_sync_client_from_config()
    table = test_hash_table(1, name_suffix="t", sync_client=handle)
    dead = refused()
    step(table, [1, 2, 3])
    sync(handle, config_of(dead))
    with caplog.at_level(logging.INFO):
        sync(handle, config_of(address(server)))
    assert ("parameter_sync_forgotten_fids", 3, f"name={handle.name}|target={dead}") in metrics.counters
    assert "3 ids" in caplog.text


def test_what_the_history_cannot_hold_is_counted_under_the_clients_name(metrics, server):
    handle = parameter_sync_client_from_config()
    handle.catch_up()
    handle._publisher._capacity = 4
    table = test_hash_table(1, name_suffix="t", sync_client=handle)
    for ids in ([1, 2, 3], [4, 5]):
        step(table, ids)
        handle.sync(config_of(address(server)))
    assert [each for each in metrics.counters if each[0] == "touched_key_set_dropped"] == [
        ("touched_key_set_dropped", 3, "name=MonolithSyncClient_")
    ]


def test_a_result_with_a_failure_is_still_json(refused):
    handle = parameter_sync_client_from_config()
    table = test_hash_table(1, name_suffix="t", sync_client=handle)
    step(table, [1])
    assert json.loads(json.dumps(sync(handle, ClientConfig(targets=[refused()], timeout_in_ms=100))))
