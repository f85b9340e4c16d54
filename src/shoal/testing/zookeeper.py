"""A real ZooKeeper, from the jar that Debian's package ``zookeeper`` installs, or that ``SHOAL_ZOOKEEPER`` names."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from shoal.errors import DeadlineError, PeerError
from shoal.testing.network import Host

JAR = Path(os.environ.get("SHOAL_ZOOKEEPER", "/usr/share/java/zookeeper.jar"))
START_S = 120.0
_given: set[int] = set()


def zookeeper_unavailable() -> str:
    """Why no ZooKeeper can be started here; empty if one can."""
    if not JAR.exists() or shutil.which("java") is None:
        return f"ZooKeeper needs java and {JAR}; install both with: apt-get install zookeeper"
    return ""


def free_port() -> int:
    """Find a free port to listen on later. It is below the kernel's ephemeral range, so it stays free; processes that
    are started one after the other look in different parts, so that they do not find the same one."""
    begin = 20000 + os.getpid() % 12 * 1000
    while True:
        port = begin + random.SystemRandom().randrange(1000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _given:
            _given.add(port)
            return port


class ZooKeeper:
    """A ZooKeeper server in a separate process.

    Args:
        folder: for its data.
        tick_ms: its tickTime.
        sessions_ms: the shortest and the longest session that it grants; by default 2 and 20 ticks, as ZooKeeper does.
        host: where it runs, if not on loopback of this process; call it from a thread that reaches that host.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tick_ms: int = 200,
        sessions_ms: tuple[int, int] | None = None,
        host: Host | None = None,
    ) -> None:
        self.folder, self.port, self.host = folder, free_port(), host
        self.address = "127.0.0.1" if host is None else host.address
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        least, most = sessions_ms or (2 * tick_ms, 20 * tick_ms)
        (folder / "zoo.cfg").write_text(
            f"tickTime={tick_ms}\ndataDir={folder}/data\nclientPort={self.port}\nclientPortAddress={self.address}\n"
            f"admin.enableServer=false\nminSessionTimeout={least}\nmaxSessionTimeout={most}\n"
        )
        (folder / "log4j.properties").write_text("log4j.rootLogger=OFF\n")

    @property
    def hosts(self) -> str:
        return f"{self.address}:{self.port}"

    def start(self) -> ZooKeeper:
        command = ["java", "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", f"{self.folder}:{JAR}"]
        command += ["org.apache.zookeeper.server.ZooKeeperServerMain", str(self.folder / "zoo.cfg")]
        if self.host is not None:
            command = self.host.command(*command)
        with open(self.folder / "log.txt", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + START_S
        while not self._answers():
            if time.monotonic() > until:
                raise DeadlineError(f"ZooKeeper in {self.folder} did not listen within {START_S:g} s")
            time.sleep(0.02)
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise PeerError(f"ZooKeeper ended: {(self.folder / 'log.txt').read_text()[-2000:]}")
        try:
            with socket.create_connection((self.address, self.port), 2) as probe:
                probe.sendall(b"srvr")
                return b"Mode" in probe.recv(4096)
        except OSError:
            return False

    def client(self) -> Any:
        """Make a client that reconnects quickly, with a session that outlasts the reconnect.

        A server that has just opened its port may drop a connection request, and the client waits for an answer for as
        long as the session that it requests. So it requests a short one, which the server's minimum makes longer.
        """
        from kazoo.client import KazooClient

        return KazooClient(self.hosts, timeout=2.0, connection_retry={"max_tries": -1, "max_delay": 0.5})

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)
