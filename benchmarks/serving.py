"""Serving and sync on loopback: rows by codec, pushes, Predict under load, version switches, freshness.

    python -m benchmarks.serving                 # everything, about three minutes
    python -m benchmarks.serving --quick         # the same with fewer seconds
    python -m benchmarks.serving --only predict push --json out.json
    python -m benchmarks.serving --only scaling  # and front, entry, overload, connections: see serving_load.py
    python -m benchmarks.serving --only gpu      # a DLRM on a GPU: see serving_gpu.py

Servers, clients and trainer are separate processes. The rival of Predict and of pushes is a bare gRPC server of the
same library that answers the same requests with the same bytes; both take turns in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import platform
import statistics
import tempfile
import threading
import time
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import torch

PREDICT = "/tensorflow.serving.PredictionService/Predict"
PARTS = ("rows", "push", "predict", "freshness", "raw")
LOAD_PARTS = ("front", "entry", "scaling", "overload", "connections")  # of serving_load.py
GPU_PARTS = ("gpu",)  # of serving_gpu.py
CODECS = ("fp32", "fp16", "fixed_r8", "one_bit")
DIM = 16
LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


# --- processes --------------------------------------------------------------------------------------------------------


def echo_server(answers: dict[int, bytes], ports: Any, stop: Any) -> None:
    """A bare gRPC server that answers a request with prepared bytes, chosen by the request's length."""
    server = grpc.server(futures.ThreadPoolExecutor(96), options=LIMITS)
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: answers.get(len(request), b""))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("tensorflow.serving.PredictionService", {"Predict": handler}),)
    )
    ports.put(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    stop.wait()
    server.stop(0)


def async_echo_server(answers: dict[int, bytes], ports: Any, stop: Any) -> None:
    """The same server on an event loop, like the model server."""

    async def run() -> None:
        async def echo(request: bytes, context: Any) -> bytes:
            return answers.get(len(request), b"")

        server = grpc.aio.server(options=LIMITS)
        handler = grpc.unary_unary_rpc_method_handler(echo)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("tensorflow.serving.PredictionService", {"Predict": handler}),)
        )
        ports.put(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        while not stop.is_set():
            await asyncio.sleep(0.2)
        await server.stop(0)

    asyncio.run(run())


def model_server(base: str, ports: Any, stop: Any, port: int = 0) -> None:
    """A ``ModelServer`` over one exported model."""
    from shoal.serving import ModelServer, ModelServerConfig, gen_model_config
    from shoal.serving.server.process import tune_server_process

    torch.set_num_threads(1)
    tune_server_process()  # as `shoal serve` does
    config = ModelServerConfig()
    config.model_config_list.config.append(gen_model_config("m", base))
    server = ModelServer(f"127.0.0.1:{port}", config=config, poll_wait_seconds=0.2).start()
    ports.put(server.port)
    stop.wait()
    server.stop(0)


def load(port: int, request: bytes, clients: int, seconds: float, out: Any, pause: float = 0.0) -> None:
    """Runs closed loops of ``clients`` callers; puts (requests per second, sorted latencies, failures)."""

    async def run() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=LIMITS) as channel:
            call = channel.unary_unary(PREDICT)
            await call(request, timeout=30)
            times: list[float] = []
            failures = 0
            begin = time.perf_counter()

            async def one() -> None:
                nonlocal failures
                while time.perf_counter() - begin < seconds:
                    start = time.perf_counter()
                    try:
                        await call(request, timeout=30)
                        times.append(time.perf_counter() - start)
                    except grpc.RpcError:
                        failures += 1
                    if pause:
                        await asyncio.sleep(pause)

            await asyncio.gather(*(one() for _ in range(clients)))
            out.put((len(times) / (time.perf_counter() - begin), sorted(times), failures))

    asyncio.run(run())


class Process:
    """A server process and its port."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        ports, self.stop_event = mp.Queue(), mp.Event()
        self.process = mp.Process(
            target=target, args=(arguments[0], ports, self.stop_event, *arguments[1:]), daemon=True
        )
        self.process.start()
        self.port: int = ports.get(timeout=120)

    def stop(self) -> None:
        self.stop_event.set()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()


def measure(
    port: int, request: bytes, clients: int, seconds: float, pause: float = 0.0
) -> tuple[float, list[float], int]:
    out = mp.Queue()
    process = mp.Process(target=load, args=(port, request, clients, seconds, out, pause), daemon=True)
    process.start()
    result = out.get(timeout=seconds + 120)
    process.join(10)
    return result


def percentile(times: list[float], share: float) -> float:
    return times[min(len(times) - 1, int(len(times) * share))]


# --- the model --------------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    """Two layers over a pooled row of 16 and 8 dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(DIM + 8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, user: torch.Tensor, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"score": self.layers(torch.cat([user, dense], -1)).sigmoid().squeeze(-1)}


def trained_table(rows: int, name: str, sync_client: Any = None) -> Any:
    from shoal.table import test_hash_table

    table = test_hash_table(DIM, name_suffix=name, learning_rate=0.01, sync_client=sync_client)
    for begin in range(0, rows, 500_000):
        ids = torch.arange(begin, min(rows, begin + 500_000))
        table.assign(ids, torch.randn(len(ids), DIM))
    return table


def export(folder: Path, table: Any, step: int) -> str:
    from shoal.serving import Feature, ModelExporter

    torch.manual_seed(step)
    net = _EXPORTED["net"] = Net().eval()
    tool = ModelExporter(
        folder, model_name="m", net=net, features={"user": Feature(slot="u")}, dense={"dense": torch.zeros(2, 8)}
    )
    tool.export([{"u": table}], global_step=step)
    return str(folder / "exported_models")


def request_of(batch: int) -> bytes:
    from shoal.serving.predict import encode_request, model_spec
    from shoal.serving.tensors import encode_tensor

    inputs = {"user": torch.randint(0, 200_000, (batch, 10)), "dense": torch.randn(batch, 8)}
    return encode_request(model_spec("m"), {alias: encode_tensor(value) for alias, value in inputs.items()})


# --- measurements -----------------------------------------------------------------------------------------------------


def rows_by_codec(report: Any, quick: bool) -> None:
    """Bytes per row and lookup rate of serving rows."""
    from shoal.serving.export.tables import serving_config
    from shoal.table import FloatCompressorConfig, HashTable, HashTableConfigInstance

    rows = 200_000 if quick else 1_000_000
    base = trained_table(1, "shape").table_config
    tables, sizes = {}, {"fp32": 4 * DIM, "fp16": 2 * DIM, "fixed_r8": DIM, "one_bit": DIM}
    ids = torch.randperm(rows * 4)[:rows]
    for codec in CODECS:
        config = FloatCompressorConfig()
        getattr(config, codec).SetInParent()
        serving = serving_config(base, config)
        serving.initial_capacity = rows  # as an export records it
        table = HashTable.from_config(HashTableConfigInstance(serving, [0.0]), name=codec)
        for part in ids.split(100_000):
            table.assign(part, torch.randn(len(part), DIM), 1)
        tables[codec] = table
    times: dict[str, list[float]] = {codec: [] for codec in CODECS}
    queries = [ids[torch.randint(0, rows, (65_536,))] for _ in range(8)]
    for _ in range(5 if quick else 15):
        for codec, table in tables.items():
            begin = time.perf_counter()
            for query in queries:
                table.lookup(query)
            times[codec].append(time.perf_counter() - begin)
    plain = statistics.median(times["fp32"])
    for codec in CODECS:
        bytes_per_row = tables[codec].memory_bytes() / rows
        rate = 8 * 65_536 / statistics.median(times[codec]) / 1e6
        report(f"serving row {codec}", f"{bytes_per_row:.1f} B/row (code {sizes[codec]} + 24 = {sizes[codec] + 24})",
               bytes_per_row / (sizes[codec] + 24), "<= 1.10")  # fmt: skip
        report(f"lookup {codec}", f"{rate:.1f} M rows/s", plain / statistics.median(times[codec]), ">= 0.80 of fp32")


def push(report: Any, folder: Path, quick: bool) -> None:
    """100 k rows of dim 16 into a live serving table, against the same bytes into a bare server."""
    from shoal.serving.sync.monolith.push_client import PushClient
    from shoal.serving.sync.push import encode_push
    from shoal.serving.sync.split import Delta, DeltaBatch, sendable_parts

    base = export(folder / "push", trained_table(200_000, "user_push"), 1)
    ours, bare = Process(model_server, base), Process(echo_server, {})
    ids = torch.randperm(200_000)[:100_000].numpy()
    values = torch.randn(100_000, DIM).numpy()
    batch = DeltaBatch("m", "hashtable_assign", 10_000, False, [Delta("MonolithHashTable_user_push", DIM, ids, values)])
    parts = sendable_parts(batch, 4 * 1024 * 1024)
    payloads = [encode_push(part)[0] for part in parts]
    client = PushClient(f"127.0.0.1:{ours.port}")
    channel = grpc.insecure_channel(f"127.0.0.1:{bare.port}", options=LIMITS)
    call = channel.unary_unary(PREDICT)
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(8 if quick else 25):
        begin = time.perf_counter()
        for part in sendable_parts(batch, 4 * 1024 * 1024):
            response = client.push(part)
            assert response.status_code == 0, response
        middle = time.perf_counter()
        for payload in payloads:
            call(payload, timeout=10)
        end = time.perf_counter()
        if round_:
            times[0].append(middle - begin)
            times[1].append(end - middle)
    size = sum(map(len, payloads)) / 1e6
    mine, theirs = statistics.median(times[0]), statistics.median(times[1])
    figure = f"{size / mine:.0f} MB/s, {0.1 / mine:.2f} M rows/s; bare gRPC {size / theirs:.0f} MB/s"
    report(f"push 100 k rows ({size:.1f} MB)", figure, theirs / mine, ">= 0.50 of bare gRPC")
    client.close()
    channel.close()
    ours.stop()
    bare.stop()


def predict(report: Any, folder: Path, quick: bool) -> None:
    """Predict with 64 clients against an echo of the same messages; p99 while rows are pushed; version switches."""
    table = trained_table(200_000, "user_predict")
    base = export(folder / "predict", table, 1)
    ours = Process(model_server, base)
    requests = {batch: request_of(batch) for batch in (1, 64)}
    answers = {}
    with grpc.insecure_channel(f"127.0.0.1:{ours.port}") as channel:
        for request in requests.values():
            answers[len(request)] = channel.unary_unary(PREDICT)(request, timeout=30)
    servers = {"ours": ours, "echo": Process(echo_server, answers), "asyncio": Process(async_echo_server, answers)}
    seconds = 1.5 if quick else 3.0
    for batch, request in requests.items():
        rates: dict[str, list[float]] = {name: [] for name in servers}
        tails: dict[str, list[float]] = {name: [] for name in servers}
        for _ in range(2 if quick else 3):
            for name, process in servers.items():
                rate, times, failures = measure(process.port, request, 64, seconds)
                assert not failures, failures
                rates[name].append(rate)
                tails[name].append(percentile(times, 0.99) * 1e3)
        mine = statistics.median(rates["ours"])
        for rival in ("echo", "asyncio"):
            theirs = statistics.median(rates[rival])
            slow = [statistics.median(tails[name]) for name in ("ours", rival)]
            figure = f"{mine:.0f} QPS, p99 {slow[0]:.1f} ms; {rival} {theirs:.0f} QPS, p99 {slow[1]:.1f} ms"
            goal = ">= 0.50 of the echo" if rival == "echo" else "an echo on asyncio, for comparison"
            report(f"Predict batch {batch}, 64 clients", figure, mine / theirs, goal)
    under_pushes(report, ours, requests[64], quick)
    switches(report, folder, table, ours, requests[1], quick)
    for process in servers.values():
        process.stop()


def raw(report: Any, folder: Path, quick: bool) -> None:
    """Raw features against ids, with one model of `shoal train` on Criteo-like data, in batches of 64."""
    import numpy as np

    from shoal.data.generate import CriteoLike, write_criteo
    from shoal.data.schema import CRITEO, text_fid
    from shoal.serving.predict import encode_request, model_spec
    from shoal.serving.tensors import encode_tensor
    from shoal.train.loop.trainer import trainer
    from shoal.trainer import load_config

    data = folder / "clicks.tsv"
    write_criteo(data, CriteoLike(rows=4_000, seed=1))
    changes = {"data.train": [str(data)], "train.batch_size": 512, "train.threads": 1, "model.hidden": [64, 32]}
    with trainer(load_config(None, changes)) as one:
        one.run()
        version = one.export(str(folder / "raw"))
    lines = [line.split("\t") for line in data.read_text().splitlines()[:64]]
    texts = {name: [line[14 + place] for line in lines] for place, name in enumerate(CRITEO.sparse)}
    dense = {
        name: torch.tensor([float(line[1 + place] or "nan") for line in lines])
        for place, name in enumerate(CRITEO.dense)
    }
    inputs = {
        "raw": {name: np.array([text.encode() for text in column], object) for name, column in texts.items()},
        "ids": {
            name: torch.tensor([text_fid(text, place + 1) for text in texts[name]])
            for place, name in enumerate(CRITEO.sparse)
        },
    }
    requests = {
        kind: encode_request(
            model_spec("m", "ids" if kind == "ids" else ""),
            {alias: encode_tensor(value) for alias, value in {**columns, **dense}.items()},
        )
        for kind, columns in inputs.items()
    }
    ours = Process(model_server, str(Path(version).parent))
    rates: dict[str, list[float]] = {kind: [] for kind in requests}
    for _ in range(2 if quick else 5):
        for kind, request in requests.items():
            rate, _, failures = measure(ours.port, request, 16, 1.5 if quick else 3.0)
            assert not failures, failures
            rates[kind].append(rate)
    ours.stop()
    of_raw, of_ids = (statistics.median(rates[kind]) for kind in ("raw", "ids"))
    report("Raw features, batch 64", f"{of_raw:.0f} QPS; ids {of_ids:.0f} QPS", of_raw / of_ids, ">= 0.80 of ids")


def under_pushes(report: Any, ours: Process, request: bytes, quick: bool) -> None:
    """p99 of four paced clients, in turn without pushes and while 100 k rows per second arrive."""
    stop = mp.Event()
    seconds = 3.0 if quick else 6.0
    rest, busy = [], []
    for _ in range(2 if quick else 3):
        rest.append(percentile(measure(ours.port, request, 4, seconds, 0.01)[1], 0.99))
        stop.clear()
        pusher = mp.Process(target=push_steadily, args=(ours.port, stop), daemon=True)
        pusher.start()
        time.sleep(2.0)
        busy.append(percentile(measure(ours.port, request, 4, seconds, 0.01)[1], 0.99))
        stop.set()
        pusher.join(10)
    a, b = statistics.median(rest) * 1e3, statistics.median(busy) * 1e3
    report("p99 of batch 64 while 100 k rows/s are pushed", f"{b:.2f} ms; at rest {a:.2f} ms", b / a, "<= 1.50 of rest")


def push_steadily(port: int, stop: Any) -> None:
    """Pushes 100 k rows per second, in small pushes so that there are no bursts."""
    from shoal.serving.sync.monolith.push_client import PushClient
    from shoal.serving.sync.split import Delta, DeltaBatch

    client = PushClient(f"127.0.0.1:{port}")
    ids, values = torch.randperm(200_000)[:2000].numpy(), torch.randn(2000, DIM).numpy()
    due = time.perf_counter()
    while not stop.is_set():
        delta = Delta("MonolithHashTable_user_predict", DIM, ids, values)
        assert client.push(DeltaBatch("m", "hashtable_assign", 5000, False, [delta])).status_code == 0
        due += 0.02
        time.sleep(max(0.0, due - time.perf_counter()))


def switches(report: Any, folder: Path, table: Any, ours: Process, request: bytes, quick: bool) -> None:
    """Switches versions while 16 clients ask for predictions."""
    out = mp.Queue()
    seconds = 6.0 if quick else 12.0
    asking = mp.Process(target=load, args=(ours.port, request, 16, seconds, out), daemon=True)
    asking.start()
    end, count = time.monotonic() + seconds - 2.0, 0
    while time.monotonic() < end:
        export(folder / "predict", table, 2 + count)
        count += 1
        time.sleep(0.5)
    rate, times, failures = out.get(timeout=60)
    asking.join(10)
    report(
        f"{count} version switches under {rate:.0f} QPS",
        f"{failures} of {len(times) + failures} requests failed",
        failures,
        "0 failed",
    )


def freshness(report: Any, folder: Path, quick: bool) -> None:
    """100 k touched rows per second, two replicas, one round per second; one replica is killed and restarted."""
    from shoal.serving import SyncBackend, SyncLoop, parameter_sync_client_from_config, set_address_table

    handle = parameter_sync_client_from_config(name_suffix="bench")
    handle.catch_up()
    table = trained_table(400_000, "user_fresh", handle)
    base = export(folder / "fresh", table, 1)
    replicas = [Process(model_server, base) for _ in range(2)]

    class Fixed(SyncBackend):
        def subscribe_model(self, model_name: str) -> None: ...
        def start(self) -> None: ...
        def stop(self) -> None: ...
        def get_sync_targets(self, sub_graph: str) -> tuple[str, list[str]]:
            return "m", [f"127.0.0.1:{replica.port}" for replica in replicas]

    lock = threading.Lock()
    pending: list[tuple[float, set[str]]] = []  # (when trained, targets that have it)
    ages: list[float] = []
    real = handle.sync

    def timed(config: Any) -> Any:
        begin = time.perf_counter()
        result = real(config)
        now = time.perf_counter()
        bad = {each.target for each in result.responses if each.status_code}
        good = {each.target for each in result.responses} - bad
        with lock:
            for when, reached in list(pending):
                if when < begin:
                    ages.extend([now - when] * len(good - reached))
                    reached |= good
            pending[:] = [each for each in pending if len(each[1]) < 2]
        return result

    handle.sync = timed  # type: ignore[method-assign]
    loop = SyncLoop(Fixed(), 0, handle, period_secs=1.0).start()
    seconds = 8.0 if quick else 20.0
    generator = torch.Generator().manual_seed(1)
    begin = time.perf_counter()
    due, steps = begin, 0
    while time.perf_counter() - begin < seconds:
        ids = torch.randint(0, 400_000, (10_000,), generator=generator)
        table.apply_gradients(ids, torch.randn(10_000, DIM))
        with lock:
            pending.append((time.perf_counter(), set()))
        steps += 1
        due += 0.1
        time.sleep(max(0.0, due - time.perf_counter()))
    time.sleep(2.5)
    undisturbed = sorted(ages)
    middle, late = percentile(undisturbed, 0.5), percentile(undisturbed, 0.99)
    figure = f"p50 {middle:.2f} s, p99 {late:.2f} s, max {undisturbed[-1]:.2f} s"
    report("freshness, 100 k rows/s, 2 replicas, 1 s rounds", figure, late, "<= 1.5 s")
    port = replicas[1].port
    replicas[1].process.kill()
    replicas[1].process.join(10)
    for _ in range(10):
        table.apply_gradients(torch.randint(0, 400_000, (10_000,), generator=generator), torch.randn(10_000, DIM))
        time.sleep(0.1)
    restarted = Process(model_server, base, port)
    end = time.monotonic() + 30
    while time.monotonic() < end and (
        any(handle.waiting().values()) or json.loads(loop.last_result or "{}").get("responses")
    ):
        time.sleep(0.2)
    time.sleep(2.5)
    loop.stop()
    wrong = 0
    ids = torch.arange(400_000)
    expected = table.lookup(ids)
    for replica in (replicas[0], restarted):
        set_address_table({"m": [f"127.0.0.1:{replica.port}"], "x:ps": []})
        wrong += compare(ids, expected)
    report("rows that differ after a replica's restart", f"{wrong} of {2 * len(ids)}", wrong, "0 lost")
    for replica in (replicas[0], restarted):
        replica.stop()


def compare(ids: torch.Tensor, expected: torch.Tensor) -> int:
    """Ids whose score on a replica differs from that of the trainer's row, with the exported net."""
    from shoal.serving.client.remote import remote_predict

    wrong, net = 0, _EXPORTED["net"]
    for part, rows in zip(ids.split(20_000), expected.split(20_000), strict=True):
        dense = torch.zeros(len(part), 8)
        (score,) = remote_predict(
            ["user", "dense"], [part.unsqueeze(1), dense], ["score"], "m", 0, None, max_rpc_deadline_millis=30000
        )
        with torch.inference_mode():
            wrong += int((score - net(user=rows, dense=dense)["score"]).abs().gt(1e-5).sum())
    return wrong


_EXPORTED: dict[str, Any] = {}


# --- the report -------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer seconds, noisier figures")
    parser.add_argument("--only", nargs="+", choices=[*PARTS, *LOAD_PARTS, *GPU_PARTS])
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    mp.set_start_method("spawn", force=True)
    rows: list[dict[str, Any]] = []

    def report(what: str, figure: str, ratio: float, goal: str) -> None:
        rows.append({"what": what, "figure": figure, "ratio": ratio, "goal": goal})
        print(f"{what:<50} {figure:<70} {ratio:6.2f}  {goal}", flush=True)

    info = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "grpc": grpc.__version__,
        "dim": DIM,
    }
    print("  ".join(f"{key} {value}" for key, value in info.items()))
    wanted = options.only or [*PARTS, "front", "entry"]
    with tempfile.TemporaryDirectory() as folder:
        if "rows" in wanted:
            rows_by_codec(report, options.quick)
        for name, run in (("push", push), ("predict", predict), ("freshness", freshness), ("raw", raw)):
            if name in wanted:
                run(report, Path(folder), options.quick)
        for name in LOAD_PARTS:
            if name in wanted:
                from benchmarks import serving_load

                getattr(serving_load, name)(report, Path(folder), options.quick)
        if "gpu" in wanted:
            from benchmarks import serving_gpu

            serving_gpu.gpu(report, Path(folder), options.quick)
    if options.json:
        Path(options.json).write_text(json.dumps({"info": info, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
