"""Who asks whom for which ids: worked out by `find`, kept in the tensors of a `Found`, used until the update."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.ops.reorder import fused_reorder_by_indices
from shoal.table.protocol import Features, Found

_DTYPES = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.int16, torch.int8, torch.float64)


class Dealt(NamedTuple):
    """The ids of a batch, each one once, dealt out to the ranks that own them."""

    where: Tensor
    """int32 ``[N]``: where the row of each id starts in the floats of all ``ids``; -1 for padding."""
    ids: Tensor
    """int64, rank after rank, and for each rank table after table."""
    sizes: Tensor
    """int32 ``[W * K]``: the ids for each rank and table."""


def deal_out(ids: Tensor, counts: Sequence[int], features: Features, tables: int, ranks: int, dim: int) -> Dealt:
    """Ids of features, feature 0 first, by rank (``id mod W``, rounding down) and table."""
    if features.padding is not None:
        keep = ids != features.padding
        kept = [int(part.sum()) for part in keep.split(list(counts))]
        dealt = deal_out(ids[keep], kept, Features(features.tables), tables, ranks, dim)
        where = dealt.where.new_full(ids.shape, -1)
        where[keep] = dealt.where
        return dealt._replace(where=where)
    begins = [0, *itertools.accumulate(counts)]
    of_table = [[f for f, table in enumerate(features.tables) if table == k] for k in range(tables)]
    lists = []
    for own in of_table:
        if own == list(range(own[0], own[-1] + 1)) if own else False:
            lists.append(ids[begins[own[0]] : begins[own[-1] + 1]])
        else:
            lists.append(torch.cat([ids[:0], *(ids[begins[f] : begins[f + 1]] for f in own)]))
    fused = fused_reorder_by_indices(lists, ranks, [dim] * tables, rank0_empty_shard=False)
    where = fused.fused_embedding_offsets
    order = [f for own in of_table for f in own]
    if order != sorted(order):
        back = dict(zip(order, where.split([counts[f] for f in order]), strict=True))
        where = torch.cat([back[f] for f in range(len(counts))])
    return Dealt(where, fused.output, fused.sharded_slot_sizes)


@dataclass(frozen=True)
class Plan:
    """What a `Found` says in plain numbers, and what came with it."""

    number: int
    """Of the find."""
    asked: list[int]
    """``[W * K]``: the distinct ids that this rank asks of each rank and table."""
    served: list[int]
    """``[W * K]``: those that each rank asks of this one."""
    came: Tensor
    """int64: the ids asked of this rank, rank after rank and table after table."""
    kept: list[Tensor]
    """What the local groups keep of them."""

    def per_rank(self, counts: Sequence[int], ranks: int) -> list[int]:
        k = len(counts) // ranks
        return [sum(counts[r * k : (r + 1) * k]) for r in range(ranks)]

    def packed(self) -> Tensor:
        """As one tensor."""
        about = [self.number, len(self.asked), *self.asked, *self.served, self.came.numel(), len(self.kept)]
        raw = []
        for tensor in self.kept:
            about += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
            flat = tensor.contiguous().view(-1).view(torch.uint8)
            raw.append(torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(torch.int64))
        head = torch.tensor([len(about), *about], dtype=torch.int64, device=self.came.device)
        return torch.cat([head, self.came, *raw])

    @staticmethod
    def of(found: Found, blocks: int) -> Plan:
        """What `packed` made."""
        came = found.came
        length = int(came[0]) if came.numel() else 0
        if not 4 + 2 * blocks < length + 1 <= came.numel():
            raise ConfigError("found must be what find of this group returned")
        about = iter(came[1 : 1 + length].tolist())
        number, size = next(about), next(about)
        if size != blocks:
            raise ConfigError(f"found must be of a group with {blocks} blocks of ids, got {size}")
        asked, served = [next(about) for _ in range(size)], [next(about) for _ in range(size)]
        n, tensors = next(about), next(about)
        at = 1 + length + n
        kept = []
        for _ in range(tensors):
            dtype = _DTYPES[next(about)]
            shape = [next(about) for _ in range(next(about))]
            numel = math.prod(shape)
            words = -(-numel * dtype.itemsize // 8)
            raw = came[at : at + words].view(torch.uint8)[: numel * dtype.itemsize]
            kept.append(raw.view(dtype).view(shape))
            at += words
        return Plan(number, asked, served, came[1 + length : 1 + length + n], kept)
