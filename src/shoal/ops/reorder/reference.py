"""The reorder ops in plain torch."""

import torch
from torch import Tensor

from shoal.errors import ConfigError


def first_occurrences(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the distinct keys in order of first occurrence, and each key's rank in that order."""
    distinct, inverse = torch.unique(keys, return_inverse=True)
    at = torch.arange(keys.shape[0], device=keys.device)
    first = torch.full_like(distinct, keys.shape[0], dtype=torch.int64).scatter_reduce(0, inverse, at, "amin")
    order = first.argsort()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.shape[0], device=keys.device)
    return first[order], rank[inverse]


def reorder_by_indices(keys: Tensor, shard_ids: Tensor, num_of_shards: int) -> tuple[Tensor, Tensor]:
    bad = (shard_ids < 0) | (shard_ids >= num_of_shards)
    if bool(bad.any()):
        raise ConfigError(
            f"reorder_by_indices: a shard id must be in [0, {num_of_shards}), got {int(shard_ids[bad][0])}"
        )
    first = first_occurrences(keys)[0].flip(0)
    shards = shard_ids[first]
    order = first[shards.argsort(stable=True)]
    return order, torch.bincount(shards, minlength=num_of_shards).int()


def fused_reorder_by_indices(
    inputs: list[Tensor], num_of_shards: int, dim_sizes: list[int], empty: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tables = len(inputs)
    kept, ranks, shards = [], [], []
    for ids in inputs:
        first, rank = first_occurrences(ids)
        kept.append(ids[first])
        ranks.append(rank)
        shards.append(kept[-1].remainder(num_of_shards - empty) + empty)
    # Distinct ids of all tables, sorted by (shard, table); the sort is stable, so first occurrences stay in order.
    table = torch.cat([torch.full_like(ids, m) for m, ids in enumerate(kept)])
    slot = torch.cat(shards) * tables + table
    order = slot.argsort(stable=True)
    widths = torch.tensor(dim_sizes, dtype=torch.int64, device=order.device)[table[order]]
    if int(widths.sum()) > 2**31 - 1:
        raise ConfigError(
            "fused_reorder_by_indices: the embeddings must have at most 2^31 - 1 floats in all; spread the tables over "
            "more calls"
        )
    offset = torch.empty_like(order)
    offset[order] = widths.cumsum(0) - widths
    slot_sizes = torch.bincount(slot, minlength=num_of_shards * tables)
    start = 0
    offsets = []
    for ids, rank in zip(kept, ranks, strict=True):
        offsets.append(offset[start : start + ids.shape[0]][rank])
        start += ids.shape[0]
    return (
        torch.cat(kept)[order],
        slot_sizes.view(num_of_shards, tables).sum(1).int(),
        slot_sizes.int(),
        torch.tensor([ids.shape[0] for ids in inputs], dtype=torch.int32, device=order.device),
        torch.cat(offsets).int(),
    )
