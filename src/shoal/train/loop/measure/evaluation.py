"""Evaluate a run on files that are not used for training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.background.ahead import ReadAhead
from shoal.comm.ranks.ranks import Ranks
from shoal.data.samples import Samples
from shoal.data.stream import Stream
from shoal.train.loop.measure.metrics import Metrics, buckets, merged, merged_counts
from shoal.train.loop.measure.ranking import GroupedPredictions
from shoal.train.loop.rows.rows import Rows


@torch.no_grad()
def evaluate(
    stream: Stream,
    model: nn.Module,
    rows: Rows,
    logits: Callable[[Samples], Tensor],
    ranks: Ranks,
    *,
    ahead: int,
    max_batches: int | None,
    group: int | None = None,
    ndcg_at: int = 10,
    log_odds: float = 0.0,
) -> dict[str, Any]:
    """AUC, PR-AUC, logloss, calibration (also by bucket) and samples over a stream; rows do not change.

    With ``group``, the index of a feature, also GAUC and NDCG by that feature. ``log_odds`` is added to each logit, if
    this data has another share of negatives than the training data. All ranks must call it together.
    """
    metrics, grouped = Metrics(1), GroupedPredictions(ndcg_at)
    model.eval(), rows.eval()
    try:
        with ReadAhead(stream, ahead) as batches:
            each, number = iter(batches), 0
            while number != max_batches:
                batch = next(each, None)
                if batch is None:
                    rows.join_without_samples(learn=False)
                else:
                    found, label = logits(batch.samples).cpu().numpy() + log_odds, batch.samples.label.numpy()
                    metrics.add(found, label)
                    if group is not None:
                        grouped.add(group_of(batch.samples, group), found, label)
                if not int(ranks.sum(torch.tensor([0 if batch is None else 1], device="cpu"))):
                    break
                number += 1
    finally:
        model.train(), rows.train()
    values = merged(metrics, ranks) | {"buckets": buckets(merged_counts(metrics, ranks))}
    return values | grouped.values(ranks) if group is not None else values


def group_of(samples: Samples, feature: int) -> np.ndarray:
    """The first id of a feature in each sample; -1 if there is none."""
    if samples.offsets is None:
        return samples.ids[:, feature].numpy()
    starts = samples.offsets[:-1].view(len(samples), -1)[:, feature].numpy()
    ends = samples.offsets[1:].view(len(samples), -1)[:, feature].numpy()
    groups = np.full(len(samples), -1, np.int64)
    some = ends > starts
    groups[some] = samples.ids.numpy()[starts[some]]
    return groups
