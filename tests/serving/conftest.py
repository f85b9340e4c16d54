"""Fixtures of the serving tests: clean process-wide registries, a real ZooKeeper, small models."""

import os
import socket

import pytest
import torch

from shoal.metrics import set_metrics_sink
from shoal.serving.client.addresses import set_address_table
from shoal.serving.sync.monolith.client import reset_sync_clients
from shoal.table import reset_registry
from shoal.testing.zookeeper import ZooKeeper, zookeeper_unavailable
from tests.serving.helpers import Net


@pytest.fixture(autouse=True)
def clean_process():
    """Sync clients, tables, the address table and the metrics sink are process-wide; each test starts without."""
    for name in (
        "MY_HOST_IP",
        "MY_HOST_IPV6",
        "MY_POD_IP",
        "MY_POD_NAME",
        "SHARD_ID",
        "REPLICA_ID",
        "PORT2",
        "ZK_AUTH",
    ):
        os.environ.pop(name, None)
    reset_registry()  # removes tables of earlier tests
    yield
    reset_sync_clients()
    reset_registry()
    set_address_table(None)
    set_metrics_sink(None)


class Metrics:
    """A sink that remembers."""

    def __init__(self):
        self.counters, self.timers, self.stores = [], [], []

    def emit_counter(self, name, value, tags):
        self.counters.append((name, value, tags))

    def emit_timer(self, name, value, tags):
        self.timers.append((name, value, tags))

    def emit_store(self, name, value, tags):
        self.stores.append((name, value, tags))


@pytest.fixture
def metrics():
    sink = Metrics()
    set_metrics_sink(sink)
    return sink


@pytest.fixture
def refused():
    """Makes addresses that refuse connections: their ports are taken, and nobody listens."""
    held = []

    def make():
        held.append(socket.socket())
        held[-1].bind(("127.0.0.1", 0))
        return f"127.0.0.1:{held[-1].getsockname()[1]}"

    yield make
    for each in held:
        each.close()


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory):
    if why := zookeeper_unavailable():
        pytest.skip(f"{why}; `make packages` does that as root")
    server = ZooKeeper(tmp_path_factory.mktemp("zookeeper"), sessions_ms=(40000, 60000)).start()
    yield server
    server.kill()


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()
