"""Message brokers on loopback: a real Redis that syncs every write to disk, and librdkafka's built-in broker."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from shoal.errors import MissingExtraError, PeerError
from shoal.testing.zookeeper import free_port

_START_S = 30.0


class RedisServer:
    """``redis-server`` in a folder, with ``appendonly yes`` and ``appendfsync always``: confirmed writes survive a
    kill. Use it in ``with``, or call `stop`.

    Raises:
        MissingExtraError: there is no ``redis-server`` on the PATH.
    """

    def __init__(self, folder: str | Path) -> None:
        self._program = shutil.which("redis-server")
        if self._program is None:
            raise MissingExtraError("redis-server is not on the PATH; install it with: apt-get install redis-server")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def address(self, stream: str) -> str:
        return f"redis://127.0.0.1:{self.port}/{stream}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it with the data in its folder; also after `kill`."""
        assert self._program is not None
        command = [
            self._program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", "",
            "--appendonly", "yes", "--appendfsync", "always", "--daemonize", "no",
        ]  # fmt: skip
        with open(self.folder / "log.txt", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise PeerError(f"redis-server did not start; see {self.folder / 'log.txt'}")
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as one:
                one.sendall(b"PING\r\n")
                return one.recv(64).startswith(b"+PONG")
        except OSError:
            return False

    def kill(self) -> None:
        """``kill -9``."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(timeout=_START_S)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=_START_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


class MockKafka:
    """librdkafka's built-in broker, inside this process. It keeps the last few megabytes of each partition, and
    creates topics with four partitions on first use.

    Raises:
        MissingExtraError: confluent-kafka is not installed.
    """

    def __init__(self) -> None:
        try:
            import confluent_kafka
        except ImportError:
            raise MissingExtraError('confluent-kafka is not installed; install "shoal[kafka]"') from None
        self._owner: Any = confluent_kafka.Producer(
            {
                "bootstrap.servers": "unused:1",
                "test.mock.num.brokers": 1,
                "log_level": 0,
                "client.id": f"mock-{os.getpid()}",
            }
        )
        brokers = self._owner.list_topics(timeout=_START_S).brokers.values()
        self.bootstrap = ",".join(f"{one.host}:{one.port}" for one in brokers)

    def address(self, topic: str) -> str:
        return f"kafka://{self.bootstrap}/{topic}"

    def stop(self) -> None:
        self._owner.flush(1)
        self._owner = None

    def __enter__(self) -> MockKafka:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
