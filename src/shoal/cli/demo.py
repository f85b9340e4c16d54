"""`shoal demo`: what collisions cost, shown in a minute on a laptop."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError, missing_extra

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.demo.run import Comparison
    from shoal.demo.stream import StreamConfig

_ABOUT = """Train a small click model on a stream that drifts and whose ids keep growing, once on a shoal.HashTable and
once on a hashed nn.EmbeddingBag of the same memory, and draw their AUC over time.

Example: shoal demo --seconds 60 --out out/demo"""


@dataclass(frozen=True, kw_only=True)
class Options:
    out: Path = Path("shoal-demo")
    """Folder for demo.png and demo.json."""
    seconds: float = 60.0
    """About how long the run takes on two cores. The stream is sized by this number alone, so that equal options give
    equal results on every machine."""
    quick: bool = False
    """A few seconds, to see that everything works; too short for the AUC to mean much."""
    seed: int = 0
    """Of the stream and of the models."""
    json: bool = False
    """Print the results as JSON instead of a table."""
    live: bool = False
    """Afterwards train online and serve from two more processes: the trainer feeds one every second, the other gets a
    new export every day of the stream (live.png)."""


def main(argv: list[str]) -> int:
    """Runs the demo; the result goes to stdout, progress to stderr."""
    try:
        import tyro
        from rich.console import Console
    except ImportError as error:
        raise missing_extra(str(error.name), "cli") from None
    options = tyro.cli(
        Options, args=argv, prog="shoal demo", description=_ABOUT, config=(tyro.conf.FlagCreatePairsOff,)
    )
    config = stream_config(options)
    make_folder(options.out)
    from shoal.demo.run import compare

    with _progress(Console(stderr=True), config) as progress:
        comparison = compare(config, progress=progress)
    report = summary(comparison)
    if options.live:
        report["live"] = serve_live(options, config)
    write(comparison, report, options.out)
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(report, Console(), options.out)
    return 0


def serve_live(options: Options, config: StreamConfig) -> dict[str, Any]:
    """The live half: its results, and ``live.png``."""
    from rich.console import Console

    from shoal.demo.live import draw_live, run_live

    with _progress(Console(stderr=True), config) as progress:
        live = run_live(config, 6.0 if options.quick else max(5.0, options.seconds / 4), progress)
    draw_live(live, options.out / "live.png")
    return live.report()


def stream_config(options: Options) -> StreamConfig:
    """The stream that fits the time asked for."""
    from shoal.demo.stream import StreamConfig

    if options.quick:
        return StreamConfig(days=6, batches_per_day=10, batch_size=512, users=3000, items=3000, seed=options.seed)
    if not 5 <= options.seconds <= 3600:
        raise ConfigError(f"--seconds must be in 5..3600, got {options.seconds:g}; --quick takes less")
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
    """Makes the folder, and sees that it can be written to before a minute has passed."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(f"--out: cannot write to {str(out)!r} ({error.strerror or error})") from None


def write(comparison: Comparison, report: dict[str, Any], out: Path) -> None:
    """``demo.png`` and ``demo.json``."""
    from shoal.demo.plot import draw

    (out / "demo.json").write_text(json.dumps(report, indent=2) + "\n")
    draw(comparison, out / "demo.png")


def show(report: dict[str, Any], console: Console, out: Path) -> None:
    """The results for people."""
    from rich.table import Table

    first, last = report["measured_days"]
    table = Table(
        title=f"AUC of days {first} to {last}, each batch predicted before it was learnt", title_justify="left"
    )
    for name in ("table", "AUC", "last day", "rows", "memory", "training"):
        table.add_column(name, justify="left" if name == "table" else "right", no_wrap=True)
    table.add_row("[dim]best reachable[/]", f"[dim]{report['best_reachable_auc']:.4f}[/]", "", "", "", "")
    for one in report["tables"]:
        table.add_row(
            one["name"],
            f"[bold]{one['auc']:.4f}[/]",
            f"{one['last_day_auc']:.4f}",
            f"{one['rows']:,}",
            f"{one['memory_bytes'] / 1e6:.1f} MB",
            f"{one['train_s']:.1f} s",
        )
    console.print(table)
    ours, theirs = report["tables"]
    console.print(
        f"{report['samples'] / 1e6:.2g} M samples, {report['distinct_ids']:,} distinct ids. With the same memory, "
        f"shared rows cost [bold]{(ours['auc'] - theirs['auc']) * 100:.2f}[/] points of AUC.\n"
        f"The picture is {out / 'demo.png'}"
    )
    if "live" in report:
        _show_live(report["live"], console, out)


def _show_live(live: dict[str, Any], console: Console, out: Path) -> None:
    from rich.table import Table

    table = Table(title="Two serving replicas, asked before each batch was learnt", title_justify="left")
    table.add_column("replica", no_wrap=True)
    table.add_column("AUC", justify="right")
    for name, value in live["auc"].items():
        table.add_row(name, f"[bold]{value:.4f}[/]")
    console.print(table)
    ages = live["freshness_s"]
    if ages["p50"] is not None:
        console.print(
            f"rows and weights pushed in {live['rounds']} rounds; from gradient to servable at most "
            f"{ages['p50']:.2f} s (p50), {ages['p99']:.2f} s (p99). The picture is {out / 'live.png'}"
        )


@contextmanager
def _progress(console: Console, config: StreamConfig) -> Iterator[Callable[[str, int, int, float], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("AUC {task.fields[auc]:.4f}"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, Any] = {}
    with Progress(*columns, console=console) as bars:

        def advance(name: str, done: int, total: int, auc: float) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total, auc=auc)
            bars.update(tasks[name], completed=done, auc=auc)

        yield advance
