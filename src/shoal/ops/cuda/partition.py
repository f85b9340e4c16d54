"""Stable partition of elements into parts, by counting in tiles.

A tile counts its elements per part; a running sum over the counts, part by part, gives the start of each tile's
elements in each part. Up to 32 parts are counted by running sums of packed bytes, eight parts per word; more parts by
comparing each pair of elements, which costs the same for any number of parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.ops.cuda.launch import Kernel, blocks, new_flag, pointer

TILE = 128  # so that a byte can count the elements of a tile
PACKED_PARTS = 32


@triton.jit
def rank_in_tile(part, counts, kept, tile, tiles, parts, WORDS: tl.constexpr, TILE: tl.constexpr):
    """How many kept elements of the same part come before each one; writes the tile's counts to ``counts``.

    With 0 ``WORDS``, elements are compared in pairs, and ``counts`` must hold zeros.
    """
    if WORDS > 0:
        rank = part * 0
        byte = ((part % 8) * 8).to(tl.int64)
        for w in tl.static_range(WORDS):
            mine = kept & (part // 8 == w)
            one = tl.where(mine, (byte * 0 + 1) << byte, 0)
            until = tl.cumsum(one, axis=0)
            rank = tl.where(mine, ((until >> byte) & 255).to(tl.int32) - 1, rank)
            eight = tl.arange(0, 8)
            total = (tl.sum(one, axis=0) >> (eight * 8).to(tl.int64)) & 255
            place = (w * 8 + eight).to(tl.int64) * tiles + tile
            tl.store(counts + place, total.to(tl.int32), mask=w * 8 + eight < parts)
        return rank
    lane = tl.arange(0, TILE)
    code = tl.where(kept, part, -1)
    same = (code[:, None] == code[None, :]) & kept[:, None]
    before = tl.sum((same & (lane[None, :] < lane[:, None])).to(tl.int32), axis=1)
    total = tl.sum(same.to(tl.int32), axis=1)
    tl.store(counts + part.to(tl.int64) * tiles + tile, total, mask=kept & (before == total - 1))
    return before


@Kernel
def _count(parts_of, ranks, counts, flag, n, parts, tiles, WORDS: tl.constexpr, TILE: tl.constexpr):
    parts_of, ranks = pointer(parts_of, tl.int64), pointer(ranks, tl.int32)
    counts, flag = pointer(counts, tl.int32), pointer(flag, tl.int64)
    tile = tl.program_id(0)
    o = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = o < n
    part = tl.load(parts_of + o, mask=inside, other=0)
    bad = inside & ((part < 0) | (part >= parts))
    tl.atomic_max(flag + o * 0, n - o, mask=bad, sem="relaxed")
    kept = inside & (bad == 0)
    rank = rank_in_tile(part.to(tl.int32), counts, kept, tile, tiles, parts, WORDS, TILE)
    tl.store(ranks + o, rank, mask=kept)


@Kernel
def _sizes(ends, flag, sizes, parts, tiles, BLOCK: tl.constexpr):
    """Write the elements per part, followed by the flag, and clear the flag."""
    ends, flag, sizes = pointer(ends, tl.int32), pointer(flag, tl.int64), pointer(sizes, tl.int64)
    part = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = part < parts
    before = tl.load(ends + part * tiles - 1, mask=real & (part > 0), other=0)
    size = tl.load(ends + (part + 1) * tiles - 1, mask=real, other=0) - before
    tl.store(sizes + part, size.to(tl.int64), mask=real)
    last = part == parts
    tl.store(sizes + part, tl.load(flag + part * 0, mask=last, other=0), mask=last)
    tl.store(flag + part * 0, part * 0, mask=last)


def words_of(parts: int) -> int:
    """The number of packed words that count the parts of a tile; 0 to compare pairs."""
    return -(-parts // 8) if parts <= PACKED_PARTS else 0


def new_counts(parts: int, tiles: int, like: Tensor) -> Tensor:
    """int32 ``[parts * tiles]``, zeroed if `rank_in_tile` needs it."""
    make = torch.empty if words_of(parts) else torch.zeros
    return make(parts * tiles, dtype=torch.int32, device=like.device)


class Partition(NamedTuple):
    """The destinations of the elements."""

    ranks: Tensor
    """int32 ``[n]``: how many of the same part come before an element in its tile."""
    counts: Tensor
    """int32 ``[parts, tiles]``."""
    ends: Tensor
    """int32 ``[parts * tiles]``: the running sum of the counts."""
    sizes: list[int]
    """Elements per part."""
    bad: int
    """``n - i`` if element ``i`` is the first with a bad part number, 0 if there is none."""


def partition(parts_of: Tensor, parts: int) -> Partition:
    """Count int64 part numbers; waits for the device once, for the sizes."""
    n = parts_of.shape[0]
    tiles = max(1, -(-n // TILE))
    ranks = torch.empty(n, dtype=torch.int32, device=parts_of.device)
    counts, words = new_counts(parts, tiles, parts_of), words_of(parts)
    flag = new_flag(parts_of)
    _count(
        blocks(n, TILE)[0], parts_of.data_ptr(), ranks.data_ptr(), counts.data_ptr(), flag.data_ptr(), n, parts, tiles,
        warps=1 if words else 4, WORDS=words, TILE=TILE,
    )  # fmt: skip
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    sizes = torch.empty(parts + 1, dtype=torch.int64, device=parts_of.device)
    _sizes(
        blocks(parts + 1, 64)[0], ends.data_ptr(), flag.data_ptr(), sizes.data_ptr(), parts, tiles, warps=1, BLOCK=64
    )
    *sizes, bad = sizes.tolist()
    return Partition(ranks, counts, ends, sizes, bad)


@triton.jit
def place_in_part(part, rank, tile, tiles, counts, ends, mask):
    """The place of each element inside its part."""
    cell = part.to(tl.int64) * tiles + tile
    end = tl.load(ends + cell, mask=mask, other=0)
    count = tl.load(counts + cell, mask=mask, other=0)
    first = tl.load(ends + part.to(tl.int64) * tiles - 1, mask=mask & (part > 0), other=0)
    return end - count - first + rank
