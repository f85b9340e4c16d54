"""`shoal demo`: measure the cost of hash collisions in a minute on a laptop."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.shared.arguments import parse
from shoal.cli.shared.console import make_console, print_json, print_table
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.demo.run import Comparison
    from shoal.demo.stream import StreamConfig

_ABOUT = """Train a small click model on a drifting stream with ever more ids, once on a shoal.HashTable and once on a
hashed nn.EmbeddingBag with the same memory, and plot their AUC over time.

Example: shoal demo --seconds 60 --out out/demo"""


@dataclass(frozen=True, kw_only=True)
class Options:
    out: Path = Path("shoal-demo")
    """Folder for demo.png and demo.json."""
    seconds: float = 60.0
    """Approximate duration on two cores. It sets the size of the stream, so equal options give equal results on every
    machine."""
    quick: bool = False
    """Run for a few seconds to check that everything works; too short for a meaningful AUC."""
    seed: int = 0
    """Seed of the stream and of the models."""
    json: bool = False
    """Print the results as JSON instead of a table."""
    live: bool = False
    """Then train online and serve from two more processes: one gets fresh rows every second, the other a new export
    on every day of the stream (live.png)."""


def main(argv: list[str]) -> int:
    """Run the demo; the result goes to stdout, progress to stderr."""
    options = parse(Options, argv, "demo", _ABOUT)
    config = stream_config(options)
    make_folder(options.out)
    from shoal.demo.run import compare

    with _progress() as progress:
        comparison = compare(config, progress=progress)
    report = summary(comparison)
    if options.live:
        report["live"] = serve_live(options, config)
    write(comparison, report, options.out)
    if options.json:
        print_json(report)
    else:
        show(report, options.out)
    return 0


def serve_live(options: Options, config: StreamConfig) -> dict[str, Any]:
    """Run the live half, write ``live.png`` and return the results."""
    from shoal.demo.live import draw_live, run_live

    with _progress() as progress:
        live = run_live(config, 6.0 if options.quick else max(5.0, options.seconds / 4), progress)
    draw_live(live, options.out / "live.png")
    return live.report()


def stream_config(options: Options) -> StreamConfig:
    """Size the stream for the requested time."""
    from shoal.demo.stream import StreamConfig

    if options.quick:
        return StreamConfig(days=6, batches_per_day=10, batch_size=512, users=3000, items=3000, seed=options.seed)
    if not 5 <= options.seconds <= 3600:
        raise ConfigError(f"--seconds must be in 5..3600, got {options.seconds:g}; use --quick for a shorter run")
    batches = round(options.seconds)
    return StreamConfig(batches_per_day=batches, users=1000 * batches, items=1000 * batches, seed=options.seed)


def summary(comparison: Comparison) -> dict[str, Any]:
    """The results as plain values."""
    config, best = comparison.config, comparison.mean_auc(comparison.best_auc)
    return {
        "days": config.days,
        "measured_days": [comparison.warm_up_days + 1, config.days],
        "samples": config.samples,
        "seed": config.seed,
        "distinct_ids": comparison.ids[-1],
        "best_reachable_auc": best,
        "tables": [
            {
                "name": result.name,
                "auc": comparison.mean_auc(result.auc),
                "last_day_auc": result.auc[-1],
                "rows": result.rows[-1],
                "memory_bytes": result.memory_bytes,
                "train_s": result.train_s,
            }
            for result in comparison.results
        ],
        "daily": {
            "best_reachable_auc": comparison.best_auc,
            "distinct_ids": comparison.ids,
            **{result.name: {"auc": result.auc, "rows": result.rows} for result in comparison.results},
        },
    }


def make_folder(out: Path) -> None:
    """Create the folder and check, before the run, that it is writable."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(f"--out: cannot write to {str(out)!r} ({error.strerror or error})") from None


def write(comparison: Comparison, report: dict[str, Any], out: Path) -> None:
    """Write ``demo.png`` and ``demo.json``."""
    from shoal.demo.plot import draw

    (out / "demo.json").write_text(json.dumps(report, indent=2) + "\n")
    draw(comparison, out / "demo.png")


def show(report: dict[str, Any], out: Path) -> None:
    """Print the results as a table."""
    from rich.text import Text

    first, last = report["measured_days"]
    best = [Text("best reachable", "dim"), Text(f"{report['best_reachable_auc']:.4f}", "dim"), "", "", "", ""]
    rows = [
        [
            one["name"],
            Text(f"{one['auc']:.4f}", "bold"),
            f"{one['last_day_auc']:.4f}",
            f"{one['rows']:,}",
            f"{one['memory_bytes'] / 1e6:.1f} MB",
            f"{one['train_s']:.1f} s",
        ]
        for one in report["tables"]
    ]
    title = f"AUC of days {first} to {last}, each batch predicted before it was learnt"
    print_table(title, ("table", "AUC", "last day", "rows", "memory", "training"), [best, *rows])
    ours, theirs = report["tables"]
    make_console().print(
        f"{report['samples'] / 1e6:.2g} M samples, {report['distinct_ids']:,} distinct ids. With the same memory, "
        f"shared rows cost [bold]{(ours['auc'] - theirs['auc']) * 100:.2f}[/] points of AUC.\n"
        f"The plot is {out / 'demo.png'}"
    )
    if "live" in report:
        _show_live(report["live"], out)


def _show_live(live: dict[str, Any], out: Path) -> None:
    from rich.text import Text

    rows = [[name, Text(f"{value:.4f}", "bold")] for name, value in live["auc"].items()]
    print_table("Two serving replicas, queried before each batch was learnt", ("replica", "AUC"), rows)
    ages = live["freshness_s"]
    if ages["p50"] is not None:
        print(
            f"rows and weights pushed in {live['rounds']} rounds; from gradient to servable at most "
            f"{ages['p50']:.2f} s (p50), {ages['p99']:.2f} s (p99). The plot is {out / 'live.png'}"
        )


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int, float], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("AUC {task.fields[auc]:.4f}"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, Any] = {}
    with Progress(*columns, console=make_console(stderr=True)) as bars:

        def advance(name: str, done: int, total: int, auc: float) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total, auc=auc)
            bars.update(tasks[name], completed=done, auc=auc)

        yield advance
