"""The ids that ranks request from each other: computed by `find`, kept in a `Found`'s tensors until the update."""

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
    """The distinct ids of a batch, grouped by the rank that owns them."""

    where: Tensor
    """int32 ``[N]``: where each id's row starts in the floats of all ``ids``; -1 for padding."""
    ids: Tensor
    """int64, ordered by rank and then by table."""
    sizes: Tensor
    """int32 ``[W * K]``: the number of ids for each rank and table."""


def deal_out(ids: Tensor, counts: Sequence[int], features: Features, tables: int, ranks: int, dim: int) -> Dealt:
    """Group the ids of features, feature 0 first, by rank (``id mod W``, rounding down) and table."""
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
        if own and own == list(range(own[0], own[-1] + 1)):
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
    """The unpacked contents of a `Found`."""

    number: int
    """The number of the find."""
    asked: list[int]
    """``[W * K]``: the number of distinct ids that this rank requests from each rank and table."""
    served: list[int]
    """``[W * K]``: the number that each rank requests from this one, by table."""
    came: Tensor
    """int64: the ids requested from this rank, ordered by rank and then by table."""
    kept: list[Tensor]
    """The tensors that the local groups keep for them."""

    def per_rank(self, counts: Sequence[int], ranks: int) -> list[int]:
        k = len(counts) // ranks
        return [sum(counts[r * k : (r + 1) * k]) for r in range(ranks)]

    def packed(self) -> Tensor:
        """This plan as one tensor."""
        return pack(self.number, [len(self.asked), *self.asked, *self.served], [self.came, *self.kept])

    @staticmethod
    def of(found: Found, blocks: int) -> Plan:
        """The inverse of `packed`."""
        number, values, tensors = unpack(found)
        if not values or values[0] != blocks or len(values) != 1 + 2 * blocks or not tensors:
            raise ConfigError(f"found must come from a group with {blocks} blocks of ids, got {values[:1]}")
        return Plan(number, values[1 : 1 + blocks], values[1 + blocks :], tensors[0], tensors[1:])


def pack(number: int, values: Sequence[int], tensors: Sequence[Tensor]) -> Tensor:
    """Pack a find's number, values and tensors into one int64 tensor, which autograd can keep as `Found.came`."""
    about, raw = [number, len(values), *values, len(tensors)], []
    for tensor in tensors:
        about += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        rest = -flat.numel() % 8
        raw.append((torch.nn.functional.pad(flat, (0, rest)) if rest else flat).view(torch.int64))
    device = tensors[0].device if tensors else "cpu"
    head = torch.tensor([len(about), *about], dtype=torch.int64, device=device)
    return torch.cat([head, *raw])


def unpack(found: Found) -> tuple[int, list[int], list[Tensor]]:
    """The inverse of `pack`."""
    came = found.came
    length = int(came[0]) if came.numel() and came.dtype == torch.int64 else 0
    if not 3 <= length < came.numel():
        raise ConfigError("found must be a result of this group's find")
    about = came[1 : 1 + length].tolist()
    number, size = about[:2]
    values, rest = about[2 : 2 + size], iter(about[2 + size :])
    at = 1 + length
    tensors = []
    for _ in range(next(rest)):
        dtype = _DTYPES[next(rest)]
        shape = [next(rest) for _ in range(next(rest))]
        nbytes = math.prod(shape) * dtype.itemsize
        words = -(-nbytes // 8)
        tensors.append(came[at : at + words].view(torch.uint8)[:nbytes].view(dtype).view(shape))
        at += words
    return number, values, tensors
