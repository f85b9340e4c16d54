"""Whether what a run has learnt may be pushed: a pure function of what was measured, which gives its reason."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.train.loop.guard.config import GuardConfig
from shoal.train.loop.measure.metrics import exact_auc


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What the guard looks at."""

    learnt: int = 0
    """Samples that the run has learnt."""
    samples: int = 0
    """In the window."""
    auc: float = float("nan")
    """NaN where the window has one class alone."""
    calibration: float = float("nan")
    """Mean prediction over mean label: infinite where nothing happened, NaN without samples."""
    changed_rows: float | None = None
    """The share of all rows that changed since the last round; None where that is not known."""


def measure(learnt: int, logits: np.ndarray, labels: np.ndarray, changed_rows: float | None) -> Measures:
    """The measures of a window of predictions."""
    if not len(logits):
        return Measures(learnt=learnt, changed_rows=changed_rows)
    predicted = float((1 / (1 + np.exp(-np.clip(logits.astype(np.float64), -700, 700)))).sum())
    happened = float(labels.sum())
    return Measures(
        learnt=learnt,
        samples=len(logits),
        auc=exact_auc(logits, labels),
        calibration=predicted / happened if happened else float("inf"),
        changed_rows=changed_rows,
    )


def judge(limits: GuardConfig, found: Measures) -> str:
    """Why this must not be pushed; "" where it may be.

    Before ``min_samples`` were learnt and the window is full nothing is judged. A value that is not known (NaN, None)
    trips no limit, except that of a window without a single positive, whose calibration is infinite.

    >>> judge(GuardConfig(min_auc=0.7), Measures(learnt=10**6, samples=20000, auc=0.52))
    'the AUC of the last 20,000 samples is 0.5200, below min_auc = 0.7'
    """
    if found.learnt < limits.min_samples or found.samples < limits.window:
        return ""
    of = f"of the last {found.samples:,} samples"
    reasons = []
    if limits.min_auc is not None and found.auc < limits.min_auc:
        reasons.append(f"the AUC {of} is {found.auc:.4f}, below min_auc = {limits.min_auc:g}")
    if limits.calibration is not None:
        least, most = limits.calibration
        if found.calibration < least or found.calibration > most:
            reasons.append(
                f"the calibration {of} is {found.calibration:.3f}, outside of calibration = [{least:g}, {most:g}]"
            )
    share = found.changed_rows
    if limits.max_changed_rows is not None and share is not None and share > limits.max_changed_rows:
        reasons.append(
            f"{share:.1%} of all rows changed since the last round, more than max_changed_rows = "
            f"{limits.max_changed_rows:g}"
        )
    return "; ".join(reasons)
