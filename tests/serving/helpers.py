"""Small things that several serving tests use."""

import random
import signal
import socket
import subprocess
import time
from pathlib import Path

import torch

ZOOKEEPER_JAR = Path("/usr/share/java/zookeeper.jar")


def eventually(condition, timeout=60.0, what="the condition"):
    """Waits until ``condition()`` is true and returns it."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {timeout} s for {what}"
        time.sleep(0.02)
    return value


_given = set()


def free_port():
    """A port to listen on later. It lies below those that the kernel picks for others, so it stays free."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _given:
            _given.add(port)
            return port


class ZooKeeper:
    """A ZooKeeper server in a process of its own, on loopback."""

    def __init__(self, folder: Path):
        self.folder, self.port = folder, free_port()
        self.process = None
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "zoo.cfg").write_text(
            f"tickTime=200\ndataDir={folder}/data\nclientPort={self.port}\nclientPortAddress=127.0.0.1\n"
            "admin.enableServer=false\nminSessionTimeout=40000\nmaxSessionTimeout=60000\n"
        )
        (folder / "log4j.properties").write_text("log4j.rootLogger=OFF\n")

    @property
    def hosts(self):
        return f"127.0.0.1:{self.port}"

    def start(self):
        command = [
            "java",
            "-Xmx128m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-cp",
            f"{self.folder}:{ZOOKEEPER_JAR}",
        ]
        command += ["org.apache.zookeeper.server.ZooKeeperServerMain", str(self.folder / "zoo.cfg")]
        with open(self.folder / "log.txt", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        eventually(self._answers, 120, "ZooKeeper to listen")
        return self

    def _answers(self):
        assert self.process.poll() is None, (self.folder / "log.txt").read_text()[-2000:]
        try:
            with socket.create_connection(("127.0.0.1", self.port), 2) as probe:
                probe.sendall(b"srvr")
                return b"Mode" in probe.recv(4096)
        except OSError:
            return False

    def client(self):
        """A client that soon tries again, with a session that outlives that.

        A server that has just opened its port may swallow a request to connect, and a client waits as long for the
        answer as it asks its session to last. The server's minimum makes the session last longer than what is asked.
        """
        from kazoo.client import KazooClient

        return KazooClient(self.hosts, timeout=2.0, connection_retry={"max_tries": -1, "max_delay": 0.5})

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)


class Net(torch.nn.Module):
    """Scores from a pooled user row and two prices."""

    def __init__(self, dim=4):
        super().__init__()
        self.linear = torch.nn.Linear(dim + 2, 1)

    def forward(self, user, price):
        return {"score": torch.sigmoid(self.linear(torch.cat([user, price], -1)).squeeze(-1))}
