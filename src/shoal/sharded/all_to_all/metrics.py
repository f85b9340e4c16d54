"""Metrics of how evenly ids and rows are spread over ranks, written to the process's summary writer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.launch.flags import FLAGS
from shoal.sharded.summary import histogram, scalar, set_summary_writer

flags = FLAGS  # enable_alltoall_metrics is off by default: the backward numbers take one more exchange per step
set_alltoall_writer = set_summary_writer


def forward_metrics(
    slots: Sequence[str], sizes: Tensor, shard_sizes: Tensor, embedding_splits: Tensor, all_fids: int, step: int
) -> None:
    """Write the metrics of one lookup.

    Args:
        sizes: ``[N, K]``, the distinct ids of each slot that went to each rank.
        shard_sizes: ``[N]``, the same over all slots.
        embedding_splits: ``[N]``, the floats that this rank served to each rank.
        all_fids: the distinct ids that this rank requested.
        step: the step of every point.
    """
    slot = flags.enable_alltoall_metrics_for_slot
    if slot is not None and slot in slots:
        scalar(f"{slot}_size", int(sizes[:, list(slots).index(slot)].sum()), step)
    scalar("all_fids_size", all_fids, step)
    histogram("shard_sizes", shard_sizes, step)
    histogram("sharded_slot_sizes", sizes.reshape(-1), step)
    histogram("fused_embedding_splits", embedding_splits, step)


def backward_metrics(
    backend: Any, shard_sizes: Tensor, recv_emb_splits: Tensor, embedding_splits: Tensor, step: int
) -> None:
    """Write the metrics of one update over all ranks, which must call it together.

    Element 0 of the vectors is left out, so indices are relative to the rest.

    Args:
        shard_sizes: ``[N]``, the distinct ids that this rank requested from each rank.
        recv_emb_splits: ``[N]``, the floats that this rank received in the lookup.
        embedding_splits: ``[N]``, the floats that this rank served and gets gradients for.
    """
    ids, rows, grads = shard_sizes[1:], recv_emb_splits[1:], embedding_splits[1:]
    id_totals = backend.gather_totals(int(ids.sum()))
    emb_totals = backend.gather_totals(int(rows.sum()))
    histogram("Alltoall_id_dist", torch.tensor(id_totals, device="cpu"), step)
    histogram("Alltoall_emb_dist", torch.tensor(emb_totals, device="cpu"), step)
    if backend.rank != 0:
        return
    _spread("Alltoall_id", ids, step)
    histogram("Alltoall_grad_splits", grads, step)
    scalar("Alltoall_grad_sizes", int(grads.sum()), step)
    _spread("Alltoall_emb", rows, step)


def _spread(name: str, splits: Tensor, step: int) -> None:
    histogram(f"{name}_splits", splits, step)
    scalar(f"{name}_sizes", int(splits.sum()), step)
    if splits.numel():
        scalar(f"{name}_min_idx", int(splits.argmin()), step)
        scalar(f"{name}_max_idx", int(splits.argmax()), step)
        scalar(f"{name}_min_size", int(splits.min()), step)
        scalar(f"{name}_max_size", int(splits.max()), step)
