"""A stable partition: elements to parts, order kept, by counting in tiles.

A tile counts its elements per part (each pair of them compared, which costs the same for any number of parts); one
running sum over the counts, part by part, then says where each tile's elements of each part begin.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.ops.cuda.launch import blocks

TILE = 128


@triton.jit
def rank_in_tile(part, counts, kept, tile, tiles, TILE: tl.constexpr):
    """How many kept elements of the same part stand before each one; leaves the tile's counts in ``counts``."""
    lane = tl.arange(0, TILE)
    code = tl.where(kept, part, -1)
    same = (code[:, None] == code[None, :]) & kept[:, None]
    before = tl.sum((same & (lane[None, :] < lane[:, None])).to(tl.int32), axis=1)
    total = tl.sum(same.to(tl.int32), axis=1)
    tl.store(counts + part.to(tl.int64) * tiles + tile, total, mask=kept & (before == total - 1))
    return before


@triton.jit
def _count(parts_of, ranks, counts, flag, n, parts, tiles, TILE: tl.constexpr):
    tile = tl.program_id(0)
    o = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = o < n
    part = tl.load(parts_of + o, mask=inside, other=0)
    bad = inside & ((part < 0) | (part >= parts))
    tl.atomic_max(flag + o * 0, n - o, mask=bad)
    kept = inside & (bad == 0)
    rank = rank_in_tile(part.to(tl.int32), counts, kept, tile, tiles, TILE)
    tl.store(ranks + o, rank, mask=kept)


class Partition(NamedTuple):
    """Where the elements go."""

    ranks: Tensor
    """int32 ``[n]``: how many of the same part stand before an element in its tile."""
    counts: Tensor
    """int32 ``[parts, tiles]``."""
    ends: Tensor
    """int32 ``[parts * tiles]``: the running sum of the counts."""
    sizes: Tensor
    """int64 ``[parts + 1]`` on the host: elements per part, and the flag of a bad part number."""


def partition(parts_of: Tensor, parts: int) -> Partition:
    """Counts int64 part numbers; waits for the device once, to learn the sizes."""
    n = parts_of.shape[0]
    tiles = max(1, -(-n // TILE))
    ranks = torch.empty(n, dtype=torch.int32, device=parts_of.device)
    counts = torch.zeros(parts * tiles, dtype=torch.int32, device=parts_of.device)
    flag = torch.zeros(1, dtype=torch.int64, device=parts_of.device)
    _count[blocks(n, TILE)](parts_of, ranks, counts, flag, n, parts, tiles, TILE=TILE, num_warps=4)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    last = ends[tiles - 1 :: tiles].long()
    sizes = torch.cat([last[:1], last.diff(), flag]).cpu()
    return Partition(ranks, counts, ends, sizes)


@triton.jit
def place_in_part(part, rank, tile, tiles, counts, ends, mask):
    """The place of each element inside its part."""
    cell = part.to(tl.int64) * tiles + tile
    end = tl.load(ends + cell, mask=mask, other=0)
    count = tl.load(counts + cell, mask=mask, other=0)
    first = tl.load(ends + part.to(tl.int64) * tiles - 1, mask=mask & (part > 0), other=0)
    return end - count - first + rank
