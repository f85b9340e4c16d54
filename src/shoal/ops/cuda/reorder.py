"""`reorder_by_indices` and `fused_reorder_by_indices`: hash, then a stable partition of the first occurrences."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.errors import ConfigError
from shoal.ops.cuda.hashing import insert
from shoal.ops.cuda.launch import blocks, part_of, steps, tiles, upload
from shoal.ops.cuda.partition import TILE, rank_in_tile
from shoal.ops.reorder.op import empty_shards

_FLOATS = 2**31 - 1


@triton.jit
def _tile(tile, n, starts, tile_starts, tables, TABLES: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr):
    """A tile's elements, which all are of one table; those inside, and the table."""
    table = tile * 0
    if TABLES:
        table = part_of(tile, tile_starts, tables, STEPS)
        begin = tl.load(starts + table)
        end = tl.load(starts + table + 1)
        o = begin + (tile - tl.load(tile_starts + table)) * TILE + tl.arange(0, TILE)
        return o, o < end, table
    o = tile * TILE + tl.arange(0, TILE)
    return o, o < n, table


@triton.jit
def _rank(
    keys, shard_ids, slots, places, firsts, codes, counts, flag, n, shards, empty, starts, tile_starts, tables,
    tile_count, GIVEN: tl.constexpr, TABLES: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The first occurrence of each element, and its rank in the tile among those of its shard (``GIVEN``: backwards)."""
    tile = tl.program_id(0).to(tl.int64)
    o, inside, _ = _tile(tile, n, starts, tile_starts, tables, TABLES, STEPS, TILE)
    if GIVEN:
        o = n - 1 - o
    place = tl.load(places + o, mask=inside, other=0)
    first = tl.load(slots + place, mask=inside, other=0)
    tl.store(firsts + o, first, mask=inside)
    kept = inside & (first == o)
    if GIVEN:
        shard = tl.load(shard_ids + o, mask=inside, other=0)
        bad = inside & ((shard < 0) | (shard >= shards))
        tl.atomic_max(flag + o * 0, n - o, mask=bad)
        kept = kept & (bad == 0)
        shard = tl.where(bad, 0, shard)
    else:
        key = tl.load(keys + o, mask=inside, other=0)
        shard = key % (shards - empty)
        shard = tl.where(shard < 0, shard + (shards - empty), shard) + empty
    shard = shard.to(tl.int32)
    rank = rank_in_tile(shard, counts, kept, tile, tile_count, TILE)
    tl.store(codes + o, tl.where(kept, shard * TILE + rank, -1), mask=inside)


@triton.jit
def _place(
    keys, codes, counts, ends, float_ends, dims, output, offsets, n, dim, starts, tile_starts, tables, tile_count,
    GIVEN: tl.constexpr, TABLES: tl.constexpr, MIXED: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Each first occurrence to its place; ``GIVEN``: its position, else its key, and the offset of its vector."""
    tile = tl.program_id(0).to(tl.int64)
    o, inside, table = _tile(tile, n, starts, tile_starts, tables, TABLES, STEPS, TILE)
    if GIVEN:
        o = n - 1 - o
    code = tl.load(codes + o, mask=inside, other=-1)
    kept = code >= 0
    cell = (code // TILE).to(tl.int64) * tile_count + tile
    rank = code % TILE
    count = tl.load(counts + cell, mask=kept, other=0)
    at = tl.load(ends + cell, mask=kept, other=0) - count + rank
    if GIVEN:
        tl.store(output + at, o, mask=kept)
    else:
        tl.store(output + at, tl.load(keys + o, mask=kept, other=0), mask=kept)
        if MIXED:
            width = tl.load(dims + table)
            offset = tl.load(float_ends + cell, mask=kept, other=0) + (rank - count) * width
        else:
            offset = at.to(tl.int64) * dim
        tl.store(offsets + o, offset.to(tl.int32), mask=kept)


@triton.jit
def _spread(firsts, offsets, n, BLOCK: tl.constexpr):
    """Later occurrences take the offset of the first."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    first = tl.load(firsts + o, mask=inside, other=0)
    later = inside & (first != o)
    tl.store(offsets + o, tl.load(offsets + first, mask=later, other=0), mask=later)


@triton.jit
def _sizes(ends, slot_sizes, shard_sizes, tile_starts, tables, tile_count, TABLES: tl.constexpr, BLOCK: tl.constexpr):
    """Elements per (shard, table) and per shard."""
    shard = tl.program_id(0).to(tl.int64)
    start = tl.load(ends + shard * tile_count - 1, mask=shard > 0, other=0)
    stop = tl.load(ends + (shard + 1) * tile_count - 1)
    tl.store(shard_sizes + shard, stop - start)
    if TABLES:
        begin = tables * 0
        while begin < tables:
            m = begin + tl.arange(0, BLOCK)
            inside = m < tables
            first = tl.load(tile_starts + m, mask=inside, other=0) + shard * tile_count
            last = tl.load(tile_starts + m + 1, mask=inside, other=0) + shard * tile_count
            low = tl.load(ends + first - 1, mask=inside & (first > 0), other=0)
            high = tl.load(ends + last - 1, mask=inside & (last > 0), other=0)
            tl.store(slot_sizes + shard * tables + m, high - low, mask=inside)
            begin += BLOCK


def reorder_by_indices(keys: Tensor, shard_ids: Tensor, num_of_shards: int) -> tuple[Tensor, Tensor]:
    keys, shard_ids = keys.contiguous(), shard_ids.contiguous()
    n, device = keys.shape[0], keys.device
    count = max(1, -(-n // TILE))
    slots, places = insert(keys)
    firsts, codes = torch.empty_like(places), torch.empty_like(places)
    counts = torch.zeros(num_of_shards * count, dtype=torch.int32, device=device)
    flag = torch.zeros(1, dtype=torch.int64, device=device)
    common: dict[str, Any] = {"GIVEN": True, "TABLES": False, "STEPS": 0, "TILE": TILE}
    _rank[(count,)](
        keys, shard_ids, slots, places, firsts, codes, counts, flag, n, num_of_shards, 0, keys, keys, 1, count, **common
    )
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    order, sizes = torch.empty_like(keys), torch.empty(num_of_shards, dtype=torch.int32, device=device)
    _place[(count,)](
        keys, codes, counts, ends, ends, keys, order, codes, n, 0, keys, keys, 1, count, MIXED=False, **common
    )
    _sizes[(num_of_shards,)](ends, sizes, sizes, keys, 1, count, TABLES=False, BLOCK=32)
    kept, bad = torch.cat([ends[-1:], flag]).tolist()
    if bad:
        raise ConfigError(
            f"reorder_by_indices: a shard id must lie in [0, {num_of_shards}), got {int(shard_ids[n - bad])}"
        )
    return order[:kept], sizes


def fused_reorder_by_indices(
    inputs: list[Tensor], num_of_shards: int, dim_sizes: list[int], wish: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    empty = empty_shards(num_of_shards, None if wish < 0 else bool(wish))
    lengths, tables = [ids.shape[0] for ids in inputs], len(inputs)
    keys = inputs[0].contiguous() if tables == 1 else torch.cat(inputs)
    n, device = keys.shape[0], keys.device
    edges = tiles(lengths, TILE)
    count = max(1, edges[-1])
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    numbers = upload([*starts, *edges, *dim_sizes, *lengths], keys)
    start, edge, dims, given = numbers.split([tables + 1, tables + 1, tables, tables])
    slots, places = insert(keys, start if tables > 1 else None)
    firsts, codes = torch.empty_like(places), torch.empty_like(places)
    counts = torch.zeros(num_of_shards * count, dtype=torch.int32, device=device)
    common: dict[str, Any] = {"GIVEN": False, "TABLES": tables > 1, "STEPS": steps(tables), "TILE": TILE}
    _rank[(count,)](
        keys, keys, slots, places, firsts, codes, counts, numbers, n, num_of_shards, empty, start, edge, tables, count,
        **common,
    )  # fmt: skip
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    mixed = any(dim != dim_sizes[0] for dim in dim_sizes)
    floats = ends
    if mixed:
        widths = dims.repeat_interleave(edge.diff(), output_size=edges[-1]) if edges[-1] else dims[:1]
        floats = torch.cumsum(counts.view(num_of_shards, count) * widths, 1)
        floats = (floats + (floats[:, -1:].cumsum(0) - floats[:, -1:])).view(-1)
    output, offsets = torch.empty_like(keys), torch.empty_like(places)
    _place[(count,)](
        keys, codes, counts, ends, floats, dims, output, offsets, n, dim_sizes[0], start, edge, tables, count,
        MIXED=mixed, **common,
    )  # fmt: skip
    _spread[blocks(n, 1024)](firsts, offsets, n, BLOCK=1024)
    shard_sizes = torch.empty(num_of_shards, dtype=torch.int32, device=device)
    slot_sizes = shard_sizes if tables == 1 else torch.empty(num_of_shards * tables, dtype=torch.int32, device=device)
    _sizes[(num_of_shards,)](ends, slot_sizes, shard_sizes, edge, tables, count, TABLES=tables > 1, BLOCK=32)
    if tables == 1:
        slot_sizes = shard_sizes.clone()
    if sum(length * dim for length, dim in zip(lengths, dim_sizes, strict=True)) > _FLOATS:
        total = int(floats[-1]) if mixed else int(ends[-1]) * dim_sizes[0]
        if total > _FLOATS:
            raise ConfigError("fused_reorder_by_indices: the embeddings are more than 2^31 - 1 floats wide in all")
    return output[: int(ends[-1])], shard_sizes, slot_sizes, given.int(), offsets
