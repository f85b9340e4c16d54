"""Evaluation of a run on files that are never learnt from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shoal.comm.ranks.ranks import Ranks
from shoal.data.prefetch import Prefetch
from shoal.data.samples import Samples
from shoal.data.stream import Stream
from shoal.train.loop.metrics import Metrics, merged
from shoal.train.loop.tables import Rows


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
) -> dict[str, float]:
    """AUC, logloss, calibration and samples over a stream; no row is made or changed. All ranks call it together."""
    metrics = Metrics(1)
    model.eval(), rows.eval()
    try:
        with Prefetch(stream, ahead) as batches:
            each, number = iter(batches), 0
            while number != max_batches:
                batch = next(each, None)
                if batch is None:
                    rows.nothing(learn=False)
                else:
                    metrics.add(logits(batch.samples).cpu().numpy(), batch.samples.label.numpy())
                if not int(ranks.sum(torch.tensor([0 if batch is None else 1], device="cpu"))):
                    break
                number += 1
    finally:
        model.train(), rows.train()
    return merged(metrics, ranks)
