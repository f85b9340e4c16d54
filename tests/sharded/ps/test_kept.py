"""Checkpoints that servers keep under a name, and tables that are restored from them."""

import pytest
import torch

pytest.importorskip("zmq")

from shoal.errors import ConfigError, ShoalError, UnsupportedError
from shoal.sharded import PsClient, ps_table
from shoal.sharded.ps import Engine, ParameterServer, Shard

IDS = torch.arange(1, 200) * 7919


def start(folder, durability="log", index=0, of=1):
    return ParameterServer(Engine(Shard(index, of), durability, None if folder is None else folder / f"s{index}"))


def learn(table, rounds, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(rounds):
        table.apply_gradients(IDS, torch.randn(len(IDS), 4, generator=generator), 0, req_time=1000)


def rows(table):
    return [part.lookup_entry(IDS) for part in table.tables]


@pytest.mark.parametrize("durability", ["none", "checkpoint", "log"])
def test_a_table_comes_back_and_goes_on_to_the_same_bits_while_others_stay(tmp_path, durability):
    with start(tmp_path, durability, 0, 2) as a, start(tmp_path, durability, 1, 2) as b:  # noqa: SIM117
        with PsClient([a.address, b.address]) as client:
            table = ps_table(client, 4, name="item", seed=3)
            other = ps_table(client, 4, name="user", seed=3)
            learn(table, 2, seed=1)
            learn(other, 1, seed=4)
            client.checkpoint(keep_as="run-1")
            then = rows(table)
            learn(table, 2, seed=2)
            after = rows(table)
            learn(other, 1, seed=5)
            others = rows(other)
            client.checkpoint()
            client.checkpoint()  # enough to remove the first one
            client.restore("item", "run-1")
            assert rows(table) == then
            assert rows(other) == others
            learn(table, 2, seed=2)
            assert rows(table) == after


@pytest.mark.parametrize("again", [False, True], ids=["log", "log and checkpoint"])
def test_a_server_that_dies_after_a_restore_comes_back_with_it(tmp_path, again):
    server = start(tmp_path).start()
    with PsClient([server.address]) as client:
        table = ps_table(client, 4, name="item", seed=3)
        learn(table, 1, seed=1)
        client.checkpoint(keep_as="run-1")
        then = rows(table)
        learn(table, 1, seed=2)
        client.restore("item", "run-1")
        if again:
            client.checkpoint()
    server.stop()  # without a checkpoint
    with start(tmp_path) as server, PsClient([server.address]) as client:
        assert rows(ps_table(client, 4, name="item", seed=3)) == then


def test_kept_checkpoints_stay_as_long_as_they_are_listed(tmp_path):
    with start(tmp_path, "checkpoint") as server, PsClient([server.address]) as client:
        table = ps_table(client, 4, name="item")
        for number, others in ((1, []), (2, ["run-1"]), (3, ["run-2"])):
            learn(table, 1, seed=number)
            client.checkpoint(keep_as=f"run-{number}", others=others)
        client.checkpoint(keep_as="other-1")
        assert sorted(path.name for path in (tmp_path / "s0").glob("kept-*")) == [
            "kept-other-1",
            "kept-run-2",
            "kept-run-3",
        ]
        with pytest.raises(ConfigError, match="keeps no checkpoint 'run-1'"):
            client.restore("item", "run-1")
        client.checkpoint(keep_as="run-3", others=["run-2"])  # again after a restart of the trainer
        client.restore("item", "run-3")


@pytest.mark.parametrize("name", ["../../x-1", "a/b-1", "run", "-", "", "run-1/..", "é-1"])
def test_a_name_is_no_path(tmp_path, name):
    with start(tmp_path, "checkpoint") as server, PsClient([server.address]) as client:
        table = ps_table(client, 4, name="item")
        learn(table, 1, seed=1)
        before = rows(table)
        if name:
            with pytest.raises(ShoalError, match="must be named RUN-WHAT"):
                client.checkpoint(keep_as=name)
        with pytest.raises(ShoalError, match="must be named RUN-WHAT"):
            client.restore("item", name)
        assert rows(table) == before
        assert not list(tmp_path.glob("**/kept-*"))


def test_what_cannot_be_brought_back_is_refused(tmp_path):
    with start(None, "none") as server, PsClient([server.address]) as client:
        ps_table(client, 4, name="item")
        with pytest.raises(UnsupportedError, match="need a directory"):
            client.checkpoint(keep_as="run-1")
        with pytest.raises(ConfigError, match="start the server with a directory"):
            client.restore("item", "run-1")
    with start(tmp_path, "checkpoint") as server, PsClient([server.address]) as client:
        client.checkpoint(keep_as="run-1")  # before there is a table
        ps_table(client, 4, name="item")
        with pytest.raises(ConfigError, match="has no table 'item'"):
            client.restore("item", "run-1")
        with pytest.raises(ConfigError, match="has no table 'nothing'"):
            client.restore("nothing", "run-1")
        manifest = next(tmp_path.glob("s0/kept-run-1/manifest.json"))
        manifest.unlink()
        manifest.write_text("{")
        with pytest.raises(ShoalError, match=r"kept-run-1/manifest\.json is not a JSON file"):
            client.restore("item", "run-1")


def test_ids_wait_for_admission_on_servers(tmp_path):
    from shoal.nn import HashEmbedding
    from shoal.table.config.messages import SlotOccurrenceThresholdConfig

    thresholds = SlotOccurrenceThresholdConfig(default_occurrence_threshold=2).SerializeToString().hex()
    with start(None, "none") as server, PsClient([server.address]) as client:
        table = ps_table(client, 4, name="item", filter={"capacity": 10_000, "config": thresholds})
        module = HashEmbedding(table)
        for round in range(3):
            assert table.size() < 10, round  # counts are approximate: some ids share theirs
            module(IDS).sum().backward()
        assert table.size() == len(IDS)
