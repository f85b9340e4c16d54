"""Helpers on row splits: `fused_value_rowids` and `normalize_merged_split`."""

from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import ConfigError
from shoal.ops import checks
from shoal.ops._op import Op
from shoal.ragged import Ragged


def fused_value_rowids(rt: Ragged) -> Tensor:
    """The row of each flat position of a ragged tensor, int64; cached on ``rt``.

    >>> fused_value_rowids(Ragged.from_lists([[], [7, 8], [9]])).tolist()
    [1, 1, 2]
    """
    if not isinstance(rt, Ragged):
        raise ConfigError(f"fused_value_rowids: rt must be a shoal.Ragged, got {type(rt).__name__}")
    if rt._row_ids is not None:
        return rt._row_ids
    length = rt.values.nrows() if isinstance(rt.values, Ragged) else rt.values.shape[0]
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # a training step may use the same ragged tensor later
            ids = _row_ids(rt.row_splits, length)
    else:
        ids = _row_ids(rt.row_splits, length)
    rt._row_ids = ids
    return ids


def normalize_merged_split(row_split: Any, row_split_size: Any) -> Tensor:
    """The row splits of several ragged tensors as those of one.

    Args:
        row_split: int64 ``[n]``: the concatenated row splits, each starting at 0.
        row_split_size: int32 ``[k]``: the length of each, at least 1; they add up to ``n``.

    Returns:
        int64 ``[n + 1 - k]``.

    >>> normalize_merged_split([0, 1, 4, 0, 2], [3, 2]).tolist()
    [0, 1, 4, 6]
    """
    op = "normalize_merged_split"
    return _normalize(checks.vector(row_split, op, "row_split"), checks.vector(row_split_size, op, "row_split_size"))


def row_ids_reference(row_splits: Tensor, length: int) -> Tensor:
    """`fused_value_rowids` in plain torch."""
    return torch.arange(row_splits.shape[0] - 1, device=row_splits.device).repeat_interleave(row_splits.diff())


def normalize_merged_split_reference(row_split: Tensor, row_split_size: Tensor) -> Tensor:
    """`normalize_merged_split` in plain torch."""
    sizes = row_split_size.tolist()
    if not sizes or min(sizes) < 1 or sum(sizes) != row_split.numel():
        raise ConfigError(
            f"normalize_merged_split: row_split_size must be positive numbers that add up to {row_split.numel()}, "
            f"got {sizes}"
        )
    pieces, base = [], 0
    for i, piece in enumerate(row_split.split(sizes)):
        pieces.append(piece[min(i, 1) :] + base)
        base += int(piece[-1])
    return torch.cat(pieces)


def _row_ids_cpu(row_splits: Tensor, length: int) -> Tensor:
    row_splits = row_splits.contiguous()
    out = row_splits.new_empty(length)
    _core.row_ids(row_splits.data_ptr(), row_splits.numel() - 1, length, out.data_ptr())
    return out


def _normalize_cpu(row_split: Tensor, row_split_size: Tensor) -> Tensor:
    row_split, sizes = row_split.contiguous(), row_split_size.contiguous()
    # With too many sizes the kernel raises before it writes.
    out = row_split.new_empty(max(0, row_split.numel() + 1 - sizes.numel()))
    _core.normalize_merged_split(
        row_split.data_ptr(), row_split.numel(), sizes.data_ptr(), sizes.numel(), out.data_ptr()
    )
    return out


_row_ids = Op(
    "value_rowids(Tensor row_splits, SymInt length) -> Tensor",
    cpu=_row_ids_cpu,
    reference=row_ids_reference,
    cuda="ragged:row_ids",
    fake=lambda row_splits, length: row_splits.new_empty(length),
)
_normalize = Op(
    "normalize_merged_split(Tensor row_split, Tensor row_split_size) -> Tensor",
    cpu=_normalize_cpu,
    reference=normalize_merged_split_reference,
    cuda="ragged:normalize_merged_split",
    fake=lambda row_split, row_split_size: row_split.new_empty(row_split.shape[0] + 1 - row_split_size.shape[0]),
)
