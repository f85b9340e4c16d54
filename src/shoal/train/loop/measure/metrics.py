"""AUC, logloss and calibration of a stream of predictions, each made before training on its sample."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shoal.comm.ranks.ranks import Ranks

BINS = 1 << 14


class Metrics:
    """Counts predictions in bins of their logit, from -16 to 16, and keeps the last ``window`` predictions exactly.

    `auc` covers all predictions and is off by about 1e-4, at most by half of the pairs that share a bin; `window_auc`
    is exact. Calibration is predicted over actual positives, so 1 is ideal.
    """

    def __init__(self, window: int = 100_000) -> None:
        self.window = window
        self.counts = np.zeros((2, BINS), dtype=np.int64)
        self.sums = np.zeros(3)  # logloss, predicted, happened
        self._recent: deque[tuple[np.ndarray, np.ndarray]] = deque()
        self._recent_rows = 0

    def add(self, logits: np.ndarray, labels: np.ndarray) -> None:
        """Add predictions, float32 ``[n]``, and their labels, ``[n]``; labels above 0.5 are positive."""
        n = len(logits)
        if not n:
            return
        wide = logits.astype(np.float64)
        positive = labels > 0.5
        bins = ((np.clip(wide, -15.999, 15.999) + 16) * (BINS / 32)).astype(np.int64)
        both = np.bincount(bins + BINS * positive, minlength=2 * BINS)
        self.counts += both.reshape(2, BINS)
        loss = np.maximum(wide, 0) - wide * labels + np.log1p(np.exp(-np.abs(wide)))
        self.sums += (loss.sum(), (1 / (1 + np.exp(np.minimum(-wide, 700)))).sum(), labels.sum(dtype=np.float64))
        self._recent.append((logits.copy(), positive))
        self._recent_rows += n
        while self._recent_rows - len(self._recent[0][0]) >= self.window:
            self._recent_rows -= len(self._recent.popleft()[0])

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    def auc(self) -> float:
        """The AUC of all predictions, from their bins."""
        return binned_auc(self.counts)

    def values(self) -> dict[str, float]:
        """All metrics by name; NaN for those without data."""
        rows = self.rows
        logloss, predicted, happened = self.sums.tolist()
        return {
            "auc": self.auc(),
            "window_auc": self.window_auc(),
            "logloss": logloss / rows if rows else math.nan,
            "calibration": predicted / happened if happened else math.nan,
        }

    def window_auc(self) -> float:
        """The exact AUC of the last predictions."""
        return exact_auc(*self.recent(self._recent_rows)) if self._recent else math.nan

    def recent(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """(logits, whether positive) of at most ``most`` of the newest predictions, oldest first."""
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        left = most
        for logits, positive in reversed(self._recent):
            if left <= 0:
                break
            parts.append((logits[-left:], positive[-left:]))
            left -= len(logits)
        if not parts:
            return np.empty(0, np.float32), np.empty(0, bool)
        scores, labels = (np.concatenate(part[::-1]) for part in zip(*parts, strict=True))
        return scores, labels

    def state(self) -> dict[str, np.ndarray]:
        """The state as arrays, for `load`."""
        recent = zip(*self._recent, strict=True) if self._recent else ((np.empty(0, np.float32),), (np.empty(0, bool),))
        scores, labels = (np.concatenate(part) for part in recent)
        sizes = np.array([len(part) for part, _ in self._recent], dtype=np.int64)
        return {
            "counts": self.counts, "sums": self.sums, "scores": scores.astype(np.float32),
            "labels": labels.astype(np.uint8), "sizes": sizes,
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        self.counts = np.array(state["counts"], dtype=np.int64)
        self.sums = np.array(state["sums"], dtype=np.float64)
        cuts = np.cumsum(state["sizes"])[:-1]
        scores, labels = np.split(state["scores"], cuts), np.split(state["labels"].astype(bool), cuts)
        self._recent = deque(zip(scores, labels, strict=True)) if len(state["sizes"]) else deque()
        self._recent_rows = len(state["scores"])


def added(states: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The states of several ranks combined into one; the window has the predictions of all ranks."""
    sums = {name: np.sum([one[name] for one in states], axis=0) for name in ("counts", "sums")}
    return sums | {name: np.concatenate([one[name] for one in states]) for name in ("scores", "labels", "sizes")}


def merged(metrics: Metrics, ranks: Ranks) -> dict[str, float]:
    """AUC, logloss, calibration and samples of all ranks, which must call it together."""
    counts, sums = metrics.counts, metrics.sums
    if ranks.world_size > 1:
        counts = ranks.sum(torch.from_numpy(counts.copy())).numpy()
        sums = ranks.sum(torch.from_numpy(sums.copy())).numpy()
    rows = int(counts.sum())
    return {
        "auc": binned_auc(counts),
        "pr_auc": binned_pr_auc(counts),
        "logloss": float(sums[0] / rows) if rows else math.nan,
        "calibration": float(sums[1] / sums[2]) if sums[2] else math.nan,
        "samples": rows,
    }


def merged_counts(metrics: Metrics, ranks: Ranks) -> np.ndarray:
    """The counts of all ranks, which must call it together."""
    return ranks.sum(torch.from_numpy(metrics.counts.copy())).numpy()


def binned_pr_auc(counts: np.ndarray) -> float:
    """Average precision, the area under the precision-recall curve, from counts ``[2, bins]``: negatives, positives."""
    negative, positive = counts[:, ::-1].astype(np.float64)
    found, all_found = np.cumsum(positive), np.cumsum(positive + negative)
    if not found[-1]:
        return math.nan
    precision = np.divide(found, all_found, out=np.zeros_like(found), where=all_found > 0)
    return float((precision * positive).sum() / found[-1])


def buckets(counts: np.ndarray, number: int = 10) -> list[dict[str, float]]:
    """Calibration by bucket: samples sorted by prediction, in ``number`` buckets of about equal size.

    Each bucket has its number of ``samples``, the mean prediction ``predicted`` (to 0.1 %, because predictions are
    binned), and the share of positives ``happened``. Sizes can differ if many predictions are equal.
    """
    both = counts.sum(0)
    total = int(both.sum())
    if not total:
        return []
    centre = (np.arange(counts.shape[1]) + 0.5) * (32 / counts.shape[1]) - 16
    predicted = both / (1 + np.exp(-centre))
    upto = np.cumsum(both)
    edges = [int(np.searchsorted(upto, total * (i + 1) / number)) + 1 for i in range(number - 1)]
    made = []
    for begin, end in zip([0, *edges], [*edges, counts.shape[1]], strict=True):
        samples = int(both[begin:end].sum())
        if samples:
            happened = float(counts[1, begin:end].sum()) / samples
            made.append(
                {"samples": samples, "predicted": float(predicted[begin:end].sum()) / samples, "happened": happened}
            )
    return made


def exact_auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """The chance that a positive scores above a negative; ties count half. NaN if there is only one class.

    >>> exact_auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1]))
    0.875
    """
    positive = np.asarray(labels) > 0.5
    values, inverse = np.unique(scores, return_inverse=True)
    counts = np.stack([np.bincount(inverse[~positive], minlength=len(values)),
                       np.bincount(inverse[positive], minlength=len(values))])  # fmt: skip
    return binned_auc(counts)


def binned_auc(counts: np.ndarray) -> float:
    """The AUC from counts ``[2, bins]``: negatives, positives."""
    negative, positive = counts.astype(np.float64)
    pairs = negative.sum() * positive.sum()
    if not pairs:
        return math.nan
    below = np.cumsum(negative) - negative
    return float(((below + negative / 2) * positive).sum() / pairs)
