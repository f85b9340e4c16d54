"""`shoal plan`: estimate memory, network and step time on 1 to 1,000 hosts."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.cli.shared.arguments import parse
from shoal.cli.shared.console import make_console, print_json, print_table, show_bytes
from shoal.errors import ConfigError, UsageError

DESCRIPTION = """Estimate memory, network, step time and bottleneck of training on 1 to 1,000 hosts, with all-to-all
(every table by row, or each in its best way) and with parameter servers, and the effect of possible changes.
--spread N shows how the tables are spread over N hosts, and why; --save writes that plan for shoal.sharded.shard.

The costs of rows, messages and arithmetic are measured on this machine (20 seconds or more; cached in a file until
--measure is given). The capacity of hosts and links comes from the configuration:

  [[table]]
  name = "item"
  dim = 16
  ids_per_sample = 20
  ids_per_day = 2e6          # new ids, never seen before
  expire_days = 30
  optimizer = "adagrad"

  [model]
  batch = 4096               # per host
  dense_parameters = 5e6
  samples_per_day = 2e9
  step_ms = 35               # measured step time of the real model on one host, if known

  [host]
  cores = 32
  memory_gb = 256
  network_gbps = 25

examples:
  shoal plan plan.toml --out plan.png
  shoal plan --measure --json"""


BUSY = 0.5  # load per CPU above which a measurement is unreliable


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of `shoal plan`."""

    config: Path | None = None
    """The plan as TOML; can be left out with --measure."""
    measure: bool = False
    """Measure this machine again."""
    costs: Path | None = None
    """File with measured costs; by default in the user's cache. If it does not exist, this machine is measured and its
    costs are written to it. It can be a file from another machine."""
    out: Path | None = None
    """File for a plot (PNG)."""
    spread: int | None = None
    """Show where each table is on this many hosts, and why."""
    save: Path | None = None
    """Write that plan as JSON, for shoal.sharded.Plan.load and shard; needs --spread."""
    json: bool = False
    """Print everything as JSON."""


def main(argv: list[str]) -> int:
    options = parse(Options, argv, "plan", DESCRIPTION, positional="config")
    from shoal.plan.config import load_plan

    if options.save is not None and options.spread is None:
        raise UsageError("--save needs --spread N, the number of hosts to spread the tables over")
    if options.spread is not None and (options.config is None or options.spread < 1):
        raise UsageError(f"--spread needs a plan as TOML and a number of hosts >= 1, got {options.spread}")
    if options.config is None and not options.measure:
        raise UsageError("a plan as TOML or --measure must be given; shoal plan --help shows an example")
    plan = load_plan(options.config) if options.config is not None else None
    costs = _costs(options)
    if plan is None:
        _show_costs(options, costs)
        return 0
    if options.spread is not None:
        return _show_spread(options, plan, costs)
    return _show(options, plan, costs)


def _costs(options: Options) -> Any:
    from shoal.plan.costs import cache_path, load_costs, measure, prepare, save_costs

    path = options.costs or cache_path()
    if path.exists() and not options.measure:
        return load_costs(path)
    try:  # fail before the measurement rather than after it
        prepare(path)
    except OSError as error:
        raise ConfigError(f"--costs {path}: {error.strerror or error}") from None

    def progress(what: str) -> None:
        print(f"measuring {what} ...", file=sys.stderr)

    costs = measure(progress)
    save_costs(costs, path)
    if options.costs is not None:
        print(f"the costs of this machine are in {path}", file=sys.stderr)
    if costs.load > BUSY:
        print(
            f"shoal plan: this machine was busy (load {costs.load:.1f} on each CPU), so these costs are too high; "
            "measure again when it is idle, with --measure",
            file=sys.stderr,
        )
    return costs


def _show_costs(options: Options, costs: Any) -> None:
    if options.json:
        print_json(asdict(costs))
        return
    rows = [[name, value if isinstance(value, str) else f"{value:,.4g}"] for name, value in asdict(costs).items()]
    print_table("costs of this machine, one core", ["what", "value"], rows)


def _show_spread(options: Options, plan: Any, costs: Any) -> int:
    from shoal.plan.model import sharding_of

    assert options.spread is not None
    made = sharding_of(plan, costs, options.spread)
    if options.json:
        tables = [{"table": p.name, "way": str(p.way), "why": p.why} for p in made.tables]
        memory, sent = (getattr(made.total, what).tolist() for what in ("memory", "sent"))
        print_json({"tables": tables, "step_s": made.step.seconds, "memory_bytes": memory, "sent_bytes": sent})
    else:
        head, *rows = made.rows()
        print_table(f"{options.spread} hosts", head, rows)
        for line in made.summary():
            make_console().print(line)
    if options.save is not None:
        try:
            made.save(options.save)
        except OSError as error:
            raise ConfigError(f"--save {options.save}: {error.strerror or error}") from None
        print(f"the plan is in {options.save}; use it with shoal.sharded.shard(model, Plan.load(...))", file=sys.stderr)
    return 0


def _show(options: Options, plan: Any, costs: Any) -> int:
    from shoal.plan.advice import WHY, changes, recommended
    from shoal.plan.model import LAYOUTS, estimates

    found = estimates(plan, costs)
    start = recommended(found)
    best = max((e for e in found if e.fits), key=lambda e: e.samples_per_s, default=None)
    at = start or best or min(found, key=lambda e: e.memory_share)
    advice = changes(plan, costs, at)
    if options.out is not None:
        from shoal.plan.plot import draw

        try:
            draw(found, plan, options.out)
        except OSError as error:
            raise ConfigError(f"--out {options.out}: {error.strerror or error}") from None
    if options.json:
        report = {
            "plan": asdict(plan), "costs": asdict(costs), "estimates": [e.report() for e in found],
            "recommended": start.report() if start else None, "bottleneck": WHY[at.bottleneck],
            "changes": [asdict(change) for change in advice],
        }  # fmt: skip
        print_json(report)
        return 0
    for layout in LAYOUTS:
        rows = []
        for e in (e for e in found if e.layout == layout):
            rows.append(
                [f"{e.hosts:,}" + (f" + {e.servers:,}" if e.servers else ""), f"{1e3 * e.step_s:,.2f}",
                 f"{e.samples_per_s:,.0f}", show_bytes(e.network_bytes),
                 f"{show_bytes(e.memory_bytes)} ({100 * e.memory_share:,.0f} %)" + ("" if e.fits else " !"),
                 "" if e.days_per_day is None else f"{e.days_per_day:,.2f}",
                 f"{e.bottleneck} ({100 * e.seconds[e.bottleneck] / e.step_s:.0f} %)", *e.notes]
            )  # fmt: skip
        hosts = "workers + servers" if layout == "parameter_server" else "hosts"
        columns = [hosts, "step ms", "samples/s", "sent per step", "memory (share)", "days per day", "bottleneck"]
        if layout == "planned":
            columns.append("tables by")
        print_table(layout.replace("_", " "), columns, rows)
    console = make_console()
    servers = f" and {at.servers} server{'s'[: at.servers > 1]}" if at.servers else ""
    where = f"{at.layout.replace('_', ' ')}, {at.hosts} worker{'s'[: at.hosts > 1]}{servers}"
    if start is not None:
        why = "everything fits" + (" and training keeps up with the stream" if plan.model.samples_per_day else "")
        console.print(f"[bold]start with {where}[/]: the fewest hosts where {why}.")
    elif best is None:
        console.print(
            f"[bold]the rows do not fit on any of these[/]; the nearest is {where}, which needs {at.memory_share:.1f} "
            "times the memory of a host."
        )
    else:
        console.print(f"[bold]none of these keeps up with the stream[/]; the fastest that fits is {where}.")
    console.print(f"bottleneck: {WHY[at.bottleneck]}.")
    for change in advice[:4]:
        console.print(f"  {change.what}: samples/s x {change.samples_per_s:.2f}, memory x {change.memory:.2f}")
    busy = f", busy with other work (load {costs.load:.1f})" if costs.load > BUSY else ""
    console.print(
        f"costs measured {costs.measured} on {costs.machine}{busy}; hosts and links as stated in {options.config}."
    )
    if options.out is not None:
        console.print(f"the plot is {options.out}")
    return 0
