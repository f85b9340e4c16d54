"""Expand batches whose keys differ in their number of bags (TorchRec's variable batch) to one bag per sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError


def has_own_strides(ids: Any) -> bool:
    """Whether the keys of an object like a KeyedJaggedTensor differ in their number of bags."""
    own = getattr(ids, "variable_stride_per_key", None)
    return bool(own()) if callable(own) else False


def with_all_bags(
    ids: Any, values: Tensor, offsets: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return values, offsets and weights with one bag per sample, chosen by ``inverse_indices``.

    A bag that several samples share is looked up once for each of them.
    """
    strides = dict(zip(ids.keys(), ids.stride_per_key(), strict=True))
    inverse = ids.inverse_indices_or_none()
    if inverse is None:
        raise ConfigError(
            f"all keys must have the same number of bags, got {strides}; give the batch inverse_indices, which name "
            "the bag of each sample"
        )
    named, samples = inverse
    row_of = {name: row for row, name in enumerate(named)}
    picked, begin = [], 0
    for key, stride in strides.items():
        picked.append(samples[row_of[key]].to(offsets.device).long() + begin)
        begin += stride
    bags = torch.cat(picked)
    lengths, starts = offsets.diff()[bags], offsets[bags]
    ends = lengths.cumsum(0)
    at = torch.repeat_interleave(starts - (ends - lengths), lengths)
    at += torch.arange(at.shape[0], device=at.device)
    return values[at], torch.cat([ends.new_zeros(1), ends]), None if weights is None else weights[at]
