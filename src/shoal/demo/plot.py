"""The plot of the demo: AUC, and the numbers of ids and rows, over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.demo.run import Comparison
from shoal.errors import missing_extra

_INK, _GRID = "#2b2b33", "#e6e6ec"
_BEST, _OURS, _THEIRS, _SEEN = "#8a8a99", "#0b7a75", "#d1495b", "#8a8a99"


def draw(comparison: Comparison, path: Path) -> None:
    """Write the plot to ``path`` as PNG."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "cli") from None
    ours, theirs = comparison.results
    days = list(range(1, comparison.config.days + 1))
    figure = Figure(figsize=(9, 6.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # a separate canvas, without a window or global state
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [2.2, 1]})

    top.plot(days, comparison.best_auc, color=_BEST, lw=1.4, ls=(0, (4, 3)))
    top.plot(days, ours.auc, color=_OURS, lw=2.2)
    top.plot(days, theirs.auc, color=_THEIRS, lw=2.2)
    top.fill_between(days, theirs.auc, ours.auc, color=_OURS, alpha=0.10, lw=0)
    low = min(theirs.auc[min(2, len(days) - 1) :])
    top.set_ylim(low - 0.02, max(comparison.best_auc) + 0.012)
    _label(top, days, comparison.best_auc, "best reachable\n(true probabilities)", _BEST)
    _label(top, days, ours.auc, "shoal.HashTable", _OURS)
    _label(top, days, theirs.auc, "nn.EmbeddingBag, hashed\nto the same memory", _THEIRS)
    gap = (comparison.mean_auc(ours.auc) - comparison.mean_auc(theirs.auc)) * 100
    top.set_title(
        f"Sharing rows costs {gap:.1f} points of AUC at {ours.memory_bytes / 1e6:.1f} MB",
        loc="left",
        fontsize=13,
        fontweight="bold",
        color=_INK,
    )
    top.set_ylabel("AUC of the day, predicted before training")

    for values, color, text, va in (
        (comparison.ids, _SEEN, "distinct ids so far", "center"),
        (theirs.rows, _THEIRS, "rows of the hashed table", "bottom"),
        (ours.rows, _OURS, "rows of the HashTable\n(expired rows are reused)", "top"),
    ):
        bottom.plot(days, [value / 1000 for value in values], color=color, lw=1.8)
        _label(bottom, days, [value / 1000 for value in values], text, color, va)
    bottom.set_ylim(0, max(comparison.ids) / 1000 * 1.12)
    bottom.set_ylabel("thousands")
    bottom.set_xlabel("day of the stream")
    for axes in (top, bottom):
        axes.set_xlim(1, comparison.config.days)
        axes.grid(axis="y", color=_GRID, lw=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, colors=_INK, labelsize=9)
        axes.yaxis.label.set(color=_INK, fontsize=9.5)
        axes.xaxis.label.set(color=_INK, fontsize=9.5)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color("#bbbbc6")
    config = comparison.config
    figure.supxlabel(
        f"one DeepFM, {config.samples / 1e6:.1f} M samples, {comparison.ids[-1]:,} ids, seed {config.seed}; "
        "drawn by `shoal demo`",
        fontsize=8,
        color=_BEST,
        x=0.01,
        ha="left",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _label(axes: Any, days: list[int], values: list[float], text: str, color: str, va: str = "center") -> None:
    """Write the name of a line next to its end."""
    axes.annotate(
        text,
        (days[-1], values[-1]),
        xytext=(7, 0),
        textcoords="offset points",
        va=va,
        fontsize=9,
        color=color,
        annotation_clip=False,
    )
