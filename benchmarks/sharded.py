"""Tables across processes against bare echoes, bare collectives, TorchRec, and themselves without pipelining.

    python -m benchmarks.sharded [--only ps,latency,forward,sync,torchrec,pipeline,partitioned,log,memory,ways]

Every figure is a ratio of two medians over ``--rounds`` turns; both sides take turns in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

ROWS: list[dict[str, Any]] = []
TRANSPORTS = {"gloo": "0", "shared memory": "1"}  # how our ranks exchange data: values of SHOAL_SHARED_MEMORY


def report(what: str, ours: float, unit: str, against: str, theirs: float, ratio: float, wanted: str) -> None:
    ROWS.append(
        {
            "what": what,
            "ours": ours,
            "unit": unit,
            "against": against,
            "theirs": theirs,
            "ratio": ratio,
            "wanted": wanted,
        }
    )
    print(
        f"{what:58} {ours:10.4g} {unit:10} {against:34} {theirs:10.4g}   ratio {ratio:6.2f}   wanted {wanted}",
        flush=True,
    )


def median_of(call, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def in_turns(calls: dict[str, Any], rounds: int) -> dict[str, float]:
    """Median seconds of each call, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(t) for name, t in times.items()}


# --- processes --------------------------------------------------------------------------------------------------------


def _serve(pipe, shard, of, durability, directory):
    from shoal.sharded import Engine, ParameterServer, Shard

    server = ParameterServer(Engine(Shard(shard, of), durability, directory), http_port=None).start()
    pipe.send(server.address)
    pipe.recv()
    server.stop()


def _echo(pipe):
    """Answers [n as text, data] with n bytes: what a parameter server would send, without its work."""
    import zmq

    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    pipe.send(f"tcp://127.0.0.1:{port}")
    data = torch.zeros(1 << 26, dtype=torch.uint8).numpy()
    while True:
        frames = router.recv_multipart(copy=False)
        size = int(frames[1].bytes)
        if size < 0:
            break
        router.send_multipart([frames[0].bytes, data[:size]], copy=False)
    context.destroy(0)


def _grpc_echo(pipe):
    from concurrent import futures

    import grpc

    data = bytes(1 << 26)
    handler = grpc.unary_unary_rpc_method_handler(lambda request, _: data[: int.from_bytes(request[:8], "little")])
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(futures.ThreadPoolExecutor(2), options=options)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bench.Echo", {"Call": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pipe.send(f"127.0.0.1:{port}")
    pipe.recv()
    server.stop(0)


class Processes:
    """Servers of one kind, each in a separate process."""

    def __init__(self, target, arguments) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes, self.addresses = [], [], []
        for more in arguments:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, *more), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            self.addresses.append(pipe.recv())

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            with contextlib.suppress(OSError):
                pipe.send("end")
            process.join(3)
            if process.is_alive():
                process.kill()


class Echo:
    def __init__(self, addresses):
        import zmq

        self.context = zmq.Context()
        self.sockets = []
        for address in addresses:
            socket = self.context.socket(zmq.DEALER)
            socket.linger = 0
            socket.connect(address)
            self.sockets.append(socket)

    def call(self, data, reply_bytes):
        for socket in self.sockets:
            socket.send_multipart([str(reply_bytes).encode(), data], copy=False)
        for socket in self.sockets:
            socket.recv_multipart(copy=False)

    def close(self):
        for socket in self.sockets:
            socket.send_multipart([b"-1", b""])
        time.sleep(0.1)
        self.context.destroy(0)


# --- parameter servers ------------------------------------------------------------------------------------------------


def bench_ps(args) -> None:
    import grpc

    from shoal.sharded import PsClient, ps_table

    n, dim = args.ids, 16
    ids = torch.randperm(4 * n)[:n]
    grads = torch.randn(n, dim)
    with (
        Processes(_serve, [(i, 2, "none", None) for i in range(2)]) as servers,
        Processes(_echo, [(), ()]) as echoes,
        Processes(_grpc_echo, [(), ()]) as grpcs,
    ):
        client = PsClient(servers.addresses)
        table = ps_table(client, dim, name="t", optimizer="sgd", initializer="zeros")
        for part in range(0, n, 1 << 20):
            table.assign(ids[part : part + (1 << 20)], grads[part : part + (1 << 20)])
        echo = Echo(echoes.addresses)
        id_bytes = torch.zeros(4 * n, dtype=torch.uint8).numpy()
        both = torch.zeros(4 * n + 2 * n * dim, dtype=torch.uint8).numpy()
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        channels = [grpc.insecure_channel(a, options=options) for a in grpcs.addresses]
        stubs = [c.unary_unary("/bench.Echo/Call") for c in channels]
        small = [
            (2 * n * dim).to_bytes(8, "little") + bytes(4 * n - 8),
            (8).to_bytes(8, "little") + bytes(both.nbytes - 8),
        ]

        def grpc_call(data):
            for future in [stub.future(data) for stub in stubs]:
                future.result()

        lookup = in_turns(
            {
                "ours": lambda: table.lookup(ids),
                "zmq": lambda: echo.call(id_bytes, 2 * n * dim),
                "grpc": lambda: grpc_call(small[0]),
            },
            args.rounds,
        )
        rate = n / lookup["ours"] / 1e6
        report(
            f"ps lookup, {n} ids, dim 16, 2 servers",
            rate,
            "M ids/s",
            "bare ZeroMQ echo of the bytes",
            n / lookup["zmq"] / 1e6,
            lookup["zmq"] / lookup["ours"],
            ">= 0.5",
        )
        report(
            f"ps lookup, {n} ids, dim 16, 2 servers",
            rate,
            "M ids/s",
            "bare gRPC echo of the bytes",
            n / lookup["grpc"] / 1e6,
            lookup["grpc"] / lookup["ours"],
            ">= 2",
        )
        update = in_turns(
            {
                "ours": lambda: table.apply_gradients(ids, grads, 1),
                "zmq": lambda: echo.call(both, 8),
                "grpc": lambda: grpc_call(small[1]),
            },
            args.rounds,
        )
        rate = n / update["ours"] / 1e6
        report(
            f"ps update, {n} ids, dim 16, 2 servers",
            rate,
            "M ids/s",
            "bare ZeroMQ echo of the bytes",
            n / update["zmq"] / 1e6,
            update["zmq"] / update["ours"],
            ">= 0.5",
        )
        report(
            f"ps update, {n} ids, dim 16, 2 servers",
            rate,
            "M ids/s",
            "bare gRPC echo of the bytes",
            n / update["grpc"] / 1e6,
            update["grpc"] / update["ours"],
            ">= 2",
        )
        echo.close()
        for channel in channels:
            channel.close()
        client.close()


def bench_latency(args) -> None:
    from shoal.sharded import PsClient, ps_table

    with Processes(_serve, [(0, 1, "none", None)]) as servers, Processes(_echo, [()]) as echoes:
        client = PsClient(servers.addresses)
        table = ps_table(client, 16, name="t", optimizer="sgd", initializer="zeros")
        ids = torch.arange(64)
        table.assign(ids, torch.randn(64, 16))
        echo = Echo(echoes.addresses)
        data = ids.numpy()
        found = in_turns({"ours": lambda: table.lookup(ids), "zmq": lambda: echo.call(data, 4096)}, 60 * args.rounds)
        report(
            "ps lookup of 64 ids, one server",
            found["ours"] * 1e6,
            "us",
            "bare ZeroMQ echo",
            found["zmq"] * 1e6,
            found["ours"] / found["zmq"],
            "<= 2",
        )
        echo.close()
        client.close()


def bench_log(args) -> None:
    from shoal.sharded import PsClient, ps_table

    folder = tempfile.mkdtemp(prefix="shoal-bench-", dir=args.dir)
    kinds = [(0, 1, "none", None), (0, 1, "log", os.path.join(folder, "log"))]
    with Processes(_serve, kinds) as servers:
        clients = [PsClient([address], max_staleness=4) for address in servers.addresses]
        tables = [ps_table(c, 16, name="t", optimizer="adagrad", initializer="zeros") for c in clients]
        ids = [torch.randint(0, 200_000, (8192,)) for _ in range(16)]
        grads = torch.randn(8192, 16)

        def run(table):
            for i in range(64):
                table.apply_gradients(ids[i % 16], grads, i)
            table.as_op()

        found = in_turns({"none": lambda: run(tables[0]), "log": lambda: run(tables[1])}, args.rounds)
        rate = 64 * 8192
        report(
            "updates of 8192 ids, durability log, 4 in flight",
            rate / found["log"] / 1e6,
            "M ids/s",
            "durability none",
            rate / found["none"] / 1e6,
            found["none"] / found["log"],
            ">= 0.5",
        )
        for client in clients:
            client.close()


def bench_forward(args) -> None:
    """A training forward of known ids, which only reads, so that a log costs it nothing."""
    from shoal import nn as snn
    from shoal.sharded import PsClient, ps_table
    from shoal.table.protocol import Features, groups_of

    folder = tempfile.mkdtemp(prefix="shoal-bench-", dir=args.dir)
    kinds = [(0, 1, "none", None), (0, 1, "log", os.path.join(folder, "log"))]
    with Processes(_serve, kinds) as servers:
        clients = [PsClient([address]) for address in servers.addresses]
        tables = [ps_table(c, 16, name="t", optimizer="adagrad") for c in clients]
        modules = [snn.HashEmbeddingBag(table) for table in tables]
        ids = torch.randint(0, 200_000, (8192, 10))
        counts = torch.tensor([ids.numel()])
        for table in tables:
            table.assign(torch.arange(200_000), torch.randn(200_000, 16))

        def forward(module):
            for _ in range(8):
                module(ids)

        def rows(table):
            [(group, _)] = groups_of([table])
            for _ in range(8):
                found = group.find(ids.view(-1), counts, Features(), missing="initial")
                group.rows(found, Features(), missing="initial")

        for what, call, of in (("a module", forward, modules), ("a group", rows, tables)):
            calls = {"none": lambda c=call, o=of: c(o[0]), "log": lambda c=call, o=of: c(o[1])}
            found = in_turns(calls, 4 * args.rounds)
            rate = 8 * ids.numel()
            report(
                f"training forward through {what}, 8192 x 10 known ids, log",
                rate / found["log"] / 1e6,
                "M ids/s",
                "durability none",
                rate / found["none"] / 1e6,
                found["none"] / found["log"],
                ">= 0.95",
            )
        for client in clients:
            client.close()


def bench_memory(args) -> None:
    from benchmarks.sharded_memory import measure

    found = measure(args.requests, 10)
    report(
        f"server's memory after {args.requests} mixed requests",
        found[-1][1],
        "MB",
        "after a tenth of them",
        found[0][1],
        found[-1][1] / found[0][1],
        "flat (10 M)",
    )


# --- all to all -------------------------------------------------------------------------------------------------------


def _sync_rank(rank, world, dim, n, rounds):
    import shoal
    from shoal.sharded import AllToAllHashTable
    from shoal.table.protocol import Features, Part, Step, groups_of

    shoal.set_num_threads(1)
    torch.manual_seed(rank)
    table = AllToAllHashTable(dim, optimizer="sgd", lr=0.1, initializer="zeros")
    local = shoal.HashTable(dim, optimizer="sgd", lr=0.1, initializer="zeros")
    batches = [torch.randperm(1_000_000)[:n] for _ in range(4)]
    for ids in batches:
        table.assign(ids, torch.zeros(n, dim))
    share = [b[torch.randperm(n)] for b in batches]
    for ids in share:
        local.assign(ids, torch.zeros(n, dim))
    grads = torch.randn(n, dim)
    half = [n // 2, n // 2]
    rows, sizes = torch.empty(n * dim), torch.zeros(2, dtype=torch.int32)
    got, got_sizes, id_buffer = (
        torch.empty(n * dim),
        torch.zeros(2, dtype=torch.int32),
        torch.empty(n, dtype=torch.int64),
    )

    ((group, _),) = groups_of([table])
    one, counts = Features(), torch.tensor([n])

    def step(i):
        found = group.find(batches[i % 4], counts, one, missing="initial")
        group.rows(found, one, missing="initial")
        group.update([Part(found, one, grads)], step=Step(i))

    def bare(i):
        local.lookup(share[i % 4])
        local.apply_gradients(share[i % 4], grads, i)
        dist.all_to_all_single(got_sizes, sizes)
        dist.all_to_all_single(id_buffer, batches[i % 4], half, half)
        dist.all_to_all_single(got, rows, [h * dim for h in half], [h * dim for h in half])
        dist.all_to_all_single(rows, got, [h * dim for h in half], [h * dim for h in half])

    times = {"ours": [], "bare": []}
    for i in range(rounds + 1):
        for name, call in (("ours", step), ("bare", bare)):
            dist.barrier()
            begin = time.perf_counter()
            call(i)
            dist.barrier()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(t[1:]) for name, t in times.items()}


def bench_sync(args) -> None:
    from shoal.testing import run_ranks

    n = 100_000
    for dim in (16, 64):
        found = run_ranks(2, _sync_rank, dim, n, 3 * args.rounds, timeout_s=300)[0]
        report(
            f"all-to-all lookup + update, 2 ranks, {n} ids, dim {dim}",
            found["ours"] * 1e3,
            "ms",
            "local work + bare all_to_all",
            found["bare"] * 1e3,
            found["ours"] / found["bare"],
            "<= 1.4",
        )


def _pipeline_rank(rank, world, rounds):
    import shoal
    from shoal.sharded import AllToAllHashTable, ProcessGroup, Stage

    shoal.set_num_threads(1)
    forward, backward = dist.new_group(), dist.new_group()
    torch.manual_seed(rank)
    n, dim = 20_000, 32
    table = AllToAllHashTable(dim, optimizer="adagrad", initializer="zeros", backend=ProcessGroup(forward))
    pushes = AllToAllHashTable(factory=lambda _: table.table, backend=ProcessGroup(backward))
    batches = [torch.randint(0, 300_000, (n,)) for _ in range(8)]
    for ids in batches:
        table.lookup(ids, insert_missing=True)
    weight = torch.randn(dim, dim, requires_grad=True)

    def dense(rows, passes):
        leaf = rows.detach().requires_grad_()
        x = leaf
        for _ in range(passes):
            x = torch.tanh(x @ weight)
        x.sum().backward()
        return leaf.grad

    begin = time.perf_counter()
    for ids in batches:
        rows = table.lookup(ids)
        pushes.apply_gradients(ids, rows)
    sparse = (time.perf_counter() - begin) / len(batches)
    passes = 1
    while True:
        begin = time.perf_counter()
        dense(rows, passes)
        taken = time.perf_counter() - begin
        if taken > sparse or passes > 64:
            break
        passes += 1
    counts = torch.tensor([passes])
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    passes = int(counts)

    def plain():
        for i, ids in enumerate(batches):
            rows = table.lookup(ids)
            pushes.apply_gradients(ids, dense(rows, passes), i)

    def pipelined():
        feed = iter(batches)

        def ahead():
            ids = next(feed)
            return ids, table.lookup(ids)

        stage = Stage(ahead, 1)
        waiting = iter(())
        import queue

        work: queue.SimpleQueue = queue.SimpleQueue()

        def push():
            while (item := work.get()) is not None:
                pushes.apply_gradients(*item)

        thread = threading.Thread(target=push)
        thread.start()
        for i in range(len(batches)):
            ids, rows = stage.get()
            work.put((ids, dense(rows, passes), i))
        work.put(None)
        thread.join()
        stage.close()
        del waiting

    times = {"plain": [], "pipelined": []}
    for _ in range(rounds + 1):
        for name, call in (("plain", plain), ("pipelined", pipelined)):
            dist.barrier()
            begin = time.perf_counter()
            call()
            dist.barrier()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(t[1:]) for name, t in times.items()} | {"samples": n * len(batches)}


def bench_pipeline(args) -> None:
    from shoal.testing import run_ranks

    for over, flag in TRANSPORTS.items():
        os.environ["SHOAL_SHARED_MEMORY"] = flag
        found = run_ranks(2, _pipeline_rank, args.rounds, timeout_s=300)[0]
        rate = found["samples"] / 1e3
        report(
            f"pipelined (prefetch + async update), 2 ranks, {over}",
            rate / found["pipelined"],
            "k rows/s",
            "the same in sequence",
            rate / found["plain"],
            found["plain"] / found["pipelined"],
            ">= 1.2",
        )


# --- partitioned ------------------------------------------------------------------------------------------------------


def bench_partitioned(args) -> None:
    from shoal import nn as snn
    from shoal.ragged import Ragged
    from shoal.sharded import OutConfig, OutType, ParserCtx, PartitionedHashTable, SliceConfig, gen_feature_configs
    from shoal.table import HashTable, MultiHashTable

    features, b, dim = [f"f{i:03d}" for i in range(100)], 256, 16
    make = HashTable(dim, optimizer="sgd", lr=0.1, initializer="zeros").config
    configs = dict.fromkeys(features, make)
    outs = {"all": OutConfig([SliceConfig(f, 0, dim) for f in features], OutType.CONCAT, [[-1, dim * len(features)]])}
    ctx = ParserCtx()
    sums = dict.fromkeys(features, snn.ReduceSum())
    ctx.sharding_sparse_fids_op_params = gen_feature_configs(
        2, configs, outs, {key: [dim] for key in features}, sums, True
    )
    table = PartitionedHashTable(
        2, lambda i, c: MultiHashTable.from_configs(c, name_suffix=f"bench{i}"), True, parser_ctx=ctx
    )
    from shoal.sharded import DistributedHashTable

    single = {
        f: DistributedHashTable(2, make, lambda i, c, f=f: HashTable.from_config(c, name=f"{f}_{i}")) for f in features
    }
    g = torch.Generator().manual_seed(0)
    batches: list[dict[str, Any]] = [{} for _ in range(4)]  # each step has new ids, as in training
    for f in features:
        for batch in batches:
            lengths = torch.randint(1, 6, (b,), generator=g)
            batch[f] = Ragged.from_row_lengths(torch.randint(0, 50_000, (int(lengths.sum()),), generator=g), lengths)
        ids = torch.cat([batch[f].values for batch in batches]).unique()
        values = torch.randn(ids.numel(), dim)
        single[f].assign(ids, values)
        table.assign({ps: {f: (ids[ids % 2 == ps], values[ids % 2 == ps])} for ps in range(2)})
    combiner = snn.ReduceSum()
    turns = {"ours": itertools.cycle(batches), "theirs": itertools.cycle(batches)}

    def ours():
        return table.lookup({"__sharding_sparse_fids__sparse_features": next(turns["ours"])}, {})["all"]

    def theirs():
        batch = next(turns["theirs"])
        return torch.cat([combiner.combine(batch[f], single[f].lookup(batch[f].values)) for f in features], 1)

    torch.testing.assert_close(ours(), theirs())
    found = in_turns({"ours": ours, "theirs": theirs}, 3 * args.rounds)
    report(
        "partitioned lookup to layouts, 100 features, 2 parts",
        found["ours"] * 1e3,
        "ms",
        "per-feature lookups + combiners",
        found["theirs"] * 1e3,
        found["theirs"] / found["ours"],
        ">= 3",
    )


# --- TorchRec ---------------------------------------------------------------------------------------------------------


def _torchrec_rank(rank, world, rounds):
    import warnings

    warnings.simplefilter("ignore")
    import shoal
    from shoal.sharded import AllToAllHashTable
    from shoal.table.protocol import SUM, Features, Part, Step, groups_of

    torch.manual_seed(rank)
    tables, rows, dim, b = 4, 500_000, 64, 4096
    shoal.set_num_threads(1)
    torch.set_num_threads(1)  # as under torchrun; with more threads than cores, both sides would wait for spinning ones
    names = [f"t{i}" for i in range(tables)]
    ids = {name: torch.randint(0, rows, (b,)) for name in names}
    ours = [AllToAllHashTable(dim, optimizer="sgd", lr=0.1, initializer="zeros", name=name) for name in names]
    for table in ours:
        for part in range(0, rows, 100_000):
            mine = torch.arange(part, min(rows, part + 100_000))
            mine = mine[mine % world == rank]
            table.table.assign(mine, torch.zeros(mine.numel(), dim))
    grads = {name: torch.randn(b, dim) for name in names}
    ((group, _),) = groups_of(ours)
    features = Features(tuple(range(tables)), (SUM,) * tables, tuple(k * dim for k in range(tables)), tables * dim)
    joined, upstream = torch.cat([ids[name] for name in names]), torch.cat([grads[name] for name in names], 1)
    counts, offsets = torch.full((tables,), b), torch.arange(tables * b + 1)

    def step_ours():
        found = group.find(joined, counts, features, missing="initial")
        group.pooled(found, features, offsets, None, torch.empty(b, tables * dim), missing="initial")
        group.update([Part(found, features, upstream, offsets)], step=Step())

    calls = {"ours": step_ours, "plain": _table_wise_step(rank, world, names, rows, dim, b, ids, upstream)}
    try:
        calls["torchrec"] = _torchrec_step(rank, world, names, rows, dim, b, ids, grads)
    except Exception as error:
        print(f"TorchRec did not run: {type(error).__name__}: {error}")
    times = {name: [] for name in calls}
    steps = 5  # consecutive, so that neither side starts with the caches of the other
    for _ in range(rounds + 1):
        for name, call in calls.items():
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                call()
            dist.barrier()
            times[name].append((time.perf_counter() - begin) / steps)
    return {name: statistics.median(t[1:]) for name, t in times.items()}


def _torchrec_step(rank, world, names, rows, dim, b, ids, grads):
    import torchrec
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingEnv, ShardingType

    collection = torchrec.EmbeddingBagCollection(
        tables=[
            torchrec.EmbeddingBagConfig(name=n, embedding_dim=dim, num_embeddings=rows, feature_names=[n])
            for n in names
        ],
        device=torch.device("meta"),
    )
    device = torch.device("cpu")
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1})
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, compute_device="cpu"),
        constraints={n: ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value]) for n in names},
    )
    plan = planner.collective_plan(collection, [sharder], dist.group.WORLD)
    model = DistributedModelParallel(
        collection, env=ShardingEnv.from_process_group(dist.group.WORLD), device=device, plan=plan, sharders=[sharder]
    )
    jagged = torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=names, values=torch.cat([ids[n] for n in names]), lengths=torch.ones(len(names) * b, dtype=torch.int32)
    )
    upstream = torch.cat([grads[n] for n in names], 1)

    def step():
        out = model(jagged).values()
        out.backward(upstream)

    return step


def _table_wise_step(rank, world, names, rows, dim, b, ids, upstream):
    """TorchRec's exchanges in plain torch: lengths, ids, pooled rows and gradients, with each table on one rank."""
    owner = [k % world for k in range(len(names))]
    order = sorted(range(len(names)), key=lambda k: owner[k])
    own = [k for k in order if owner[k] == rank]
    per = [owner.count(r) for r in range(world)]
    weights = [torch.zeros(rows, dim) for _ in own]
    lengths, values = torch.ones(len(names) * b, dtype=torch.int32), torch.cat([ids[names[k]] for k in order])
    bags = torch.arange(world * b)

    def exchange(flat, send, recv):
        out = flat.new_empty(sum(recv))
        dist.all_to_all_single(out, flat, recv, send)
        return out

    def step():
        came = exchange(lengths, [n * b for n in per], [len(own) * b] * world)
        counts = came.view(world, -1).sum(1).tolist()
        mine = exchange(values, [n * b for n in per], counts).view(world, len(own), b)
        of_table = [mine[:, i].reshape(-1) for i in range(len(own))]
        pool = torch.nn.functional.embedding_bag
        pooled = torch.cat([pool(i, w, bags, mode="sum") for i, w in zip(of_table, weights, strict=True)], 1)
        sizes = [n * b * dim for n in per]
        out = exchange(pooled.view(-1), [len(own) * b * dim] * world, sizes)
        torch.cat([part.view(b, -1) for part in out.split(sizes)], 1)
        sent = torch.cat([part.reshape(-1) for part in upstream.split([n * dim for n in per], 1)])
        grads = exchange(sent, sizes, [len(own) * b * dim] * world).view(world * b, len(own), dim)
        for i, weight in enumerate(weights):
            weight.index_add_(0, of_table[i], grads[:, i], alpha=-0.1)

    return step


def bench_torchrec(args) -> None:
    from shoal.testing import run_ranks

    rivals = {"torchrec": "TorchRec on gloo, table-wise", "plain": "the same in plain torch"}
    for over, flag in TRANSPORTS.items():
        os.environ["SHOAL_SHARED_MEMORY"] = flag
        found = run_ranks(2, _torchrec_rank, args.rounds, timeout_s=400)[0]
        for name, rival in rivals.items():
            if name in found:
                report(
                    f"4 x 500 k, dim 64, batch 4096 per rank, 2 ranks, {over}",
                    8192 / found["ours"] / 1e3,
                    "k samples/s",
                    rival,
                    8192 / found[name] / 1e3,
                    found[name] / found["ours"],
                    ">= 3" if name == "torchrec" else "",
                )


def bench_ways(args) -> None:
    from benchmarks.sharded_ways import run

    run([int(n) for n in args.ranks.split(",")], args.rounds, report)


BENCHES = {
    "latency": bench_latency, "ps": bench_ps, "log": bench_log, "forward": bench_forward, "sync": bench_sync,
    "partitioned": bench_partitioned, "pipeline": bench_pipeline, "torchrec": bench_torchrec, "memory": bench_memory,
    "ways": bench_ways,
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(BENCHES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", default="2", help="numbers of ranks for ways, such as 2,4,8 on 16 cores")
    parser.add_argument("--ids", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=200_000, help="requests for memory; 10000000 for the full run")
    parser.add_argument("--dir", default=None, help="where log writes; use a real disk")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # for both sides: on two busy cores OpenMP's barriers cost more than the work
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
    for name in args.only.split(","):
        BENCHES[name](args)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"torch": torch.__version__, "cores": os.cpu_count(), "rows": ROWS}, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
