"""Saving and restoring a table against plain file I/O of the same bytes, and lookups while a save runs.

    python -m benchmarks.checkpoint                     # 5 M rows, dim 16, Adagrad
    python -m benchmarks.checkpoint --rows 500000 --json out.json

"Plain" writes and reads the same bytes as the checkpoint: files of the same sizes, 4 MiB at a time, flushed to the
disk; it reads every file into memory. "Digests" is the time to read the files and compute the CRC-32C that a save and a
restore compute, and nothing else. Rounds are interleaved; files are read with a cold and a warm page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import shoal
from shoal import _core
from shoal.durable import digest_file
from shoal.table import HashTable, restore_incremental, restore_table, save_incremental, save_table
from shoal.table.checkpoint import naming

BLOCK = 4 << 20


def build(rows: int, dim: int) -> HashTable:
    table = HashTable(dim, optimizer="adagrad", initializer="zeros", name="bench", seed=0)
    ids = torch.randperm(rows * 4, generator=torch.Generator().manual_seed(0))[:rows]
    for part in ids.split(500_000):
        table.assign(part, torch.randn(len(part), dim), req_time=1_700_000_000)
    return table


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def drop_cache(paths: Sequence[str]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def write_plain(sources: Sequence[bytes], folder: str) -> None:
    for i, data in enumerate(sources):
        with open(os.path.join(folder, f"plain{i}"), "wb", buffering=0) as file:
            view = memoryview(data)
            for at in range(0, len(view), BLOCK):
                file.write(view[at : at + BLOCK])
            os.fsync(file.fileno())


def read_plain(paths: Sequence[str]) -> int:
    total = 0
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            total += len(file.read())
    return total


def lookup_rate(table: HashTable, ids: torch.Tensor, until: Callable[[], bool]) -> float:
    """Lookups per second until ``until`` returns True, at least one batch."""
    done, start = 0, time.perf_counter()
    while True:
        table.lookup(ids)
        done += len(ids)
        if until():
            return done / (time.perf_counter() - start)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    parser.add_argument("--json", help="also write the numbers to this file")
    options = parser.parse_args(argv)

    folder = tempfile.mkdtemp(prefix="shoal-bench-", dir=options.folder)
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {_core.isa()}",
        "versions": f"shoal {shoal.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "rows": options.rows,
        "dim": options.dim,
        "threads": shoal.num_threads(),
    }
    try:
        result |= measure(build(options.rows, options.dim), folder, options.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for key, value in result.items():
        print(f"{key:28} {value:.3f}" if isinstance(value, float) else f"{key:28} {value}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    return result


def measure(table: HashTable, folder: str, rounds: int) -> dict[str, Any]:
    base = os.path.join(folder, "t")
    times: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        times.setdefault(name, []).append(value)

    save_table(table, base)
    paths = naming.find_shards(base)
    sources = [open(path, "rb").read() for path in paths]  # noqa: SIM115
    size = sum(map(len, sources))
    for _ in range(rounds):
        os.sync()
        note("save", seconds(lambda: save_table(table, base)))
        os.sync()
        note("plain write", seconds(lambda: write_plain(sources, folder)))
        for cache in ("cold", "warm"):
            for name, call in (
                (f"plain read, {cache}", lambda: read_plain(paths)),
                (f"restore, {cache}", lambda: restore_table(empty_like(table), base)),
                (f"digests, {cache}", lambda: [digest_file(path) for path in paths]),
            ):
                if cache == "cold":
                    drop_cache(paths)
                note(name, seconds(call))

    ids = torch.randperm(table.size() * 4)[:1_000_000].contiguous()
    for _ in range(rounds):
        end = time.perf_counter() + 1
        note("lookups alone", lookup_rate(table, ids, lambda end=end: time.perf_counter() > end))
        saver = threading.Thread(target=save_table, args=(table, base))
        saver.start()
        note("lookups during a save", lookup_rate(table, ids, lambda saver=saver: not saver.is_alive()))

    chain = os.path.join(folder, "chain")
    full = seconds(lambda: save_incremental(table, chain))
    changed = torch.arange(max(1, table.size() // 100))
    table.assign(changed, torch.ones(len(changed), table.dim_size))
    delta = seconds(lambda: save_incremental(table, chain))
    chained = seconds(lambda: restore_incremental(empty_like(table), chain))

    best = {name: min(values) for name, values in times.items()}
    middle = {name: statistics.median(values) for name, values in times.items()}
    rate = {name: max(values) for name, values in times.items() if name.startswith("lookups")}
    out: dict[str, Any] = {"checkpoint GB": size / 1e9}
    for name, value in middle.items():
        if name.startswith("lookups"):
            out[f"{name}, M/s"] = value / 1e6
        else:
            out[f"{name}, s (median)"] = value
            out[f"{name}, GB/s (best)"] = size / 1e9 / best[name]
    out["save / plain write"] = middle["save"] / middle["plain write"]
    for cache in ("cold", "warm"):
        out[f"restore / plain read, {cache}"] = middle[f"restore, {cache}"] / middle[f"plain read, {cache}"]
    out["digests / restore, warm"] = middle["digests, warm"] / middle["restore, warm"]
    out["lookups kept during a save"] = middle["lookups during a save"] / middle["lookups alone"]
    out["lookups kept (best)"] = rate["lookups during a save"] / rate["lookups alone"]
    out |= {"incremental: full, s": full, "delta of 1 %, s": delta, "restore of both, s": chained}
    return out


def empty_like(table: HashTable) -> HashTable:
    return HashTable.from_config(table.config, name=table.name)


if __name__ == "__main__":
    main()
