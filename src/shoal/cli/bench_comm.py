"""`shoal bench comm`: what this launch's communication gives, as a table and a picture.

examples:
  shoal bench comm                                     one process
  shoal launch -n 4 -m shoal bench comm --out comm.png
  torchrun --nproc-per-node 4 -m shoal bench comm --json comm.json
  mpirun -np 4 python -m shoal bench comm
"""

import json
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from shoal.errors import ConfigError, missing_extra


@dataclass
class Options:
    """Latency and goodput of send/recv, all-reduce and all-to-all over sizes."""

    smallest: str = "1KiB"
    """Smallest size: bytes, or with KiB, MiB, GiB."""
    largest: str = "256MiB"
    """Largest size."""
    ops: str = "send_recv,all_reduce,all_to_all"
    """What to measure."""
    seconds: float = 0.5
    """About how long each point takes; raise it where the medians wander."""
    out: Path = Path("comm.png")
    """The picture; '-' draws none."""
    json: str | None = None
    """Write the points as JSON to this file ('-': to stdout, in place of the table)."""


def parse_size(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+)\s*([KMG]?)(i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"a size must be a number of bytes, optionally with KiB, MiB or GiB, got {text!r}")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def _check_picture(out: Path) -> None:
    """What would keep the picture from being drawn is said before anything is measured."""
    if str(out) == "-":
        return
    if find_spec("matplotlib") is None:
        raise missing_extra("matplotlib", "cli")
    if not out.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {out.parent}; make it, or give '-' for no picture")


def main(argv: list[str]) -> int:
    try:
        import tyro
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise missing_extra(error.name or "tyro", "cli") from error
    try:
        options = tyro.cli(Options, args=argv, prog="shoal bench comm", description=__doc__)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2

    _check_picture(options.out)
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
            table = Table(title=title)
            for column in ("operation", "bytes", "calls", "median µs", "GB/s"):
                table.add_column(column, justify="left" if column == "operation" else "right")
            for p in points:
                table.add_row(
                    p.operation, f"{p.nbytes:,}", str(p.calls), f"{p.latency_us:,.1f}", f"{p.goodput_gbps:.3f}"
                )
            Console(width=None if sys.stdout.isatty() else 100).print(table)
            if options.json:
                Path(options.json).write_text(json.dumps(found, indent=1))
        if str(options.out) != "-":
            bench.plot(points, options.out, title)
            if options.json != "-":
                print(f"picture: {options.out}")
    collectives.barrier()
    collectives.stop()
    return 0
