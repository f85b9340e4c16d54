"""Touched ids between a trainer and `shoal sync`: what is kept, what is acknowledged and when; then real processes."""

import signal

import pytest
import torch

from shoal.cli.main import main
from shoal.errors import ConfigError
from shoal.serving import (
    ClientConfig,
    DummySyncServer,
    ModelServer,
    SyncSource,
    create_dummy_sync_client,
    follow_source,
)
from shoal.serving.export.manifest import SignatureSpec, TensorSpec
from shoal.serving.server.servable import Servable, Signature
from shoal.serving.sync.history import History
from shoal.serving.sync.monolith.handle import SyncClientHandle
from shoal.stamps import Stamp
from shoal.table import test_hash_table
from tests.serving.helpers import eventually
from tests.serving.sync.test_online import commands, patient  # noqa: F401  (the fixture)
from tests.serving.sync.test_sync_client import step

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def server():
    server = DummySyncServer("127.0.0.1:0")
    server.address = f"127.0.0.1:{server.get_port()[0]}"
    yield server
    server.shutdown()


def pushed(server):
    return sorted(i for request in server.requests for i in request.inputs["MonolithHashTable_t_id"].int64_val)


class Trainer:
    """A table, and the server that offers what was trained on it."""

    def __init__(self):
        self.handle = SyncClientHandle("trained")
        self.table = test_hash_table(1, name_suffix="t", sync_client=self.handle)
        self.server = ModelServer().start()
        self.address = f"127.0.0.1:{self.server.port}"
        self.source = SyncSource(self.server, self.handle)

    def train(self, *ids):
        step(self.table, list(ids))


@pytest.fixture
def trainer():
    trainer = Trainer()
    yield trainer
    trainer.server.stop(0)


class Pusher:
    """What `shoal sync` does, round by round."""

    def __init__(self, trainer):
        self.handle = SyncClientHandle("pusher")
        self.follower = follow_source(trainer.address, self.handle)

    def round(self, *targets):
        pulled = self.follower.pull()
        config = ClientConfig(model_name="m", signature_name="hashtable_assign", targets=targets, timeout_in_ms=60_000)
        self.handle.sync(config)
        return pulled

    def die(self):
        self.follower._channel.close()  # without notifying the trainer


def test_ids_that_no_replica_has_outlive_the_process_that_took_them(trainer, server, refused):
    dead = refused()
    first = Pusher(trainer)
    trainer.train(1, 2)
    first.round()  # there is no replica
    trainer.train(3)
    first.round(dead)
    trainer.train(4)
    first.round(dead)
    assert first.round(dead) == 0  # rows that it has are not sent again
    first.die()
    second = Pusher(trainer)
    assert second.round(server.address) == 4
    assert pushed(server) == [1, 2, 3, 4]
    assert second.round(server.address) == 0
    second.die()


def test_ids_wait_until_the_last_replica_has_them(trainer, server, refused):
    first = Pusher(trainer)
    trainer.train(1)
    first.round(server.address, refused())
    trainer.train(2)
    first.round(server.address)  # the replica that missed them has left
    first.round(server.address)
    first.die()
    second = Pusher(trainer)
    assert second.round(server.address) == 0
    assert pushed(server) == [1, 2]
    second.die()


def test_a_follower_that_closes_acknowledges_what_was_delivered(trainer, server, refused):
    first = Pusher(trainer)
    trainer.train(1)
    first.round(server.address)
    trainer.train(2)
    first.follower.close()
    second = Pusher(trainer)
    assert second.round(refused()) == 1  # id 2 came after the last round
    second.follower.close()
    assert Pusher(trainer).follower.pull() == 1  # no replica has it yet


def test_an_acknowledgement_of_another_run_of_the_trainer_frees_nothing(trainer, server):
    pusher = Pusher(trainer)
    trainer.train(1)
    pusher.round(server.address)
    for wrong in (1, trainer.source._sequence + 5):
        again = SyncSource(trainer.server, trainer.handle)  # as if the trainer were restarted
        trainer.train(2, 3)
        ack = torch.tensor(wrong)
        trainer.source = again
        assert len(again._touched({"ack": ack, "received": ack})["MonolithHashTable_t_id"]) == 2
        ack = torch.tensor(0)
        assert len(again._touched({"ack": ack, "received": ack})["MonolithHashTable_t_id"]) == 2
    assert pusher.round(server.address) == 2
    assert pushed(server) == [1, 2, 3]


def test_only_a_source_of_this_version_is_followed_and_only_by_a_client_that_pushes(trainer):
    trainer.server.serve_tables("other", trainer.table)
    with pytest.raises(ConfigError, match="does not offer touched rows as 'other'"):
        follow_source(trainer.address, SyncClientHandle("pusher"), "other")
    with pytest.raises(ConfigError, match="pushes nothing"):
        follow_source(trainer.address, create_dummy_sync_client())
    spec = SignatureSpec({"ack": TensorSpec("int64", [])}, {"sequence": TensorSpec("int64", [])})
    trainer.server.publish("old", Servable({"/touched": Signature(spec, lambda inputs: inputs, push=True)}))
    with pytest.raises(ConfigError, match="older version of shoal; upgrade the trainer"):
        follow_source(trainer.address, SyncClientHandle("pusher"), "old")


def test_what_a_source_holds_is_bounded_and_what_it_drops_is_counted(trainer, metrics):
    trainer.source._held = History(Stamp(0, 0), 6)
    pusher = Pusher(trainer)
    for base in range(0, 40, 4):
        trainer.train(*range(base, base + 4))
        assert pusher.follower.pull() == 4
    held = len(trainer.source._held)
    assert 4 <= held <= 6
    dropped = sum(value for name, value, tags in metrics.counters if name == "touched_key_set_dropped")
    assert dropped == 40 - held
    assert 39 in trainer.source._held.since(trainer.source._held.floor)[0]


def test_many_rounds_without_a_replica_hold_few_batches(trainer):
    pusher = Pusher(trainer)
    for base in range(100):
        trainer.train(base, base + 1)
        assert pusher.follower.pull() == 2
    assert len(trainer.source._held._rounds) <= 64
    pusher.die()
    assert Pusher(trainer).follower.pull() == 101


def test_one_round_of_the_command_acknowledges_what_every_replica_took(trainer, server, refused, capsys):
    trainer.train(1, 2)
    given = ["sync", "--source", trainer.address, "--model", "m", "--once", "--target"]
    assert main([*given, refused()]) == 1
    assert main([*given, server.address]) == 0
    assert pushed(server) == [1, 2]
    assert main([*given, server.address]) == 0
    assert len(server.requests) == 1


def test_a_killed_command_loses_nothing(trainer, server, refused, commands):  # noqa: F811
    dead = refused()
    syncing = commands("sync", "--source", trainer.address, "--model", "m", "--target", dead, "--interval", 0.05,
                       "--json")  # fmt: skip
    for ids in ([1, 2], [3]):
        trainer.train(*ids)
        eventually(lambda ids=ids: any(t["waiting"] >= ids[-1] for t in syncing.line()["targets"]), 300, "a round")
    syncing.end(signal.SIGKILL)
    assert main(["sync", "--source", trainer.address, "--model", "m", "--target", server.address, "--once"]) == 0
    assert pushed(server) == [1, 2, 3]
