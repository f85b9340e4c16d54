"""The pictures of `movielens.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, GRID, MUTED = "#2b2b33", "#e6e6ec", "#8a8a99"
OURS = "#0b7a75"
THEIRS = ("#f0a35e", "#e8804f", "#d1495b", "#8e2c48")


def draw_collisions(runs: list[dict[str, Any]], path: Path) -> None:
    """Plots AUC by epoch, one line per table: the mean over seeds, with a band from the lowest to the highest."""
    figure, axes = _figure()
    epochs = list(range(1, len(runs[0]["a row per id"]["auc"]) + 1))
    for (name, one), color in zip(runs[0].items(), (OURS, *THEIRS), strict=True):
        columns = list(zip(*(run[name]["auc"] for run in runs), strict=True))
        mean = [sum(column) / len(column) for column in columns]
        axes.fill_between(epochs, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.18, lw=0)
        axes.plot(epochs, mean, color=color, lw=2.2, marker="o", ms=4)
        shared = sum(run[name]["shared"] for run in runs) / len(runs)
        text = f"a row per id, {one['bytes'] / 1000:.0f} KB" if not shared else _hashed(name, shared)
        _label(axes, epochs[-1], mean[-1], text, color)
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.set_xticks(epochs)
    axes.set_xlim(0.8, epochs[-1])
    axes.set_xlabel("epoch")
    axes.set_ylabel("AUC on the last fifth of each user's ratings")
    _title(axes, "Ids that share a row cost AUC at every epoch")
    _foot(figure, f"MovieLens-100k, 4 stars or more; mean and range of {len(runs)} seeds")
    figure.savefig(path)


def draw_freshness(runs: list[dict[str, Any]], path: Path) -> None:
    """Plots AUC by how often a replica is refreshed (left), and two of the replicas over time (right)."""
    figure, (left, right) = _figure(columns=2)
    names = list(runs[0])
    for k, name in enumerate(names):
        values = [run[name]["auc"] for run in runs]
        mean = sum(values) / len(values)
        color = OURS if k == 0 else THEIRS[k - 1]
        left.plot([mean], [k], "o", color=color, ms=9)
        left.plot([min(values), max(values)], [k, k], color=color, lw=3, alpha=0.5, solid_capstyle="round")
        left.annotate(f"{mean:.3f}", (mean, k), xytext=(0, 10), textcoords="offset points", ha="center", color=color)
    left.set_yticks(range(len(names)), names)
    left.set_ylim(len(names) - 0.5, -0.7)
    left.margins(x=0.12)
    left.set_xlabel("AUC, predicted before learnt")
    left.grid(axis="x", color=GRID, lw=0.8)
    _title(left, "The fresher the replica, the better")

    for name, color in ((names[0], OURS), (names[3], THEIRS[2])):
        columns = list(zip(*(run[name]["by_fortnight"] for run in runs), strict=True))
        mean = [sum(column) / len(column) for column in columns]
        days = [30 + 14 * k + 7 for k in range(len(columns))]
        right.plot(days, mean, color=color, lw=2.2)
        right.fill_between(days, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.18, lw=0)
        if days:
            _label(right, days[-1], mean[-1], name, color)
    _title(right, "through the stream")
    right.set_xlabel("day of the stream")
    right.set_ylabel("AUC of the fortnight")
    right.grid(axis="y", color=GRID, lw=0.8)
    _foot(figure, f"MovieLens-100k, one pass in the order of time; mean and range of {len(runs)} seeds")
    figure.savefig(path)


def _hashed(name: str, shared: float) -> str:
    return f"hashed, {name if 'memory' in name else name + ' of it'}\n{shared:.0%} of ids share"


def _figure(columns: int = 1) -> Any:
    figure = Figure(figsize=(9, 5.2 if columns == 1 else 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, gridspec_kw={"width_ratios": [1, 1.15]} if columns == 2 else None)
    for one in axes if columns == 2 else [axes]:
        one.set_axisbelow(True)
        one.tick_params(length=0, colors=INK, labelsize=9)
        one.xaxis.label.set(color=INK, fontsize=9.5)
        one.yaxis.label.set(color=INK, fontsize=9.5)
        for side in ("top", "right", "left"):
            one.spines[side].set_visible(False)
        one.spines["bottom"].set_color("#bbbbc6")
    return figure, axes


def _label(axes: Any, x: float, y: float, text: str, color: str) -> None:
    axes.annotate(
        text,
        (x, y),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color=color,
        annotation_clip=False,
    )


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=12.5, fontweight="bold", color=INK)


def _foot(figure: Any, text: str) -> None:
    figure.supxlabel(f"{text}; drawn by examples/movielens.py", fontsize=8, color=MUTED, x=0.01, ha="left")
