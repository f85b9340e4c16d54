"""Power loss: a trace of a server's writes and syncs, cut at every point; it comes back with what was acknowledged."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Report
from benchmarks.reliability.group import DIM, table_of, tell
from shoal.sharded import Engine, ParameterServer, PsClient, Shard
from shoal.sharded.ps.protocol import Op, Request
from shoal.sharded.ps.server import log as log_module


def powerloss(report: Report, options: Namespace, folder: Path) -> None:
    trace, acknowledged = _trace(folder / "trace", options.operations)
    rng, wrong, cuts = random.Random(options.seed), 0, 0
    points = [(cut, kept) for cut in range(len(trace) + 1) for kept in ("none", "all", "torn", "some")]
    total, end = len(points), time.monotonic() + options.share("powerloss")
    rng.shuffle(points)
    while points and time.monotonic() < end:
        cut, kept = points.pop()
        cuts += 1
        least = max((n for at, n in acknowledged if at <= cut), default=0)
        if not _recovers(folder / "cut", trace[:cut], kept, least, options.operations, rng):
            wrong += 1
            print(f"  cut at {cut} of {len(trace)}, {kept} of what was not synced kept: not what was acknowledged")
    tell(report, f"wrong states, {options.operations} writes cut at {cuts} of {total} points", wrong, at_most=0)


def _trace(folder: Path, operations: int) -> tuple[list[tuple[str, str, int, bytes]], list[tuple[int, int]]]:
    """What a server wrote and synced, and after how many of these how many writes were acknowledged."""
    trace: list[tuple[str, str, int, bytes]] = []
    acknowledged: list[tuple[int, int]] = []
    real_write, real_sync, names = os.pwritev, os.fdatasync, {}
    real_new = log_module._new_file

    def new_file(path: Path, head: bytes) -> int:
        fd = real_new(path, head)
        names[fd] = path.name
        trace.append(("write", path.name, 0, head))
        trace.append(("sync", path.name, 0, b""))
        return fd

    def write(fd: int, parts: Any, offset: int) -> int:
        data = b"".join(bytes(memoryview(part).cast("B")) if len(part) else b"" for part in parts)
        trace.append(("write", names[fd], offset, data))
        return real_write(fd, parts, offset)

    def sync(fd: int) -> None:
        real_sync(fd)
        if fd in names:
            trace.append(("sync", names[fd], 0, b""))

    log_module._new_file, log_module.os = new_file, _Os(pwritev=write, fdatasync=sync)  # type: ignore[assignment]
    try:
        engine = Engine(Shard(0, 1), "log", folder)
        engine.recover()
        with ParameterServer(Engine(Shard(0, 1), "none")) as maker, PsClient([maker.address]) as client:
            table_of(client)
            spec = maker.engine.shard.specs["t"]
        create = Request(Op.CREATE, counts=[0], names=("t",), ids=bytes.fromhex(spec["config"]),
                         values=json.dumps({k: v for k, v in spec.items() if k != "config"}).encode())  # fmt: skip
        assert engine.apply([create])[0].status == 0
        assert engine.log is not None
        engine.log.sync()
        rng = random.Random(1)
        done = 0
        while done < operations:
            for _ in range(min(rng.choice((1, 1, 2, 5)), operations - done)):
                done += 1
                request = Request(
                    Op.APPLY, stream=bytes(15) + b"w", seq=done, acked=done - 1, counts=(1,), names=("t",),
                    rates=(1.0,), ids=torch.tensor([done]), values=torch.ones(DIM),
                )  # fmt: skip
                assert engine.apply([request])[0].status == 0
            engine.log.sync()
            acknowledged.append((len(trace), done))
        engine.close()
    finally:
        log_module._new_file, log_module.os = real_new, os
    return trace, acknowledged


class _Os:
    """The functions of `os`, some of them replaced."""

    def __init__(self, **others: Any) -> None:
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def _recovers(folder: Path, trace: list[Any], kept: str, least: int, most: int, rng: random.Random) -> bool:
    """Whether a server comes back with at least the acknowledged writes, in order, from a disk that kept all that was
    synced and of the rest none, all, a torn part, or some."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    safe = {}
    for place, (kind, name, _, _) in enumerate(trace):
        if kind == "sync":
            safe[name] = place
    files: dict[str, bytearray] = {}
    for place, (kind, name, offset, data) in enumerate(trace):
        if kind != "write":
            continue
        if place > safe.get(name, -1):
            if kept == "none" or (kept == "some" and rng.random() < 0.5):
                continue
            if kept == "torn":
                data = data[: rng.randrange(len(data) + 1)]
        file = files.setdefault(name, bytearray())
        file.extend(bytes(max(0, offset + len(data) - len(file))))
        file[offset : offset + len(data)] = data
    for name, content in files.items():
        (folder / name).write_bytes(content)
    engine = Engine(Shard(0, 1), "log", folder)
    try:
        engine.recover()
        table = engine.shard.tables.get("t")
        if table is None:
            return least == 0
        ids = torch.arange(1, most + 1)
        applied = (table.lookup(ids)[:, 0] == -1).tolist()
        count = sum(applied)
        return count >= least and all(applied[:count])
    finally:
        engine.close()
