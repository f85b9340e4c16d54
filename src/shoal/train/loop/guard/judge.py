"""Decide whether a model may be pushed: a pure function of measurements that returns its reason."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.train.loop.guard.config import GuardConfig
from shoal.train.loop.measure.metrics import exact_auc


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """The measurements that the guard judges."""

    learnt: int = 0
    """Samples that the run has trained on."""
    samples: int = 0
    """Samples in the window."""
    auc: float = float("nan")
    """AUC of the window; NaN if it has only one class."""
    calibration: float = float("nan")
    """Mean prediction over mean label: infinite without positives, NaN without samples."""
    changed_rows: float | None = None
    """The share of all rows that changed since the last round; None if unknown."""


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
    """Why the model must not be pushed; "" if it may be.

    Everything is allowed until the run has trained on ``min_samples`` and the window is full. An unknown value (NaN,
    None) does not violate a limit. A window without positives does: its calibration is infinite.

    >>> judge(GuardConfig(min_auc=0.7), Measures(learnt=10**6, samples=20000, auc=0.52))
    'the AUC of the last 20,000 samples is 0.5200, below min_auc = 0.7'
    """
    if found.learnt < limits.min_samples or found.samples < limits.window:
        return ""
    window = f"of the last {found.samples:,} samples"
    reasons = []
    if limits.min_auc is not None and found.auc < limits.min_auc:
        reasons.append(f"the AUC {window} is {found.auc:.4f}, below min_auc = {limits.min_auc:g}")
    if limits.calibration is not None:
        least, most = limits.calibration
        if found.calibration < least or found.calibration > most:
            reasons.append(
                f"the calibration {window} is {found.calibration:.3f}, outside of calibration = [{least:g}, {most:g}]"
            )
    share = found.changed_rows
    if limits.max_changed_rows is not None and share is not None and share > limits.max_changed_rows:
        reasons.append(
            f"{share:.1%} of all rows changed since the last round, more than max_changed_rows = "
            f"{limits.max_changed_rows:g}"
        )
    return "; ".join(reasons)
