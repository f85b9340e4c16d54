"""GAUC and NDCG@k: how well the samples of each group, such as a user's, are ranked."""

from __future__ import annotations

import math

import numpy as np
import torch

from shoal.comm.ranks.ranks import Ranks


def group_aucs(groups: np.ndarray, scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(AUC, samples) of each group that has positives and negatives; ties count half."""
    if not len(groups):
        return np.empty(0), np.empty(0, np.int64)
    order = np.lexsort((scores, groups))
    groups, scores, positive = groups[order], scores[order], labels[order] > 0.5
    starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
    which = np.cumsum(np.r_[0, groups[1:] != groups[:-1]])
    ties = np.cumsum(np.r_[0, (groups[1:] != groups[:-1]) | (scores[1:] != scores[:-1])])
    place = np.arange(len(groups))
    mean_place = np.bincount(ties, place)[ties] / np.bincount(ties)[ties]
    within = mean_place - starts[which] + 1  # the mean rank of equal scores
    samples, positives = np.bincount(which), np.bincount(which, positive)
    ranks = np.bincount(which, np.where(positive, within, 0.0))
    pairs = positives * (samples - positives)
    both = pairs > 0
    aucs = (ranks[both] - positives[both] * (positives[both] + 1) / 2) / pairs[both]
    return aucs, samples[both]


def gauc(groups: np.ndarray, scores: np.ndarray, labels: np.ndarray) -> float:
    """The mean of the groups' AUCs, weighted by their samples; groups with only one class are ignored.

    >>> gauc(np.array([1, 1, 2, 2, 3]), np.array([0.1, 0.9, 0.8, 0.2, 0.5]), np.array([0, 1, 0, 1, 1]))
    0.5
    """
    aucs, samples = group_aucs(groups, scores, labels)
    return float(np.average(aucs, weights=samples)) if len(aucs) else math.nan


def group_ndcgs(groups: np.ndarray, scores: np.ndarray, labels: np.ndarray, k: int) -> np.ndarray:
    """NDCG@k of each group with a label above 0; among equal scores, the lower label is ranked first."""
    if not len(groups):
        return np.empty(0)
    found = _dcg(groups, np.lexsort((labels, -scores, groups)), labels, k)
    best = _dcg(groups, np.lexsort((-labels, groups)), labels, k)
    return found[best > 0] / best[best > 0]


def ndcg(groups: np.ndarray, scores: np.ndarray, labels: np.ndarray, k: int) -> float:
    """The mean of the groups' NDCG@k.

    >>> round(ndcg(np.array([1, 1, 1]), np.array([0.9, 0.5, 0.1]), np.array([0, 1, 0]), 2), 4)
    0.6309
    """
    each = group_ndcgs(groups, scores, labels, k)
    return float(each.mean()) if len(each) else math.nan


def _dcg(groups: np.ndarray, order: np.ndarray, labels: np.ndarray, k: int) -> np.ndarray:
    groups = groups[order]
    new = np.r_[True, groups[1:] != groups[:-1]]
    which = np.cumsum(new) - 1
    place = np.arange(len(groups)) - np.flatnonzero(new)[which]
    gains = np.where(place < k, labels[order] / np.log2(place + 2.0), 0.0)
    return np.bincount(which, gains)


class GroupedPredictions:
    """Stores predictions with their groups, in 20 bytes per sample."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, groups: np.ndarray, scores: np.ndarray, labels: np.ndarray) -> None:
        self._parts.append((groups.astype(np.int64), scores.astype(np.float32), labels.astype(np.float32)))

    def values(self, ranks: Ranks) -> dict[str, float]:
        """``gauc`` and ``ndcg`` over all ranks, which must call it together; each group is sent to one rank."""
        parts = list(zip(*self._parts, strict=True)) or [[np.empty(0, t)] for t in (np.int64, np.float32, np.float32)]
        groups, scores, labels = (np.concatenate(part) for part in parts)
        if ranks.world_size > 1:
            to = groups % ranks.world_size
            order = np.argsort(to, kind="stable")
            sizes = np.bincount(to, minlength=ranks.world_size).tolist()
            groups, scores, labels = (
                ranks.all_to_all(torch.from_numpy(each[order]), sizes).numpy() for each in (groups, scores, labels)
            )
        aucs, samples = group_aucs(groups, scores, labels)
        each = group_ndcgs(groups, scores, labels, self._k)
        sums = [float((aucs * samples).sum()), float(samples.sum()), float(each.sum()), float(len(each))]
        weighted, weight, gain, count = ranks.sum(torch.tensor(sums, dtype=torch.float64, device="cpu")).tolist()
        return {"gauc": weighted / weight if weight else math.nan, "ndcg": gain / count if count else math.nan}
