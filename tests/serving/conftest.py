"""What the serving tests share: clean process-wide registries, a real ZooKeeper, small models."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch

from shoal.serving.addresses import set_address_table
from shoal.serving.metrics import set_metrics_sink
from shoal.serving.sync_client import reset_sync_clients
from shoal.table import reset_registry

ZOOKEEPER_JAR = Path("/usr/share/java/zookeeper.jar")


@pytest.fixture(autouse=True)
def clean_process():
    """Sync clients, tables, the address table and the metrics sink are process-wide; each test starts without."""
    for name in ("MY_HOST_IP", "MY_HOST_IPV6", "MY_POD_IP", "MY_POD_NAME", "SHARD_ID", "REPLICA_ID", "PORT2", "ZK_AUTH"):
        os.environ.pop(name, None)
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


def eventually(condition, timeout=10.0, what="the condition"):
    """Waits until ``condition()`` is true and returns it."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {timeout} s for {what}"
        time.sleep(0.02)
    return value


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ZooKeeper:
    """A ZooKeeper server in a process of its own, on loopback."""

    def __init__(self, folder: Path):
        self.folder, self.port = folder, free_port()
        self.process = None
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "zoo.cfg").write_text(
            f"tickTime=200\ndataDir={folder}/data\nclientPort={self.port}\nclientPortAddress=127.0.0.1\n"
            "admin.enableServer=false\nminSessionTimeout=400\nmaxSessionTimeout=60000\n"
        )
        (folder / "log4j.properties").write_text("log4j.rootLogger=OFF\n")

    @property
    def hosts(self):
        return f"127.0.0.1:{self.port}"

    def start(self):
        command = ["java", "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", f"{self.folder}:{ZOOKEEPER_JAR}"]
        command += ["org.apache.zookeeper.server.ZooKeeperServerMain", str(self.folder / "zoo.cfg")]
        log = open(self.folder / "log.txt", "ab")
        self.process = subprocess.Popen(command, stdout=log, stderr=log)
        log.close()
        eventually(self._answers, 30, "ZooKeeper to listen")
        return self

    def _answers(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory):
    if not ZOOKEEPER_JAR.exists() or shutil.which("java") is None:
        pytest.skip("no ZooKeeper here; `make packages` installs Debian's as root")
    server = ZooKeeper(tmp_path_factory.mktemp("zookeeper")).start()
    yield server
    server.kill()


class Net(torch.nn.Module):
    """Scores from a pooled user row and two prices."""

    def __init__(self, dim=4):
        super().__init__()
        self.linear = torch.nn.Linear(dim + 2, 1)

    def forward(self, user, price):
        return {"score": torch.sigmoid(self.linear(torch.cat([user, price], -1)).squeeze(-1))}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()
