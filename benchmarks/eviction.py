"""Tables with a budget: the cost of a step that evicts, hit rates against exact policies, bytes, AUC, and kills.

    python -m benchmarks.eviction                              # CPU: 20 M rows, about ten minutes, 8 GB of memory
    python -m benchmarks.eviction --rows 1000000 --only step   # a quick look
    python -m benchmarks.eviction --only kill --kills 50

The exact policies are simulators in this file: after every batch they evict the rows with the lowest keys of all.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shoal
from benchmarks.harness import Report, interleaved, median, parser
from benchmarks.table import id_of
from shoal.table import restore_incremental, save_incremental

STEP = 200_000


def step(report: Report, rows: int, repeats: int) -> None:
    """A training step on known rows, and one with new ids that evicts as many rows."""
    dim = 16
    table = shoal.HashTable(dim, lr=0.01, max_rows=rows, seed=0, name="full")
    plain = shoal.HashTable(dim, lr=0.01, seed=0, name="plain")
    for start in range(0, rows, STEP):
        ids = id_of(torch.arange(start, min(rows, start + STEP)))
        for one in (table, plain):
            one.lookup(ids, insert_missing=True)
    grads, next_id = torch.randn(STEP, dim), rows
    generator = torch.Generator().manual_seed(0)

    def known(one: shoal.HashTable, end: int | None = None) -> None:
        end = end or next_id
        ids = id_of(torch.randint(end - int(0.9 * rows), end, (STEP,), generator=generator))  # certainly in the table
        one.apply_gradients(ids, grads, enable_dedup=True)

    def evicting(share: float) -> None:
        nonlocal next_id
        new = int(share * STEP)
        old = torch.randint(next_id - int(0.9 * rows), next_id, (STEP - new,), generator=generator)
        ids = id_of(torch.cat([torch.arange(next_id, next_id + new), old]))
        next_id += new
        table.apply_gradients(ids, grads, enable_dedup=True)

    while table.eviction_stats().evicted < rows // 50:
        evicting(1.0)
    # The plain table does not have the new ids that came in the meantime, so it gets ids that it has.
    calls = [lambda: known(table), lambda: evicting(0.4), lambda: evicting(1.0), lambda: known(plain, rows)]
    of_known, some, every, of_plain = (median(series) for series in interleaved(calls, repeats))
    rate = f"{STEP / of_known / 1e6:.1f} M/s"
    report.add(f"step on known rows, {rows:,} rows, with / without budget", rate, f"{STEP / of_plain / 1e6:.1f} M/s",
               of_plain / of_known)  # fmt: skip
    report.add("step with 40 % new ids / on known rows", f"{STEP / some / 1e6:.1f} M/s", rate, of_known / some, 0.5)
    report.add("step of new ids alone / on known rows", f"{STEP / every / 1e6:.1f} M/s", rate, of_known / every, 0.5)
    extra = table.memory_bytes() / len(table) - plain.memory_bytes() / len(plain)
    report.add("bytes per row more than without a budget", f"{extra:.1f}", "", extra, 8, at_most=True)


def zipf_stream(ids: int, batches: int, size: int, drift: int, seed: int) -> Iterator[np.ndarray]:
    """Batches by a Zipf law of exponent 1.05; the popular ids shift by ``drift`` with every batch."""
    rng = np.random.default_rng(seed)
    law = np.cumsum(np.arange(1, ids + 1, dtype=np.float64) ** -1.05)
    for number in range(batches):
        rank = np.searchsorted(law, rng.random(size) * law[-1])
        yield np.unique((rank + number * drift) % ids)


def exact(policy: str, stream: Iterator[np.ndarray], ids: int, capacity: int, batches: int) -> float:
    """The hit rate of an exact policy in the second half of the stream."""
    count, last, there = np.zeros(ids, np.int64), np.zeros(ids, np.int64), np.zeros(ids, bool)
    hits = seen = 0
    for number, batch in enumerate(stream, start=1):
        if number > batches // 2:
            hits, seen = hits + int(there[batch].sum()), seen + len(batch)
        count[batch] = np.where(there[batch], count[batch] + 1, 1)
        last[batch], there[batch] = number, True
        held = np.flatnonzero(there & (last < number))  # rows outside the batch make room for it
        if (over := int(there.sum()) - capacity) > 0:
            if policy == "slru":
                key = (last[held] - number) * np.where(count[held] > 1, 1, 4)
            else:
                key = last[held] if policy == "lru" else (count[held] << 32) + last[held]
            there[held[np.argpartition(key, min(over, len(held) - 1))[:over]]] = False
    return hits / seen


def hits(report: Report, ids: int) -> None:
    batches, size, capacity = 200, ids // 50, ids // 10
    for law, drift in (("Zipf 1.05", 0), ("drifting stream", ids // 2000)):
        for policy in ("lru", "lfu", "slru"):
            table = shoal.HashTable(1, max_rows=capacity, evict=policy, optimizer="sgd")
            before = table.eviction_stats()
            for number, batch in enumerate(zipf_stream(ids, batches, size, drift, 0), start=1):
                table.assign(torch.from_numpy(batch), torch.zeros(len(batch), 1))
                if number == batches // 2:
                    before = table.eviction_stats()
            after = table.eviction_stats()
            found = after.hits - before.hits
            ours = found / (found + after.created - before.created + after.refused - before.refused)
            best = exact(policy, zipf_stream(ids, batches, size, drift, 0), ids, capacity, batches)
            report.add(f"hit rate, {policy}, {law}, budget 10 %; points off", f"{100 * ours:.2f} %",
                       f"{100 * best:.2f} %", 100 * abs(ours - best), 1, at_most=True)  # fmt: skip


def auc(report: Report, days: int, seed: int) -> None:
    from shoal.demo.model import Collisionless
    from shoal.demo.run import train
    from shoal.demo.stream import StreamConfig
    from shoal.nn import HashEmbeddingBag, SparseOptimizer

    config = StreamConfig(days=days, seed=seed)
    unlimited = train(Collisionless(10**4, config.seed), config)
    rows, results = max(unlimited.rows) // 4, {}
    policies: dict[str, Any] = {
        "lru": "lru", "slru": "slru", "lfu": "lfu", "epoch_lfu, a day": shoal.EpochLfu(every="1d"),
        "epoch_lfu, 3 days": shoal.EpochLfu(every="3d"), "lfu, if_better": shoal.Lfu(admit="if_better"),
        "epoch_lfu, 3 days, if_better": shoal.EpochLfu(every="3d", admit="if_better"),
    }  # fmt: skip
    for policy, evict in policies.items():
        small = Collisionless(10**4, config.seed)
        optimizer = shoal.Adagrad(lr=0.05, initial_accumulator=0.1)
        small.table = shoal.HashTable(small.table.dim_size, optimizer=optimizer, seed=config.seed, max_rows=rows,
                                      evict=evict)  # fmt: skip
        small.table.config.learning_rate_fns = Collisionless(10**4, 0).table.config.learning_rate_fns
        small.bag = HashEmbeddingBag(small.table, combiner="sum")
        small.bag.clock = lambda small=small: small.now_s
        small.optimizer = SparseOptimizer(small.bag)
        results[policy] = train(small, config)
    skip = days // 3
    best = sum(unlimited.auc[skip:]) / len(unlimited.auc[skip:])
    for policy, result in results.items():
        ours = sum(result.auc[skip:]) / len(result.auc[skip:])
        report.add(f"AUC, {policy}, a quarter of {max(unlimited.rows):,} rows; 0.001 below", f"{ours:.4f}",
                   f"{best:.4f}", 1000 * (best - ours), 3, at_most=True)  # fmt: skip


# --- kills ------------------------------------------------------------------------------------------------------------

ROWS = 20_000


def digest(table: shoal.HashTable) -> str:
    ids = torch.cat(list(table.all_ids())).sort().values
    return hashlib.sha256(ids.numpy().tobytes() + table.lookup(ids).numpy().tobytes()).hexdigest()


def write_until_killed(folder: Path) -> None:
    """Fills a table, evicts and saves; before every save it writes the table's content to the journal."""
    table = shoal.HashTable(2, max_rows=ROWS, initializer="zeros", name="t")
    if any(folder.glob("ckpt/*")):
        restore_incremental(table, folder / "ckpt")
    generator = torch.Generator().manual_seed(time.time_ns() % 2**31)
    with open(folder / "journal", "a") as journal:
        while True:
            for _ in range(3):
                ids = torch.randint(0, 10 * ROWS, (4000,), generator=generator)
                table.assign(ids, torch.stack([ids.float(), torch.rand(4000, generator=generator)], 1))
            journal.write(digest(table) + "\n")
            journal.flush()
            save_incremental(table, folder / "ckpt")


def kill(report: Report, kills: int) -> None:
    good = 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for _ in range(kills):
            child = subprocess.Popen([sys.executable, "-m", "benchmarks.eviction", "--write-until-killed", made])
            before = len((folder / "journal").read_text().split()) if (folder / "journal").exists() else 0
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                lines = len((folder / "journal").read_text().split()) if (folder / "journal").exists() else 0
                if lines > before + 1:
                    break
                time.sleep(0.02)
            time.sleep(random.random() * 0.3)
            os.kill(child.pid, signal.SIGKILL)
            child.wait(30)
            table = shoal.HashTable(2, max_rows=ROWS, initializer="zeros", name="t")
            restore_incremental(table, folder / "ckpt")
            good += digest(table) in (folder / "journal").read_text().split() and len(table) <= ROWS
    report.add("kill -9 during eviction and saving: whole tables restored", str(good), str(kills), good / kills, 1)


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("--rows", type=int, default=20_000_000, help="rows of the table whose steps are timed")
    args.add_argument("--ids", type=int, default=1_000_000, help="ids of the streams whose hits are counted")
    args.add_argument("--days", type=int, default=12, help="days of the demo stream")
    args.add_argument("--seed", type=int, default=0, help="seed of the demo stream")
    args.add_argument("--kills", type=int, default=50)
    args.add_argument("--only", default="step,hits,auc,kill", help="some of: %(default)s")
    args.add_argument("--write-until-killed", metavar="DIR", help=argparse_hidden())
    given = args.parse_args()
    if given.write_until_killed:
        return write_until_killed(Path(given.write_until_killed))
    report = Report("eviction")
    report.start()
    wanted = given.only.split(",")
    if "step" in wanted:
        step(report, given.rows, given.repeats)
    if "hits" in wanted:
        hits(report, given.ids)
    if "auc" in wanted:
        auc(report, given.days, given.seed)
    if "kill" in wanted:
        kill(report, given.kills)
    report.save(given.json)
    return None


def argparse_hidden() -> str:
    import argparse

    return argparse.SUPPRESS


if __name__ == "__main__":
    main()
