"""Peer gather against hand-written torch and numpy: codec, update, compression, overlap, scaling.

python -m benchmarks.gather [--json FILE] [--quick] [--only codec]
"""

import argparse
import ctypes
import hashlib
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shoal
from shoal.gather import (
    GatherConfig,
    GatherPlan,
    GradientSpec,
    MemoryObject,
    MemoryStore,
    clip_factors,
    compress,
    dequantize,
    dump_payload,
    gather,
    index_overlap,
    load_payload,
    outer_update,
    unpack12,
    validate_payload,
)
from shoal.gather.payload.codec import pack12_reference, unpack12_reference
from shoal.gather.payload.validate import raw_bytes

SIDE = 5056  # 79 * 64: 25.6 M parameters in chunks of 64 x 64


def interleaved(ours: Callable[[], Any], rival: Callable[[], Any], repeat: int) -> tuple[float, float]:
    """Median seconds of both, which take turns, so that noise affects both."""
    for _ in range(3):
        ours(), rival()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeat):
        for call, into in zip((ours, rival), times, strict=True):
            begin = time.perf_counter()
            call()
            into.append(time.perf_counter() - begin)
    return statistics.median(times[0]), statistics.median(times[1])


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory, so that large results, ours and the rival's, use pages that were touched before.

    Otherwise they are in fresh pages, whose faults take longer than the work and depend on earlier allocations."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def model_spec() -> tuple[torch.nn.Module, GradientSpec]:
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(SIDE, SIDE))})
    return model, GradientSpec.from_model(model)


def payloads(spec: GradientSpec, n: int) -> dict[int, dict[str, Any]]:
    return {uid: compress({"w": torch.randn(SIDE, SIDE)}, spec, window=0) for uid in range(n)}


def torch_dequantize(q: torch.Tensor, params: tuple[Any, ...]) -> torch.Tensor:
    return (params[3][q.long()] + params[0]).to(params[4])


def bench_codec(made: dict[str, Any], spec: GradientSpec, repeat: int) -> dict[str, Any]:
    param, state = spec.params[0], made["state_dict"]
    idxs, vals, quant = state["widxs"], state["wvals"], state["wquant_params"]
    shape = (param.chunks, param.k)

    def ours() -> None:
        unpack12(idxs, shape)
        dequantize(vals, quant)

    def rival() -> None:
        unpack12_reference(idxs).reshape(shape)
        torch_dequantize(vals, quant)

    keep_freed_memory()
    rows: dict[str, Any] = {}
    before = shoal.num_threads(), torch.get_num_threads()
    for threads in (1, 2):
        shoal.set_num_threads(threads)
        torch.set_num_threads(threads)
        a, b = interleaved(ours, rival, repeat)
        rows[f"unpack+dequantize, {threads} thread(s)"] = {
            "ours_ms": a * 1e3, "torch_ms": b * 1e3, "ratio": b / a, "figure": ">= 5"
        }  # fmt: skip
    shoal.set_num_threads(before[0])
    torch.set_num_threads(before[1])
    blob = b"".join(raw_bytes(t).tobytes() for t in (idxs, vals))
    check = lambda: validate_payload(made, spec)  # noqa: E731
    for name, once in (("torch unpack+dequantize", rival), ("native unpack+dequantize", ours),
                       ("its BLAKE2b alone", lambda: hashlib.blake2b(blob, digest_size=32).digest())):  # fmt: skip
        a, b = interleaved(check, once, repeat)
        rows[f"validate / {name}"] = {"ours_ms": a * 1e3, "once_ms": b * 1e3, "ratio": a / b, "figure": "<= 1.5"}
    return rows


def one_shot(model: torch.nn.Module, optimizer: Any, result: Any, spec: GradientSpec) -> None:
    """The rival's update: unpack all, concatenate, scatter-mean, step."""
    param = spec.params[0]
    _, factors = clip_factors(result.norms[:, 0])
    state = result.state_dict
    indices, values = [], []
    rows = zip(state["widxs"], state["wvals"], state["wquant_params"], factors, strict=True)
    for idxs, vals, quant, factor in rows:
        indices.append(unpack12_reference(idxs).reshape(param.chunks, param.k))
        values.append(torch_dequantize(vals, quant).reshape(param.chunks, param.k) * factor)
    dense = torch.zeros(param.chunks, param.totalk)
    dense.scatter_reduce_(1, torch.cat(indices, 1), torch.cat(values, 1), "mean", include_self=False)
    y, x, h, w = param.blocks
    model.get_parameter("w").grad = dense.view(y, x, h, w).transpose(1, 2).reshape(param.shape)
    optimizer.step()
    optimizer.zero_grad()


def bench_update(
    made: dict[int, dict[str, Any]], model: torch.nn.Module, spec: GradientSpec, repeat: int
) -> dict[str, Any]:
    objects = {(0, uid): MemoryObject(dump_payload(p)) for uid, p in made.items()}
    result = gather(GatherPlan(0, made), spec, MemoryStore(objects), config=GatherConfig(spill="disk"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    budget = 1 << 30
    reports = []

    def ours() -> None:
        reports.append(outer_update(model, optimizer, result, spec=spec, budget_bytes=budget))

    a, b = interleaved(ours, lambda: one_shot(model, optimizer, result, spec), repeat)
    return {
        f"outer_update, {len(made)} peers": {
            "ours_ms": a * 1e3, "one_shot_ms": b * 1e3, "ratio": b / a, "figure": ">= 3",
            "peak_bytes": reports[-1].peak_bytes, "budget_bytes": budget,
        }
    }  # fmt: skip


def bench_compress(spec: GradientSpec, repeat: int) -> dict[str, Any]:
    param = spec.params[0]
    gradient = torch.randn(SIDE, SIDE)
    y, x, h, w = param.blocks

    def rival() -> None:
        chunked = gradient.view(y, h, x, w).transpose(1, 2).reshape(y * x, h * w)
        index = chunked.abs().topk(param.k, dim=1).indices
        values = chunked.gather(1, index)
        shift = values.mean()
        z = values - shift
        scale = 6 * (z.norm() / (z.numel() - 1) ** 0.5) / 4
        q = torch.round(z / scale + 2).clamp_(0, 3).to(torch.uint8)
        for b in range(4):
            z[q == b].mean()
        pack12_reference(index)

    a, b = interleaved(lambda: compress({"w": gradient}, spec), rival, repeat)
    return {"compress, 25.6 M": {"ours_ms": a * 1e3, "torch_ms": b * 1e3, "ratio": b / a, "figure": ">= 3"}}


def bench_overlap(made: dict[int, dict[str, Any]], spec: GradientSpec, peers: int) -> dict[str, Any]:
    param = spec.params[0]
    objects = {(0, uid): MemoryObject(dump_payload(made[uid % len(made)])) for uid in range(peers)}
    result = gather(GatherPlan(0, range(peers)), spec, MemoryStore(objects))
    begin = time.perf_counter()
    report = index_overlap(result, spec=spec, budget_bytes=256 << 20)
    ours = time.perf_counter() - begin
    # numpy: one sorted array of global positions per peer; the time of some pairs is extrapolated to all.
    offsets = np.arange(param.chunks)[:, None] * param.totalk
    rows = [(unpack12(made[u % len(made)]["state_dict"]["widxs"], (param.chunks, param.k)).numpy() + offsets).ravel()
            for u in range(min(peers, 8))]  # fmt: skip
    begin, pairs = time.perf_counter(), 0
    for i in range(len(rows)):
        for j in range(i + 1, min(len(rows), i + 3)):
            shared = len(np.intersect1d(rows[i], rows[j], assume_unique=True))
            assert shared == int(report.counts[i, j])
            pairs += 1
    rival = (time.perf_counter() - begin) / pairs * peers * (peers - 1) / 2
    return {
        f"overlap, {peers} peers": {
            "ours_ms": ours * 1e3, "numpy_ms": rival * 1e3, "ratio": rival / ours, "figure": ">= 5",
            "note": f"numpy extrapolated from {pairs} pairs",
        }
    }  # fmt: skip


def bench_memory(repeat: int) -> dict[str, Any]:
    """Accounted peak, and anonymous memory of the gather and the update, from 4 to 64 peers."""
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(2048, 2048))})
    spec = GradientSpec.from_model(model, target_chunk=32)
    peaks, anonymous = {}, {}
    datas = [dump_payload(compress({"w": torch.randn(2048, 2048)}, spec, window=0)) for _ in range(64)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kept = []
    for count in (4, 16, 64):
        store = MemoryStore({(0, uid): MemoryObject(datas[uid]) for uid in range(count)})
        before = _anonymous()
        result = gather(GatherPlan(0, range(count)), spec, store, config=GatherConfig(spill="disk"))
        report = outer_update(model, optimizer, result, spec=spec, budget_bytes=24 << 20)
        anonymous[count] = max(0, _anonymous() - before)
        peaks[count] = report.peak_bytes
        kept.append(result)
    growth = 60 * spec.payload_bytes
    return {
        "A5 peak 64/4": {"ratio": peaks[64] / peaks[4], "figure": "<= 1.05", "peak_bytes": peaks[64]},
        "A5 anonymous growth / payload growth": {
            "ratio": max(0, anonymous[64] - anonymous[4]) / growth, "figure": "< 0.1", "payload_growth_bytes": growth
        },
    }  # fmt: skip


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def _fetch_rank(rank: int, world: int, folder: str, datas: list[bytes], spec_json: str, results: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    group = None
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
        group = dist.group.WORLD
    spec = GradientSpec.from_json(spec_json)
    store = MemoryStore({(0, uid): MemoryObject(data) for uid, data in enumerate(datas)}, latency_s=0.2)
    config = GatherConfig(max_concurrent_fetches=1)
    gather(GatherPlan(1, []), spec, store, group=group)  # creates the control group, once
    result = gather(GatherPlan(0, range(len(datas))), spec, store, group=group, config=config)
    assert len(result.uids) == len(datas)
    if rank == 0:
        results.put((world, result.time))
    if world > 1:
        dist.destroy_process_group()


def bench_scaling() -> dict[str, Any]:
    """A gather of 16 peers with 0.2 s per request, one request at a time."""
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(256, 256))})
    spec = GradientSpec.from_model(model)
    datas = [dump_payload(compress({"w": torch.randn(256, 256)}, spec, window=0)) for _ in range(16)]
    context = multiprocessing.get_context("spawn")
    times = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2, 4):
            results = context.Queue()
            processes = [
                context.Process(target=_fetch_rank, args=(r, world, folder, datas, spec.to_json(), results))
                for r in range(world)
            ]
            for process in processes:
                process.start()
            times[world] = results.get(timeout=120)[1]
            for process in processes:
                process.join(30)
    return {
        "A6 W=2 / W=1": {"ratio": times[2] / times[1], "figure": "<= 0.6", "seconds": times[2]},
        "A6 W=4 / W=1": {"ratio": times[4] / times[1], "figure": "<= 0.35", "seconds": times[4]},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gather", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--only", default="", help="run only parts whose name contains this")
    args = parser.parse_args(argv)
    repeat = 3 if args.quick else 9
    torch.manual_seed(0)
    machine = {
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__, "numpy": np.__version__, "shoal": shoal.__version__, "isa": shoal._core.isa(),
        "threads": shoal.num_threads(),
    }  # fmt: skip
    print("  ".join(f"{k} {v}" for k, v in machine.items()))
    model, spec = model_spec()
    made = payloads(spec, 1 if args.only == "codec" else 16)
    assert load_payload(dump_payload(made[0]), spec)
    results: dict[str, Any] = {}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "update": lambda: bench_update(made, model, spec, repeat),
        "compress": lambda: bench_compress(spec, repeat),
        "overlap": lambda: bench_overlap(made, spec, 64),
        "memory": lambda: bench_memory(repeat),
        "scaling": bench_scaling,
        "codec": lambda: bench_codec(made[0], spec, 10 * repeat),  # last: it changes how this process frees memory
    }
    for part in (parts[name] for name in parts if args.only in name):
        for name, row in part().items():
            results[name] = row
            rest = "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
            print(f"{name:40} {rest}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
