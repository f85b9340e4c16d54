"""Power loss: a trace of a server's writes and syncs, cut at every point; no acknowledged write may be lost."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Report
from benchmarks.reliability.group import DIM, table_of, tell_wrong
from shoal.sharded import Engine, ParameterServer, PsClient, Shard
from shoal.sharded.ps.protocol import Op, Request
from shoal.sharded.ps.server import log as log_module

KEPT = ("none", "all", "torn", "some")
"""How much of the unsynced data is on the disk after a power loss."""


def powerloss(report: Report, options: Namespace, folder: Path) -> None:
    end = time.monotonic() + options.share("powerloss")
    trace, acknowledged = _trace(folder / "trace", options.operations)
    places = list(range(len(trace) + 1))
    random.Random(options.seed).shuffle(places)
    cuts, states, wrong = 0, 0, list[str]()
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), _begin, (trace, acknowledged)) as pool:
        work = [
            pool.submit(_cut_at, place, options.seed, folder / f"cut{place}", None if place == places[0] else end)
            for place in places
        ]
        for one in work:
            tried, found = one.result()
            cuts, states, wrong = cuts + (tried > 0), states + tried, wrong + found
    tell_wrong(
        report,
        f"of {states:,} disks wrong, {options.operations} writes cut at {cuts:,} of {len(places):,} points",
        wrong,
    )


_given: tuple[list[Any], list[tuple[int, int]]]


def _begin(trace: list[Any], acknowledged: list[tuple[int, int]]) -> None:
    global _given
    _given = trace, acknowledged
    torch.set_num_threads(1)


def _cut_at(cut: int, seed: int, folder: Path, end: float | None) -> tuple[int, list[str]]:
    """The number of possible disks after a power loss at this point that were tried, and those that do not recover."""
    trace, acknowledged = _given
    if end is not None and time.monotonic() > end:
        return 0, []
    rng, wrong, seen = random.Random(seed + cut), [], []
    least = max((n for at, n in acknowledged if at <= cut), default=0)
    for kept in KEPT:
        files = _left(trace[:cut], kept, rng)
        if files in seen:
            continue
        seen.append(files)
        if not _recovers(folder, files, least, acknowledged[-1][1]):
            wrong.append(f"cut at {cut} of {len(trace)}, {kept} of what was not synced kept: not what was acknowledged")
    shutil.rmtree(folder, ignore_errors=True)
    return len(seen), wrong


def _trace(folder: Path, operations: int) -> tuple[list[tuple[str, str, int, bytes]], list[tuple[int, int]]]:
    """A server's writes and syncs, and how many requests were acknowledged after each of them."""
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


def _left(trace: list[Any], kept: str, rng: random.Random) -> dict[str, bytes]:
    """The files of a disk with all synced data and, of the rest, nothing, everything, a torn part or some of it."""
    safe = {name: place for place, (kind, name, _, _) in enumerate(trace) if kind == "sync"}
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
    return {name: bytes(content) for name, content in files.items()}


def _recovers(folder: Path, files: dict[str, bytes], least: int, most: int) -> bool:
    """Whether a server recovers with at least the acknowledged writes, in order."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
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
