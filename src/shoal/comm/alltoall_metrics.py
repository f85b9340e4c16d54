"""What the embedding exchange moves each step, as scalars and histograms (flag ``enable_alltoall_metrics``)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm import hvd_lib
from shoal.comm.flags import FLAGS


def write_alltoall_metrics(
    writer: Any,
    step: int,
    *,
    all_fids_size: int,
    shard_sizes: Sequence[int] | Tensor,
    sharded_slot_sizes: Sequence[int] | Tensor,
    fused_embedding_splits: Sequence[int] | Tensor,
    slot_sizes: Mapping[str, int] | None = None,
    splits: Mapping[str, Sequence[int] | Tensor] | None = None,
) -> None:
    """Writes one step to a TensorBoard-like ``writer`` (``add_scalar``, ``add_histogram``), if the flag is on.

    Args:
        slot_sizes: ids per slot; the one that ``enable_alltoall_metrics_for_slot`` names is written.
        splits: rows sent to each shard, under ``id``, ``emb`` and ``grad``. Their totals are gathered over the ranks (a
            collective: every rank calls this), the splits are written by rank 0; statistics leave out element 0.
    """
    if not FLAGS.enable_alltoall_metrics:
        return
    writer.add_scalar("all_fids_size", all_fids_size, step)
    writer.add_histogram("shard_sizes", _ints(shard_sizes), step)
    writer.add_histogram("sharded_slot_sizes", _ints(sharded_slot_sizes), step)
    writer.add_histogram("fused_embedding_splits", _ints(fused_embedding_splits), step)
    slot = FLAGS.enable_alltoall_metrics_for_slot
    if slot is not None and slot in (slot_sizes or {}):
        writer.add_scalar(f"{slot}_size", (slot_sizes or {})[slot], step)
    if hvd_lib.size() == 1 or not splits:
        return
    by_kind = {kind: _ints(rows) for kind, rows in splits.items()}
    for kind in ("id", "emb"):
        if kind in by_kind:
            writer.add_histogram(f"Alltoall_{kind}_dist", hvd_lib.allgather(by_kind[kind].sum().reshape(1)), step)
    if hvd_lib.rank() != 0:
        return
    for kind, rows in by_kind.items():
        writer.add_histogram(f"Alltoall_{kind}_splits", rows, step)
        writer.add_scalar(f"Alltoall_{kind}_sizes", int(rows.sum()), step)
        if kind != "grad" and len(rows) > 1:
            for what, at in (("min", int(rows[1:].argmin()) + 1), ("max", int(rows[1:].argmax()) + 1)):
                writer.add_scalar(f"Alltoall_{kind}_{what}_idx", at, step)
                writer.add_scalar(f"Alltoall_{kind}_{what}_size", int(rows[at]), step)


def _ints(values: Sequence[int] | Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int64).cpu()
