"""`shoal gather simulate`: synthetic peers on real processes, as tables, JSON and a plot."""

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.cli.shared.console import print_json, print_table
from shoal.errors import missing_extra


@dataclass(kw_only=True)
class Simulate:
    """Measure scaling and memory with synthetic peers on real processes, and project to 1,000 peers and 64 ranks.

    Example: shoal gather simulate --peers 16 --worlds 1 2 4 --plot out/gather.png
    """

    peers: int = 16
    """Number of peers."""
    worlds: tuple[int, ...] = (1, 2, 4)
    """Numbers of ranks to measure with."""
    memory_peers: tuple[int, ...] = (4, 16, 64)
    """Numbers of peers to measure memory with, on one rank."""
    rows: int = 1024
    """Rows of the model's matrix."""
    columns: int = 1024
    """Its columns."""
    faults: float = 0.2
    """Share of peers that are absent, late, truncated, poisoned or out of range."""
    copycats: int = 1
    """Number of peers that copy another peer's update."""
    latency_s: float = 0.05
    """Seconds per call of the store; a fetch makes two."""
    concurrent: int = 1
    """Concurrent fetches per rank."""
    budget_mib: int = 64
    """Memory budget of the outer update."""
    seed: int = 0
    """Seed of the synthetic updates."""
    plot: Path | None = None
    """File for a plot (PNG)."""
    json: bool = False
    """Print JSON instead of tables."""


def simulate(args: Simulate) -> int:
    from shoal.gather.simulate import Scenario, project
    from shoal.gather.simulate import run as measure

    base = Scenario(
        peers=args.peers, rows=args.rows, columns=args.columns, faults=args.faults, copycats=args.copycats,
        latency_s=args.latency_s, concurrent=args.concurrent, budget_bytes=args.budget_mib << 20, seed=args.seed,
    )  # fmt: skip
    scaling = [measure(base, world) for world in args.worlds]
    memory = [measure(replace(base, peers=n, latency_s=0.0), 1) for n in args.memory_peers]
    basis = scaling[-1]
    sizes = [(args.peers, max(args.worlds)), (100, 8), (1000, 8), (1000, 64)]
    projected = [{"peers": p, "world": w} | project(basis, base, p, w) for p, w in sizes]
    same = {(m.summary["update_hash"], m.summary["artifact"]) for m in scaling}
    out = {
        "scaling": [asdict(m) for m in scaling],
        "memory": [{"peers": m.peers, "peak_bytes": m.peak_bytes, "budget_bytes": base.budget_bytes} for m in memory],
        "projection": projected,
        "equal for every world": len(same) == 1,
    }
    if args.plot is not None:
        _plot(args.plot, scaling, memory, base)
    if args.json:
        print_json(out)
    else:
        _tables(args, base, scaling, memory, projected)
        equal = "the update and the artifact are bit-identical for every number of ranks"
        print(equal if len(same) == 1 else "DIVERGED: the update or the artifact depends on the number of ranks")
    return 0 if len(same) == 1 else 1


def _tables(args: Simulate, base: Any, scaling: list[Any], memory: list[Any], projected: list[Any]) -> None:
    rows = []
    for m in scaling:
        phases = [f"{m.phases[k]:.3f}" for k in ("fetch_s", "validate_s", "accumulate_s")]
        rows.append([str(m.world), f"{m.seconds:.3f}", *phases, str(m.summary["accepted"]), str(m.summary["flagged"])])
    columns = ("ranks", "seconds", "fetch", "validate", "accumulate", "accepted", "flagged")
    print_table(f"{args.peers} peers", columns, rows, left=0)
    print(f"skipped: {scaling[0].summary['skipped']}")
    rows = [[str(m.peers), f"{m.peak_bytes:,}", f"{base.budget_bytes:,}"] for m in memory]
    print_table("memory of the update, one rank", ("peers", "peak bytes", "budget"), rows, left=0)
    phases = ("fetch", "validate", "overlap", "update", "total")
    rows = [[str(one["peers"]), str(one["world"]), *(f"{one[f'{k}_s']:.2f}" for k in phases)] for one in projected]
    print_table("projected from the costs above", ("peers", "ranks", *(f"{k} s" for k in phases)), rows, left=0)


def _plot(path: Path, scaling: list[Any], memory: list[Any], base: Any) -> None:
    try:
        import matplotlib
    except ImportError:
        raise missing_extra("matplotlib", "cli") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    worlds = [m.world for m in scaling]
    left.plot(worlds, [m.phases["fetch_s"] for m in scaling], "o-", label="fetch and validate")
    left.plot(worlds, [scaling[0].phases["fetch_s"] * worlds[0] / w for w in worlds], ":", label="ideal")
    left.set(xlabel="ranks", ylabel="seconds", title=f"{base.peers} peers", ylim=0)
    left.legend()
    right.plot([m.peers for m in memory], [m.peak_bytes / 2**20 for m in memory], "o-", label="peak")
    right.axhline(base.budget_bytes / 2**20, ls=":", label="budget")
    right.set(xlabel="peers", ylabel="MiB", title="memory of the outer update", ylim=0)
    right.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"plot: {path}", file=sys.stderr)
