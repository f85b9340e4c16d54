"""How evenly ids and rows spread over ranks, written in the form that TensorBoard's writer takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.comm.flags import FLAGS
from shoal.table.learning_rate import get_global_step


class Writer(Protocol):
    """``torch.utils.tensorboard.SummaryWriter`` is one."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> Any: ...

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> Any: ...


flags = FLAGS  # enable_alltoall_metrics is off by default: the backward numbers take one more exchange per step
_writer: Writer | None = None


def set_alltoall_writer(writer: Writer | None) -> None:
    """Where the metrics go; nowhere at first."""
    global _writer
    _writer = writer


def _scalar(name: str, value: Any) -> None:
    if _writer is not None:
        _writer.add_scalar(name, value, get_global_step())


def _histogram(name: str, values: Tensor) -> None:
    if _writer is not None:
        _writer.add_histogram(name, values, get_global_step())


def forward_metrics(
    slots: Sequence[str], sizes: Tensor, shard_sizes: Tensor, embedding_splits: Tensor, all_fids: int
) -> None:
    """Of one lookup; ``sizes`` is ``[N, K]``."""
    slot = flags.enable_alltoall_metrics_for_slot
    if slot is not None and slot in slots:
        _scalar(f"{slot}_size", int(sizes[:, list(slots).index(slot)].sum()))
    _scalar("all_fids_size", all_fids)
    _histogram("shard_sizes", shard_sizes)
    _histogram("sharded_slot_sizes", sizes.reshape(-1))
    _histogram("fused_embedding_splits", embedding_splits)


def backward_metrics(backend: Any, shard_sizes: Tensor, recv_emb_splits: Tensor, grad_splits: Tensor) -> None:
    """Of one update, over all ranks; element 0 of the vectors is left out, so indices are relative to the rest."""
    ids, rows = shard_sizes[1:], recv_emb_splits[1:]
    id_totals = backend.gather_totals(int(ids.sum()))
    emb_totals = backend.gather_totals(int(rows.sum()))
    _histogram("Alltoall_id_dist", torch.tensor(id_totals, device="cpu"))
    _histogram("Alltoall_emb_dist", torch.tensor(emb_totals, device="cpu"))
    if backend.rank != 0:
        return
    _spread("Alltoall_id", ids)
    _histogram("Alltoall_grad_splits", grad_splits)
    _scalar("Alltoall_grad_sizes", int(grad_splits.sum()))
    _spread("Alltoall_emb", rows)


def _spread(name: str, splits: Tensor) -> None:
    _histogram(f"{name}_splits", splits)
    _scalar(f"{name}_sizes", int(splits.sum()))
    if splits.numel():
        _scalar(f"{name}_min_idx", int(splits.argmin()))
        _scalar(f"{name}_max_idx", int(splits.argmax()))
        _scalar(f"{name}_min_size", int(splits.min()))
        _scalar(f"{name}_max_size", int(splits.max()))
