"""The ids of a batch in the order in which they are sent to the ranks that hold the tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.ops.reorder import fused_reorder_by_indices
from shoal.table.protocol import Features


class Lists(NamedTuple):
    """The ids of a batch by table."""

    ids: Tensor
    """Table after table, in the given order."""
    counts: list[int]
    """``[K]``, by table number."""
    where: Tensor
    """int32 ``[N]``: where each id's row starts in the floats of all rows; empty if bags are requested."""
    lengths: Tensor | None
    """``[F, B]``: the number of ids per bag."""
    bags: int
    """The number of bags per feature; -1 if rows are requested."""


def distinct_lists(ids: Tensor, sizes: list[int], features: Features, tables: Sequence[int], dim: int) -> Lists:
    """The distinct ids of each table, for rows.

    ``sizes`` has the number of ids of each feature, ``tables`` the numbers of all tables in the order of sending.
    """
    n = len(features.tables)
    keep = None
    if features.padding is not None:
        keep = ids != features.padding
        sizes = [int(part.sum()) for part in keep.split(sizes)]
        ids = ids[keep]
    begins = [0, *itertools.accumulate(sizes)]
    of_table = [[f for f in range(n) if features.tables[f] == k] for k in tables]
    lists = [torch.cat([ids[:0], *(ids[begins[f] : begins[f + 1]] for f in own)]) for own in of_table]
    fused = fused_reorder_by_indices(lists, 1, [dim] * len(lists), rank0_empty_shard=False)
    where = fused.fused_embedding_offsets
    order = [f for own in of_table for f in own]
    if order != sorted(order):
        back = dict(zip(order, where.split([sizes[f] for f in order]), strict=True))
        where = torch.cat([back[f] for f in range(n)])
    if keep is not None:
        every = where.new_full(keep.shape, -1)
        every[keep] = where
        where = every
    found = [0] * len(tables)
    for k, size in zip(tables, fused.sharded_slot_sizes.tolist(), strict=True):
        found[k] = size
    return Lists(fused.output, found, where, None, -1)


def bag_lists(
    ids: Tensor, offsets: Tensor, sizes: list[int], features: Features, tables: Sequence[int], named: str
) -> Lists:
    """All ids of each table, for bags at ``offsets``; see `distinct_lists`. ``named`` is for errors."""
    n = len(features.tables)
    bags = (offsets.shape[0] - 1) // n
    lengths = offsets.diff().view(n, bags)
    if int(offsets[0]) != 0 or (lengths.numel() and int(lengths.min()) < 0):
        raise ConfigError(f"tables {named}: offsets of bags must rise from 0 to the number of ids")
    if features.padding is not None:
        keep = ids != features.padding
        at = torch.cat([offsets.new_zeros(1), keep.cumsum(0)])[offsets]
        ids, lengths = ids[keep], at.diff().view(n, bags)
        sizes = lengths.sum(1).tolist()
    begins = [0, *itertools.accumulate(sizes)]
    order = [f for k in tables for f in range(n) if features.tables[f] == k]
    if order != sorted(order):
        ids = torch.cat([ids[begins[f] : begins[f + 1]] for f in order])
    found = [0] * len(tables)
    for f, size in enumerate(sizes):
        found[features.tables[f]] += size
    return Lists(ids, found, torch.empty(0, dtype=torch.int32, device=ids.device), lengths, bags)
