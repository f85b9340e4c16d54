"""The ids of a batch in the order in which they are sent to the ranks that hold the tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.sharded.all_to_all.plan import deal_out
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
    place = {k: i for i, k in enumerate(tables)}
    own = Features(tuple(place[k] for k in features.tables), padding=features.padding)
    dealt = deal_out(ids.contiguous(), sizes, own, len(tables), 1, dim)
    counts = dealt.sizes.tolist()
    return Lists(dealt.ids, [counts[place[k]] for k in range(len(tables))], dealt.where, None, -1)


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
