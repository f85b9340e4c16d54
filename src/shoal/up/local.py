"""Runs processes on this machine as `shoal` commands, with their output in logs; they end with the supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

from shoal.errors import ConfigError
from shoal.host import HeldPorts
from shoal.up.config import Online
from shoal.up.files import Log
from shoal.up.plan import PORTS, Kind, Place, Places, Process, names_of

PARENT = "SHOAL_PARENT"


class Running(Protocol):
    """A started process."""

    @property
    def pid(self) -> int | None: ...
    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        ...

    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Launcher(Protocol):
    """Starts processes somewhere."""

    def places(self, online: Online) -> Places:
        """Choose where each process of a system listens."""
        ...

    def start(self, process: Process, log: Log) -> Running: ...
    def close(self) -> None: ...


class LocalProcess:
    """A `shoal` command as a child process, in a separate session, so that Ctrl-C reaches only the supervisor."""

    def __init__(self, arguments: tuple[str, ...], log: Log) -> None:
        env = {**os.environ, PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env=env, start_new_session=True,
        )  # fmt: skip
        self._log = log
        self._reader = threading.Thread(target=self._read, name=f"log-{self._process.pid}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with stream:
            for line in stream:
                self._log.write(line.decode(errors="replace").rstrip("\n"))

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None:
            self._reader.join(2)  # so that the log has its last lines
        return code

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # and its children


class LocalLauncher:
    """Starts processes on this machine, on the ports in the file, or else on free ones, held until `close`."""

    def __init__(self) -> None:
        self._held: list[HeldPorts] = []

    def places(self, online: Online) -> Places:
        kinds = names_of(online)
        fixed = {name: fixed_ports(online, name, kind) for name, kind in kinds.items()}
        held = HeldPorts(sum(len(PORTS[kind]) for kind in kinds.values()))
        self._held.append(held)
        free = iter(held.numbers)
        found = {}
        for name, kind in kinds.items():
            host = online.replicas.host if kind == "replica" else "127.0.0.1"
            reach = "127.0.0.1" if host in ("0.0.0.0", "::") else host
            ports = {port: fixed[name].get(port) or next(free) for port in PORTS[kind]}
            found[name] = Place(listen=host, host=reach, ports=ports)
        return found

    def start(self, process: Process, log: Log) -> LocalProcess:
        return LocalProcess(process.arguments, log)

    def close(self) -> None:
        for one in self._held:
            one.close()
        self._held.clear()


def fixed_ports(online: Online, name: str, kind: Kind) -> Mapping[str, int]:
    """The ports that the file names for a process."""
    if kind != "replica":
        return {}
    index = int(name.rpartition("-")[2])
    replicas = online.replicas
    found = {"grpc": replicas.port and replicas.port + index, "rest": replicas.rest_port and replicas.rest_port + index}
    if too_large := [port for port in found.values() if port > 65535]:
        raise ConfigError(f"{online.file}: [replicas] ports must be at most 65535, got {too_large[0]} for {name}")
    return found
