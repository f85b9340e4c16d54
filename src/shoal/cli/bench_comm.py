"""`shoal bench comm`: measure latency and goodput between the ranks of this launch; print a table and plot them.

examples:
  shoal bench comm                                     one process
  shoal launch -n 4 -m shoal bench comm --out comm.png
  torchrun --nproc-per-node 4 -m shoal bench comm --json comm.json
  mpirun -np 4 python -m shoal bench comm
"""

import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from shoal.cli.shared.arguments import parse
from shoal.cli.shared.console import print_table
from shoal.errors import ConfigError, missing_extra


@dataclass
class Options:
    """Flags of `shoal bench comm`."""

    smallest: str = "1KiB"
    """Smallest message: bytes, or with a suffix KiB, MiB or GiB."""
    largest: str = "256MiB"
    """Largest message."""
    ops: str = "send_recv,all_reduce,all_to_all"
    """Operations to measure, separated by commas."""
    seconds: float = 0.5
    """Approximate time per point; raise it if the medians vary between runs."""
    out: Path = Path("comm.png")
    """File for the plot; '-' for none."""
    json: str | None = None
    """Write the points as JSON to this file ('-': to stdout, instead of the table)."""


def parse_size(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+)\s*([KMG]?)(i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"a size must be a number of bytes, optionally with KiB, MiB or GiB, got {text!r}")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def _check_plot(out: Path) -> None:
    """Raise, before anything is measured, if the plot could not be drawn."""
    if str(out) == "-":
        return
    if find_spec("matplotlib") is None:
        raise missing_extra("matplotlib", "cli")
    if not out.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {out.parent}; create it, or give '-' for no plot")


def main(argv: list[str]) -> int:
    options = parse(Options, argv, "bench comm", __doc__ or "")
    _check_plot(options.out)
    from shoal.comm.horovod import bench, hvd_lib
    from shoal.comm.ranks import collectives

    over = bench.sizes(parse_size(options.smallest), parse_size(options.largest))
    operations = [op for op in options.ops.split(",") if op]
    points = bench.measure(operations, over, options.seconds)
    if hvd_lib.rank() == 0:
        found = bench.report(points)
        title = f"{found['world_size']} rank(s) on {found['backend']}, torch {found['torch']}, {found['cpus']} CPUs"
        if options.json == "-":
            print(json.dumps(found))
        else:
            rows = [
                [p.operation, f"{p.nbytes:,}", str(p.calls), f"{p.latency_us:,.1f}", f"{p.goodput_gbps:.3f}"]
                for p in points
            ]
            print_table(title, ("operation", "bytes", "calls", "median µs", "GB/s"), rows)
            if options.json:
                Path(options.json).write_text(json.dumps(found, indent=1))
        if str(options.out) != "-":
            bench.plot(points, options.out, title)
            if options.json != "-":
                print(f"plot: {options.out}")
    collectives.barrier()
    collectives.stop()
    return 0
