"""The rank of a process: validation, round trips, the environment, and starting a group."""

import json

import pytest
import torch.distributed as dist

from shoal.comm import DistributedConfig, ProcessGroupTransport
from shoal.errors import ConfigError
from shoal.testing import mpi_unavailable, run_mpi, run_ranks

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    "bad",
    [
        (0, 0),
        (2, 2),
        (2, -1),
        (2.0, 0),
        (True, 0),
        (2, 0, "host"),
        (2, 0, "host:0"),
        (2, 0, "host:65536"),
        (2, 0, "::1:80"),
        (2, 0, "[::1]80"),
        (2, 0, ":80"),
        (2, 0, "a b:80"),
        (2, 0, "host:8x"),
        (2, 0, None),
    ],
    ids=str,
)
def test_wrong_values_are_refused(bad):
    with pytest.raises(ConfigError):
        DistributedConfig(*bad)


@pytest.mark.parametrize("address", ["", "10.0.0.1:1", "[::1]:65535", "node-3.example:29500", "[fe80::1%eth0]:80"])
def test_right_values_survive_json(address):
    config = DistributedConfig(3, 2, address)
    assert DistributedConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(AttributeError):
        config.rank = 0


def test_unknown_and_missing_keys_are_refused():
    for bad in ({"world_size": 1}, {"world_size": 1, "rank": 0, "extra": 1}):
        with pytest.raises(ConfigError):
            DistributedConfig.from_dict(bad)


def test_the_environment_of_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert DistributedConfig.from_env() == DistributedConfig(1, 0)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        DistributedConfig.from_env()
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "::1")
    monkeypatch.setenv("MASTER_PORT", "5000")
    assert DistributedConfig.from_env() == DistributedConfig(4, 1, "[::1]:5000")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert DistributedConfig.from_env() == DistributedConfig(4, 1, "[::1]:5000")
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ConfigError, match="RANK"):
        DistributedConfig.from_env()
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigError, match="RANK is not set"):
        DistributedConfig.from_env()
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("MASTER_PORT")
    assert DistributedConfig.from_env() == DistributedConfig(3, 2)


def starts(rank, world):
    transport = DistributedConfig.from_env().init(timeout_s=200)
    assert isinstance(transport, ProcessGroupTransport)
    transport.barrier()
    again = DistributedConfig.from_env().init()
    with pytest.raises(ConfigError, match="already"):
        DistributedConfig(world + 1, rank, "127.0.0.1:1").init()
    return again.rank, again.world_size


def starts_alone(rank, world):
    import os

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    with pytest.raises(ConfigError, match="have no rendezvous"):
        DistributedConfig(2, 0).init()
    with pytest.raises(ConfigError, match="gloo"):
        DistributedConfig(1, 0).init(backend="mpi")
    with pytest.raises(ConfigError, match="available"):
        DistributedConfig(1, 0).init(backend="pigeon")
    t = DistributedConfig(1, 0).init()
    t.send(0, b"x")
    t.barrier()
    return t.recv(0), dist.get_world_size()


def starts_by_address(rank, world, port):
    t = DistributedConfig(world, rank, f"127.0.0.1:{port}").init(timeout_s=200)
    t.send(1 - rank, bytes([rank]))
    return t.recv(1 - rank)


def test_starting_a_group():
    import socket

    assert run_ranks(2, starts, timeout_s=300, backend=None) == [(0, 2), (1, 2)]
    assert run_ranks(1, starts_alone, timeout_s=300, backend=None) == [(b"x", 1)]
    with socket.socket() as s:  # bound but not listening: no other process gets this port, but rank 0 can use it
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", 0))
        port, env = s.getsockname()[1], {"TORCHELASTIC_USE_AGENT_STORE": "False"}
        got = run_ranks(2, starts_by_address, port, timeout_s=300, backend=None, env=env)
    assert got == [b"\1", b"\0"]


@pytest.mark.skipif(mpi_unavailable() is not None, reason=str(mpi_unavailable()))
def test_mpirun_starts_a_group_without_further_settings():
    assert run_mpi(2, meets, timeout_s=300) == [(0, 2, b"\1"), (1, 2, b"\0")]


def meets(rank, world):
    config = DistributedConfig.from_env()
    t = config.init(timeout_s=200)
    t.send(1 - rank, bytes([rank]))
    got = t.recv(1 - rank)
    t.barrier()
    return config.rank, config.world_size, got
