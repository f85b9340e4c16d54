"""Speed of the offline checkpoint tools, against restoring the same files into a table."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch

import shoal
from benchmarks.harness import Report, interleaved, median, parser, touch_memory
from shoal.table.offline.diff import diff
from shoal.table.offline.rewrite import reshard
from shoal.table.offline.source import open_source
from shoal.table.offline.stat import find, table_stats, top
from shoal.table.offline.verify import verify


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--rows", type=int, default=1_000_000)
    options = flags.parse_args()
    report = Report("offline")
    report.start()
    touch_memory(1.0)
    folder = tempfile.mkdtemp(prefix="shoal-bench-")
    try:
        ids = torch.arange(options.rows) * 982451653
        table = shoal.HashTable(16, optimizer=shoal.Adagrad(lr=0.1), name="item")
        table.assign(ids, torch.randn(options.rows, 16), req_time=1_700_000_000)
        base = os.path.join(folder, "item")
        table.save(base)
        other = shoal.HashTable(16, optimizer=shoal.Adagrad(lr=0.1), name="other")
        size = open_source(base).bytes
        made = iter(range(10_000))
        tasks: dict[str, Callable[[], Any]] = {
            "stat": lambda: table_stats(open_source(base), ["item"]),
            "get (the last id)": lambda: find(open_source(base), ["item"], 1),
            "top 10 by norm": lambda: top(open_source(base), ["item"], "norm", 10),
            "verify": lambda: verify(base),
            "diff with itself": lambda: diff(open_source(base), open_source(base), ["item"]),
            "reshard to 8 files": lambda: reshard(open_source(base), ["item"], f"{base}-{next(made)}", 8),
        }
        times = interleaved([lambda: other.restore(base), *tasks.values()], min(options.repeats, 3))
        restore = median(times[0])
        print(f"# {options.rows:,} rows of dim 16 with adagrad, {size / 1e6:.0f} MB; rival: restore into a table")
        for name, series in zip(tasks, times[1:], strict=True):
            took = median(series)
            ours = f"{options.rows / took / 1e6:.2f} M rows/s"
            report.add(name, ours, f"{options.rows / restore / 1e6:.2f} M rows/s", restore / took)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"# {size / options.rows:.0f} B a record; peak memory of the process {peak / 2**30:.2f} GiB")
    report.save(options.json)


if __name__ == "__main__":
    main()
