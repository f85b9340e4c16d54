"""Servers of a group, workers that record acknowledged writes, and waits with a deadline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Report
from shoal.errors import DeadlineError
from shoal.sharded import PsClient, ps_table
from shoal.sharded.ps.replica.replication import server_name
from shoal.testing.history import Finding, History
from shoal.testing.machine import Machine
from shoal.testing.network import Host

SESSION_S = 2.0
WAIT_S = 90.0
DIM = 4
LONG = timedelta(minutes=5)
SHORT = timedelta(seconds=2)
_ROWS = 10_000_000


def shoal(*words: object) -> list[str]:
    return [sys.executable, "-m", "shoal", *map(str, words)]


@dataclass
class Server:
    """A `shoal ps` process of a group, which restarts on the same port; optionally on a separate host and machine."""

    folder: Path
    registry: str
    ack: str
    options: tuple[str, ...] = ()
    host: Host | None = None
    machine: Machine | None = None
    port: int = 0
    process: subprocess.Popen[str] | None = None

    def start(self) -> Server:
        command = shoal(
            "ps", "--durability", "log", "--dir", self.folder, "--json", "--registry", self.registry, "--ack", self.ack,
            "--session-timeout", f"{SESSION_S}s", "--port", self.port, *self.options,
        )  # fmt: skip
        if self.host is not None:
            at = self.host.address
            command = self.host.command(*command, "--host", at, "--allow-insecure")
        env = os.environ | (self.machine.environment() if self.machine is not None else {})
        with open(f"{self.folder}.log", "a") as told:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, text=True, env=env)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a server did not start:\n{Path(f'{self.folder}.log').read_text()[-2000:]}")
        self.port = int(json.loads(line)["address"].rpartition(":")[2])
        return self

    @property
    def address(self) -> str:
        return f"{self.host.address if self.host is not None else '127.0.0.1'}:{self.port}"

    @property
    def name(self) -> str:
        return server_name(self.folder / "shard-00000")

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(WAIT_S)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()


@dataclass
class Worker:
    """A thread that updates one row after another, and sets one row to rising numbers."""

    number: int
    addresses: list[str]
    history: History
    pause_s: float = 0.0
    done: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def run(self) -> None:
        name, last = f"worker {self.number}", f"setter {self.number}"
        try:
            with PsClient(self.addresses, deadline=LONG) as client:
                table = table_of(client)
                while not self.ended.wait(self.pause_s):
                    step = self.done + 1
                    self.history.begin(name, step, self.row(step))
                    table.apply_gradients(torch.tensor([self.row(step)]), torch.ones(1, DIM), step)
                    self.history.acknowledge(name, step)
                    self.history.begin(last, step, self.number + 1, "set")
                    table.assign(torch.tensor([self.number + 1]), torch.full((1, DIM), float(step)))
                    self.history.acknowledge(last, step)
                    if step % 16 == 0:
                        began = time.monotonic()
                        value = table.lookup(torch.tensor([self.number + 1]))[0, 0].item()
                        self.history.read(f"reader {self.number}", self.number + 1, value, began)
                    self.done = step
        except BaseException as error:
            self.error = error

    def row(self, step: int) -> int:
        return (self.number + 1) * _ROWS + step


def table_of(client: PsClient) -> Any:
    return ps_table(client, DIM, name="t", optimizer="sgd", lr=1.0, initializer="zeros")


@contextmanager
def running(workers: Sequence[Worker]) -> Iterator[None]:
    threads = [threading.Thread(target=worker.run, daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for worker in workers:
            worker.ended.set()
        for thread in threads:
            thread.join(WAIT_S)


def checked(history: History, addresses: list[str], workers: Sequence[Worker] = ()) -> list[str]:
    """Reports updates that are lost, doubled or out of order, and workers that failed."""
    wrong = [f"worker {worker.number}: {worker.error!r}" for worker in workers if worker.error is not None]
    with PsClient(addresses, deadline=LONG) as client:
        wrong += [str(found) for found in findings(history, client)]
    return wrong


def findings(history: History, client: PsClient) -> list[Finding]:
    table = table_of(client)

    def look(rows: Sequence[int]) -> list[float]:
        values: list[float] = []
        for begin in range(0, len(rows), 100_000):
            part = torch.tensor(list(rows[begin : begin + 100_000]))
            found = table.lookup(part)[:, 0]
            values += torch.where(part >= _ROWS, -found, found).tolist()  # a gradient of 1 at rate 1 takes 1 away
        return values

    return history.check(look)


def tell_wrong(report: Report, what: str, wrong: list[str]) -> None:
    for text in wrong[:10]:
        print(f"  {text}")
    tell(report, what, len(wrong), at_most=0)


def tell(report: Report, what: str, value: float, unit: str = "", at_most: float | None = None) -> None:
    """Adds a number, and the largest acceptable one, to the report."""
    text = f"{value:.2f} {unit}" if unit else f"{value:g}"
    report.add(what, text, ratio=None if at_most is None else value, goal=at_most, at_most=True)


def until(check: Callable[[], Any], what: str, seconds: float = WAIT_S) -> Any:
    end = time.monotonic() + seconds
    while not (found := check()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.02)
    return found


def roles(servers: Sequence[Server], deadline: timedelta = SHORT) -> dict[str, dict[str, Any]]:
    """The group information of each server that answers, by address."""
    told = {}
    for server in servers:
        with PsClient([server.address], deadline=deadline) as client, suppress(DeadlineError):
            told[server.address] = client.info()[0]["group"]
    return told


def leader(servers: Sequence[Server], in_sync: int, seconds: float = WAIT_S) -> Server:
    """The leader, once ``in_sync`` servers are in sync."""

    def look() -> Server | None:
        for address, told in roles(servers).items():
            if told["role"] == "leader" and len(told["in_sync"]) == in_sync:
                return next(server for server in servers if server.address == address)
        return None

    return until(look, f"{in_sync} servers in sync", seconds)


@contextmanager
def pair(folder: Path, registry: str, ack: str, *options: str, **more: Any) -> Iterator[list[Server]]:
    folder.mkdir(exist_ok=True)
    servers = [Server(folder / name, registry, ack, options, **more) for name in ("a", "b")]
    try:
        for server in servers:
            server.start()
        yield servers
    finally:
        for server in servers:
            server.end()


def group(servers: Sequence[Server]) -> list[str]:
    return ["|".join(server.address for server in servers)]


def resumed(workers: Sequence[Worker], more: int = 2) -> float:
    """Waits until every worker has made further updates; returns the seconds."""
    begin, counts = time.monotonic(), [worker.done for worker in workers]

    def moved() -> bool:
        failed = next((worker.error for worker in workers if worker.error is not None), None)
        if failed is not None:
            raise failed
        return all(worker.done >= count + more for worker, count in zip(workers, counts, strict=True))

    until(moved, "writes to resume")
    return time.monotonic() - begin
