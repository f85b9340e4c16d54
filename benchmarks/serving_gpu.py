"""A DLRM on a GPU: scored rows per second of 64 clients with 256 rows each. A part of `serving.py`.

    python -m benchmarks.serving --only gpu

The model is the DLRM of `shoal train`: 26 features of dim 64 in one table, bottom 512-256, top 512-256. Rows and net
are on the GPU, the clients on other cores of the same host. Without a GPU the CPU serves, which only tests the
benchmark.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import serving as base
from benchmarks import serving_load

ROWS, CLIENTS, KNOWN = 256, 64, 400_000


def export(folder: Path, dim: int = 64) -> tuple[str, torch.Tensor]:
    """Exports a DLRM with many rows; returns their ids."""
    from shoal.data.generate import CriteoLike, write_criteo
    from shoal.train.loop.trainer import trainer
    from shoal.trainer import load_config

    data = folder / "clicks.tsv"
    write_criteo(data, CriteoLike(rows=1_000, seed=1))
    changes = {
        "data.train": [str(data)], "train.batch_size": 512, "train.threads": 4, "model.name": "dlrm",
        "model.bottom": [512, 256], "model.top": [512, 256], "table.dim": dim,
    }  # fmt: skip
    ids = torch.randint(1, 1 << 62, (KNOWN,), generator=torch.Generator().manual_seed(3))
    with trainer(load_config(None, changes)) as one:
        one.run()
        (table,) = one.rows.local
        table.assign(ids, 0.1 * torch.randn(KNOWN, dim), int(time.time()))
        version = one.export(str(folder / "gpu"))
    return str(Path(version).parent), ids


def request_of(ids: torch.Tensor, seed: int) -> bytes:
    from shoal.data.schema import CRITEO
    from shoal.serving.predict import encode_request, model_spec
    from shoal.serving.tensors import encode_tensor

    draw = torch.Generator().manual_seed(seed)
    columns: dict[str, Any] = {
        name: ids[torch.randint(0, len(ids), (ROWS,), generator=draw)] for name in CRITEO.sparse
    } | {name: torch.rand(ROWS, generator=draw) for name in CRITEO.dense}
    return encode_request(model_spec("m", "ids"), {name: encode_tensor(value) for name, value in columns.items()})


def stages(path: str, request: bytes, device: str, precision: str) -> str:
    """Milliseconds of each step of a batch."""
    from shoal.serving.server.loader import load_servable
    from shoal.serving.server.net.placement import Placement
    from shoal.serving.server.trained import BATCH, MadeInputs, made_inputs

    where = max(Path(path).iterdir())
    servable = load_servable(where, where.parent, Placement(device=device, precision=precision))
    servable.warm_up()  # pyrefly: ignore
    signature = servable.signatures["ids"]
    parts = []
    for requests in (8, 32):
        times: dict[str, list[float]] = {"read": [], "run": []}
        for _ in range(12):
            begin = time.perf_counter()
            made = signature.reader.read([request] * requests)
            inputs = {BATCH: MadeInputs(made_inputs(made, signature.maker, pin=signature.pins))}
            middle = time.perf_counter()
            signature.run(inputs)
            times["read"].append(middle - begin)
            times["run"].append(time.perf_counter() - middle)
        text = ", ".join(f"{name} {sorted(each)[6] * 1e3:.2f}" for name, each in times.items())
        parts.append(f"{requests * ROWS} rows: {text}")
    return "; ".join(parts)


def gpu(report: Any, folder: Path, quick: bool) -> None:
    """Scored rows per second, in float32 and in bfloat16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path, ids = export(folder)
    cores = sorted(os.sched_getaffinity(0))
    threads = max(1, min(4, len(cores) // 4))
    loading, serving = cores[-threads:], cores[:-threads] or cores
    requests = [request_of(ids, seed) for seed in range(threads)]
    seconds = 3.0 if quick else 10.0
    for precision in ("fp32", "bf16") if device == "cuda" else ("fp32",):
        print(f"  {device} {precision}: ms of {stages(path, requests[0], device, precision)}", flush=True)
        server = serving_load.Served(path, serving, front="native", device=device, precision=precision)
        fields: dict[str, Any] = {
            "threads": threads, "cores": loading, "connections": CLIENTS // threads, "calls": 1,
        }  # fmt: skip
        serving_load.native_load(server.port, requests, seconds=1.5, **fields)
        begin = server.cpu()
        load = serving_load.native_load(server.port, requests, seconds=seconds, **fields)
        spent = server.cpu() - begin
        assert set(load.statuses) == {0}, load.statuses
        p50, p99 = (base.percentile(load.times, share) * 1e3 for share in (0.5, 0.99))
        figure = (
            f"{load.rate * ROWS / 1e6:.2f} M rows/s, p50 {p50:.2f} ms, p99 {p99:.2f} ms; busy cores: server "
            f"{spent / seconds:.1f} of {len(serving)}, load {load.cpu / seconds:.1f} of {threads}"
        )
        what = f"DLRM on {device}, {precision}, requests of {ROWS}, {CLIENTS} clients"
        report(what, figure, load.rate * ROWS / 2e6, ">= 2 M rows/s")
        report("its p99", f"{p99:.2f} ms", p99 / 10, "<= 10 ms")
        server.stop()
