"""Parameter servers as processes of this machine, restarted when they die."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from shoal.errors import DeadlineError, PeerError


class LocalServers:
    """``count`` processes of ``shoal ps``, shard ``i`` at ``addresses[i]``; a dead one is restarted at its address.

    >>> with LocalServers(2) as servers:  # doctest: +SKIP
    ...     client = PsClient(servers.addresses)

    ``options`` are further flags of ``shoal ps``, such as ``["--durability", "log", "--dir", "/data/ps"]``.
    """

    def __init__(
        self,
        count: int,
        options: Sequence[str] = (),
        *,
        restart: bool = True,
        start_within: timedelta = timedelta(minutes=5),
        env: dict[str, str] | None = None,
    ) -> None:
        self.count, self.options, self.restart = count, list(options), restart
        self._start_within = start_within
        self._env = {**os.environ, **(env or {})}
        self._processes: list[subprocess.Popen[str]] = []
        self.places: list[dict[str, Any]] = []
        self.restarts = 0
        self._closing = threading.Event()
        self._lock = threading.RLock()

    @property
    def addresses(self) -> list[str]:
        return [place["address"] for place in self.places]

    def start(self) -> LocalServers:
        """Start all servers and wait until they are ready."""
        self._processes = [self._spawn(i, []) for i in range(self.count)]
        try:
            self.places = [self._ready(i) for i in range(self.count)]
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch, name="ps-watch", daemon=True).start()
        return self

    def _spawn(self, i: int, more: Sequence[str]) -> subprocess.Popen[str]:
        command = [
            sys.executable, "-m", "shoal", "ps", "--shard", str(i), "--of", str(self.count), "--json",
            *self.options, *more,
        ]  # fmt: skip
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self._env)

    def _ready(self, i: int) -> dict[str, Any]:
        process = self._processes[i]
        timer = threading.Timer(self._start_within.total_seconds(), process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            code = process.wait(10)
            raise PeerError(f"parameter server {i} exited with code {code} before it was ready; see its output")
        return json.loads(line)

    def _watch(self) -> None:
        while not self._closing.wait(0.1):
            for i, process in enumerate(list(self._processes)):
                if process.poll() is not None and self.restart and not self._closing.is_set():
                    with contextlib.suppress(PeerError, OSError):
                        self.revive(i)

    def revive(self, i: int) -> None:
        """Restart a dead server at its address."""
        with self._lock:
            if self._closing.is_set() or self._processes[i].poll() is None:
                return
            port = self.places[i]["address"].rsplit(":", 1)[1]
            self._close_pipe(self._processes[i])
            self._processes[i] = self._spawn(i, ["--port", port])
            self.places[i] = self._ready(i)
            self.restarts += 1

    def kill(self, i: int) -> None:
        """Kill a server, as a crash would."""
        self._processes[i].send_signal(signal.SIGKILL)
        self._processes[i].wait(60)

    def pause(self, i: int) -> None:
        """Freeze a server: when this returns, it neither answers nor closes its connections."""
        self._processes[i].send_signal(signal.SIGSTOP)
        # threads on other cores still run for a moment after the signal
        with contextlib.suppress(ChildProcessError):  # it has exited
            os.waitid(os.P_PID, self._processes[i].pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self, i: int) -> None:
        self._processes[i].send_signal(signal.SIGCONT)

    def pid(self, i: int) -> int:
        return self._processes[i].pid

    def close(self, drain: timedelta = timedelta(minutes=2)) -> None:
        """Stop all servers, after they have finished the requests that they accepted."""
        self._closing.set()
        with self._lock:
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGCONT)
                    process.terminate()
            end = time.monotonic() + drain.total_seconds()
            late = []
            for i, process in enumerate(self._processes):
                try:
                    process.wait(max(0.1, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(10)
                    late.append(i)
                self._close_pipe(process)
        if late:
            raise DeadlineError(f"parameter servers {late} did not exit within {drain} and were killed")

    @staticmethod
    def _close_pipe(process: subprocess.Popen[str]) -> None:
        if process.stdout is not None:
            process.stdout.close()

    def __enter__(self) -> LocalServers:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()
