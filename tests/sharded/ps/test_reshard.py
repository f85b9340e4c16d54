"""Checkpoints for another number of shards, which must not disturb a server that is running."""

import os

import pytest
import torch

pytest.importorskip("zmq")

from shoal.cli.main import main
from shoal.errors import ConfigError, DataError
from shoal.sharded import Engine, ParameterServer, PsClient, Shard, ps_table
from shoal.sharded.ps.reshard import load_shard, reshard_servers
from shoal.sharded.ps.server.log import log_files
from shoal.table import HashTable
from tests.sharded.helpers import LONG

T = torch.tensor
SETTINGS = {"optimizer": "sgd", "initializer": "zeros", "lr": 1.0}


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def start(folder):
    return ParameterServer(Engine(Shard(0, 1), "log", folder / "shard-00000")).start()


def test_a_directory_that_is_served_from_is_refused_and_left_alone(tmp_path, capsys):
    source, target = tmp_path / "ps", tmp_path / "two"
    server = start(source)
    try:
        with PsClient([server.address], deadline=LONG) as client:
            table = ps_table(client, 1, name="t", **SETTINGS)
            table.assign(T([1, 2]), T([[1.0], [2.0]]))
            server.checkpoint()
            [*_, (_, path)] = log_files(source / "shard-00000")
            fd = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.write(fd, b"RECL and half of what a server is about to write")
            before = contents(source)
            with pytest.raises(ConfigError, match=r"a parameter server serves from .*shard-00000; end it with SIGTERM"):
                reshard_servers(source, target, 2)
            with pytest.raises(ConfigError, match="a parameter server serves from"):
                load_shard(HashTable(1, name="local", **SETTINGS), source, "t")
            assert main(["ps", "reshard", "--source", str(source), "--target", str(target), "--of", "2"]) != 0
            assert "a parameter server serves from" in capsys.readouterr().err
            assert contents(source) == before
            assert not target.exists()
            os.ftruncate(fd, os.fstat(fd).st_size - 48)
            os.close(fd)
            table.assign(T([3]), T([[3.0]]))
    finally:
        server.stop(checkpoint=True)
    assert reshard_servers(source, target, 2) == {"t": 3}
    assert load_shard(HashTable(1, name="local", **SETTINGS), target, "t").lookup(T([1, 2, 3])).sum() == 6


def test_looking_at_a_log_cuts_nothing(tmp_path):
    server = start(tmp_path)
    with PsClient([server.address], deadline=LONG) as client:
        ps_table(client, 1, name="t", **SETTINGS).assign(T([1]), T([[1.0]]))
    server.stop(checkpoint=True)
    [*_, (_, path)] = log_files(tmp_path / "shard-00000")
    path.write_bytes(path.read_bytes() + b"torn")
    before = contents(tmp_path)
    assert reshard_servers(tmp_path, tmp_path.parent / "other", 1) == {"t": 1}
    assert contents(tmp_path) == before


def test_a_log_behind_the_checkpoint_is_refused(tmp_path):
    server = start(tmp_path)
    with PsClient([server.address], deadline=LONG) as client:
        table = ps_table(client, 1, name="t", **SETTINGS)
        server.checkpoint()
        table.assign(T([1]), T([[1.0]]))
    server.stop()
    with pytest.raises(DataError, match="its log has records up to"):
        reshard_servers(tmp_path, tmp_path.parent / "another", 1)
