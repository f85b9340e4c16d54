"""A model server's cost and limits: CPU per request, cores, shards, overload, connections. Parts of `serving.py`.

    python -m benchmarks.serving --only front            # CPU time of the server per request, native against Python
    python -m benchmarks.serving --only scaling          # the server on 1, 2, 4, 8 cores, load from the others
    python -m benchmarks.serving --only entry overload connections

CPU time is what the kernel counts for the server's process. Our own native client (`_core.http2_load`) makes the load
of `scaling` and `overload`, so that machines without h2load can run them.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import torch

from benchmarks import serving as base

TICKS = os.sysconf("SC_CLK_TCK")


def served(
    path: str, ports: Any, stop: Any, cores: list[int] | None = None, fields: dict[str, Any] | None = None
) -> None:
    """Runs a ``ModelServer``, on some cores only; reports (gRPC port, REST port or None)."""
    if cores:
        os.sched_setaffinity(0, cores)
    from shoal import set_num_threads
    from shoal.serving import ModelServer, ModelServerConfig, gen_model_config
    from shoal.serving.server.process import tune_server_process

    torch.set_num_threads(1)
    set_num_threads(1)
    tune_server_process()
    config = ModelServerConfig()
    config.model_config_list.config.append(gen_model_config("m", path))
    server = ModelServer("127.0.0.1:0", config=config, poll_wait_seconds=0, **(fields or {})).start()
    ports.put((server.port, server.rest_port))
    stop.wait()
    server.stop(0)


class Served(base.Process):
    """A server process with both ports."""

    def __init__(self, path: str, cores: list[int] | None = None, **fields: Any) -> None:
        super().__init__(served, path, cores, fields)
        self.port, self.rest_port = self.port  # pyrefly: ignore

    def cpu(self) -> float:
        """Seconds of CPU time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def resident(self) -> int:
        """Bytes of memory."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Load:
    """The result of a load."""

    rate: float
    """Good answers per second."""
    times: list[float]
    """Their seconds, sorted."""
    statuses: dict[int, int]
    """Calls by status."""
    skipped: int
    """Calls that could not be made."""
    cpu: float
    """Seconds of CPU time that the clients took."""


def native_load(
    port: int, request: bytes | list[bytes], *, threads: int = 1, cores: list[int] | None = None, connections: int = 4,
    calls: int = 16, seconds: float = 3.0, rate: float = 0.0, timeout_ms: int = 0,
) -> Load:  # fmt: skip
    """Calls by native clients, one after another or at a rate. ``request`` can also be a list, one per thread."""
    from shoal import _core

    requests = request if isinstance(request, list) else [request] * threads

    def make(number: int) -> tuple[Any, ...]:
        if cores:
            os.sched_setaffinity(0, cores)  # of this thread
        begin = time.thread_time()
        given = ("127.0.0.1", port, base.PREDICT, requests[number], connections, calls, seconds, rate / threads)
        return *_core.http2_load(*given, timeout_ms), time.thread_time() - begin

    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(make, range(threads)))
    times = sorted(each for result in results for each in result[0])
    statuses: dict[int, int] = {}
    for result in results:
        for status, count in result[1].items():
            statuses[status] = statuses.get(status, 0) + count
    skipped, cpu = (sum(result[place] for result in results) for place in (2, 4))
    return Load(len(times) / seconds, times, statuses, skipped, cpu)


def front(report: Any, folder: Path, quick: bool) -> None:
    """Server CPU per request with 64 clients; both front ends take turns."""
    path = base.export(folder / "front", base.trained_table(200_000, "user_front"), 1)
    servers = {kind: Served(path, front=kind) for kind in ("native", "python")}
    for batch, goal in ((1, 120), (64, 250)):
        request = base.request_of(batch)
        costs: dict[str, list[float]] = {kind: [] for kind in servers}
        rates: dict[str, list[float]] = {kind: [] for kind in servers}
        for _ in range(2 if quick else 3):
            for kind, server in servers.items():
                base.measure(server.port, request, 64, 0.3)
                before = server.cpu()
                rate, times, failures = base.measure(server.port, request, 64, 1.5 if quick else 3.0)
                assert not failures, failures
                costs[kind].append((server.cpu() - before) / len(times) * 1e6)
                rates[kind].append(rate)
        ours, theirs = (statistics.median(costs[kind]) for kind in ("native", "python"))
        speeds = [statistics.median(rates[kind]) for kind in ("native", "python")]
        figure = f"{ours:.0f} us, {speeds[0]:.0f} QPS; front python {theirs:.0f} us, {speeds[1]:.0f} QPS"
        report(f"server CPU per request, batch {batch}, 64 clients", figure, ours / goal, f"<= {goal} us")
    for server in servers.values():
        server.stop()


def scaling(report: Any, folder: Path, quick: bool) -> None:
    """Requests per second of a server that is pinned to 1, 2, 4, 8 cores; the load is on the others."""
    path = base.export(folder / "scaling", base.trained_table(200_000, "user_scaling"), 1)
    cores = sorted(os.sched_getaffinity(0))
    most = 8 if len(cores) >= 10 else max(1, len(cores) // 2)
    loading = cores[most:] or cores
    counts = [count for count in (1, 2, 4, 8) if count <= most]
    with ThreadPoolExecutor(len(counts)) as pool:  # the servers start at the same time, and wait
        servers = list(pool.map(lambda count: Served(path, cores[:count], front="native", max_waiting=1 << 20), counts))
    requests = {batch: base.request_of(batch) for batch in (1, 64)}
    before = dict.fromkeys(requests, 0.0)
    fields: dict[str, Any] = {"threads": len(loading), "cores": loading, "connections": 8, "calls": 16}
    seconds = 2.0 if quick else 5.0
    for count, server in zip(counts, servers, strict=True):
        for batch, request in requests.items():
            native_load(server.port, request, seconds=0.5, **fields)
            begin = server.cpu()
            load = native_load(server.port, request, seconds=seconds, **fields)
            spent, times, rate = server.cpu() - begin, load.times, load.rate
            assert set(load.statuses) == {0}, load.statuses
            figure = (
                f"{rate:.0f} QPS, p50 {base.percentile(times, 0.5) * 1e3:.2f} ms, p99 "
                f"{base.percentile(times, 0.99) * 1e3:.2f} ms, {spent / max(1, len(times)) * 1e6:.2f} us of CPU each; "
                f"busy: server {spent / seconds / count:.0%}, load {load.cpu / seconds / len(loading):.0%}"
            )
            goal = ">= 1.60 of half the cores" if count == 8 else ">= 1.80 of half the cores"
            ratio = rate / before[batch] if before[batch] else 1.0
            report(f"{count} cores, batch {batch}", figure, ratio, goal if before[batch] else "first")
            before[batch] = rate
        server.stop()


class HeavyNet(torch.nn.Module):
    """A net that takes long enough for any client to overload it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(base.DIM + 8, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU(),
            torch.nn.Linear(1024, 1),
        )  # fmt: skip

    def forward(self, user: torch.Tensor, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"score": self.layers(torch.cat([user, dense], -1)).sigmoid().squeeze(-1)}


def overload(report: Any, folder: Path, quick: bool) -> None:
    """A load of three times the server's capacity, for a minute."""
    from shoal.serving import Feature, ModelExporter

    torch.manual_seed(1)
    tool = ModelExporter(
        folder / "overload", model_name="m", net=HeavyNet().eval(), features={"user": Feature(slot="u")},
        dense={"dense": torch.zeros(2, 8)},
    )  # fmt: skip
    tool.export([{"u": base.trained_table(200_000, "user_overload")}], global_step=1)
    server = Served(str(folder / "overload" / "exported_models"), front="native", max_waiting=32)
    request = base.request_of(64)
    native_load(server.port, request, seconds=1.0)
    full = native_load(server.port, request, connections=4, calls=8, seconds=3 if quick else 10)
    capacity, at_capacity = full.rate, base.percentile(full.times, 0.99)
    assert set(full.statuses) == {0}, full.statuses
    seconds = 8.0 if quick else 60.0
    over = native_load(server.port, request, connections=4, calls=256, seconds=seconds, rate=3 * capacity)
    good, statuses = over.rate, over.statuses
    assert set(statuses) <= {0, 8}, statuses
    assert server.process.is_alive()
    under = base.percentile(over.times, 0.99)
    figure = f"{good:.0f} of {capacity:.0f} QPS, {statuses.get(8, 0)} refused, {over.skipped} not made"
    report(f"{seconds:.0f} s of 3x overload: goodput", figure, good / capacity, ">= 0.90 of capacity")
    report(
        "p99 of the accepted",
        f"{under * 1e3:.1f} ms; at capacity {at_capacity * 1e3:.1f} ms",
        under / at_capacity,
        "<= 2.00",
    )
    server.stop()


SHARDS, SHARD_SECS = 8, 0.002


def shard_server(answer: bytes, ports: Any, stop: Any) -> None:
    """Answers any Predict with the same rows after two milliseconds."""
    import asyncio

    from shoal.serving.security import ServerSecurity
    from shoal.serving.server.front.server import NativeServer

    async def run() -> None:
        async def predict(request: bytes, context: Any) -> bytes:
            await asyncio.sleep(SHARD_SECS)
            return answer

        server = NativeServer(ServerSecurity(), 1 << 25, threads=1)
        handler = grpc.unary_unary_rpc_method_handler(predict)
        server.add_registered_method_handlers("tensorflow.serving.PredictionService", {"Predict": handler})
        ports.put(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        while not stop.is_set():
            await asyncio.sleep(0.2)
        await server.stop(0)

    asyncio.run(run())


def entry_server(path: str, ports: Any, stop: Any, shards: list[int]) -> None:
    from shoal.serving import set_address_table

    table = {f"m:ps_{shard}": [f"127.0.0.1:{port}"] for shard, port in enumerate(shards)}
    set_address_table(table)
    served(path, ports, stop)


def entry(report: Any, folder: Path, quick: bool) -> None:
    """One client asks an entry whose eight shards take two milliseconds each."""
    from shoal.serving import ExportMode, Feature, ModelExporter
    from shoal.serving.predict import encode_request, encode_response, model_spec
    from shoal.serving.tensors import encode_tensor

    parts = [{"u": base.trained_table(8, f"user_entry_{shard}")} for shard in range(SHARDS)]
    tool = ModelExporter(
        folder / "entry", model_name="m", net=base.Net().eval(), features={"user": Feature(slot="u")},
        dense={"dense": torch.zeros(2, 8)},
    )  # fmt: skip
    tool.export(parts, global_step=1, mode=ExportMode.DISTRIBUTED)
    answer = encode_response(model_spec("m"), {"u": torch.randn(SHARDS, base.DIM)})
    shards = [base.Process(shard_server, answer) for _ in range(SHARDS)]
    ports = [shard.port for shard in shards]
    ours = base.Process(entry_server, str(folder / "entry" / "exported_models" / "entry"), ports)
    inputs = {"user": torch.arange(SHARDS * SHARDS).reshape(8, 8), "dense": torch.randn(8, 8)}
    request = encode_request(model_spec("m"), {alias: encode_tensor(value) for alias, value in inputs.items()})
    seconds = 2.0 if quick else 5.0
    fields: dict[str, Any] = {"connections": 1, "calls": 1}
    native_load(ours.port[0], request, seconds=0.5, **fields)  # pyrefly: ignore
    load = native_load(ours.port[0], request, seconds=seconds, **fields)  # pyrefly: ignore
    assert set(load.statuses) == {0}, load.statuses
    p50, p99 = (base.percentile(load.times, share) * 1e3 for share in (0.5, 0.99))
    alone = base.percentile(native_load(ports[0], request, seconds=1.0, **fields).times, 0.5)
    figure = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms; one shard by itself p50 {alone * 1e3:.2f} ms"
    report("entry with 8 shards of 2 ms each", figure, p50 / 4, "<= 4 ms")
    for process in (ours, *shards):
        process.stop()


IDLE, BUSY = 2000, 200


def whole(answer: bytes) -> bool:
    """Whether an HTTP answer has arrived, head and body."""
    head, end, body = answer.partition(b"\r\n\r\n")
    sizes = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(end) and len(body) >= int(sizes[0])


def connections(report: Any, folder: Path, quick: bool) -> None:
    """Threads and memory with 200 busy connections, and with 2,000 idle ones each of REST and gRPC in addition."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    path = base.export(folder / "connections", base.trained_table(200_000, "user_connections"), 1)
    server = Served(path, rest_address="127.0.0.1:0", front="native")
    body = b'{"instances": [{"user": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "dense": [0, 0, 0, 0, 0, 0, 0, 0]}]}'
    head = f"POST /v1/models/m:predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(16) as pool:

        def connect(port: int) -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))

        def ask(connection: socket.socket) -> None:
            connection.sendall(head + body)
            got = b""
            while not whole(got):
                part = connection.recv(65536)
                assert part, f"the connection was closed after {got!r}"
                got += part
            assert got.startswith(b"HTTP/1.1 200 "), got

        def work(busy: list[socket.socket]) -> tuple[int, int]:
            for _ in range(3 if quick else 10):
                list(pool.map(ask, busy))
            native_load(server.port, base.request_of(1), connections=BUSY, calls=1, seconds=1.0)
            return server.threads(), server.resident()

        busy = [connect(server.rest_port) for _ in range(BUSY)]  # pyrefly: ignore
        work(busy)
        threads, resident = work(busy)
        rest = [connect(server.rest_port) for _ in range(IDLE)]  # pyrefly: ignore
        list(pool.map(ask, rest))
        plain = [connect(server.port) for _ in range(IDLE)]
        for each in plain:
            each.sendall(hello)
        more_threads, more_resident = work(busy)
        list(pool.map(ask, rest))  # the connections are still open
    extra = (more_resident - resident) / 2**20
    figure = f"{more_threads} threads, {more_resident / 2**20:.0f} MiB; without {threads}, {resident / 2**20:.0f} MiB"
    report(f"{IDLE} idle connections each of REST and gRPC", figure, more_threads / threads, "threads as with 200")
    report(
        "memory of an idle connection", f"{extra * 1024 / (2 * IDLE):.1f} KiB", more_resident / resident, "as with 200"
    )
    server.stop()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
