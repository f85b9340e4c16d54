"""`reorder_by_indices` and `fused_reorder_by_indices`: hash, then a stable partition of the first occurrences."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.errors import ConfigError
from shoal.ops.cuda.hashing import capacity, insert_at
from shoal.ops.cuda.launch import Kernel, aligned, blocks, part_of, pointer, steps, tiles, upload
from shoal.ops.cuda.partition import TILE, rank_in_tile, words_of
from shoal.ops.reorder.op import empty_shards

_FLOATS = 2**31 - 1


@triton.jit
def _tile(tile, n, starts, tile_starts, tables, TABLES: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr):
    """A tile's elements, all from one table; a mask of valid ones, and the table."""
    table = tile * 0
    if TABLES:
        table = part_of(tile, tile_starts, tables, STEPS)
        begin = tl.load(starts + table)
        end = tl.load(starts + table + 1)
        o = begin + (tile - tl.load(tile_starts + table)) * TILE + tl.arange(0, TILE)
        return o, o < end, table
    o = tile * TILE + tl.arange(0, TILE)
    return o, o < n, table


@Kernel
def _rank(
    keys, shard_ids, slots, places, firsts, codes, counts, flag, n, shards, empty, starts, tile_starts, tables,
    tile_count, GIVEN: tl.constexpr, WORDS: tl.constexpr, TABLES: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Each element's first occurrence, and its rank in the tile within its shard (``GIVEN``: in reverse order)."""
    keys, shard_ids = pointer(keys, tl.int64), pointer(shard_ids, tl.int64)
    slots, places, firsts = pointer(slots, tl.int32), pointer(places, tl.int32), pointer(firsts, tl.int32)
    codes, counts, flag = pointer(codes, tl.int32), pointer(counts, tl.int32), pointer(flag, tl.int64)
    starts, tile_starts = pointer(starts, tl.int64), pointer(tile_starts, tl.int64)
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
        tl.atomic_max(flag + o * 0, n - o, mask=bad, sem="relaxed")
        kept = kept & (bad == 0)
        shard = tl.where(bad, 0, shard)
    else:
        key = tl.load(keys + o, mask=inside, other=0)
        shard = key % (shards - empty)
        shard = tl.where(shard < 0, shard + (shards - empty), shard) + empty
    shard = shard.to(tl.int32)
    rank = rank_in_tile(shard, counts, kept, tile, tile_count, shards, WORDS, TILE)
    tl.store(codes + o, tl.where(kept, shard * TILE + rank, -1), mask=inside)


@Kernel
def _place(
    keys, codes, counts, ends, float_ends, dims, output, offsets, n, dim, starts, tile_starts, tables, tile_count,
    GIVEN: tl.constexpr, MIXED: tl.constexpr, TABLES: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write each first occurrence (``GIVEN``: its position, else its key) to its place, and its vector's offset."""
    keys, codes, counts = pointer(keys, tl.int64), pointer(codes, tl.int32), pointer(counts, tl.int32)
    ends, dims, output = pointer(ends, tl.int32), pointer(dims, tl.int64), pointer(output, tl.int64)
    float_ends, offsets = pointer(float_ends, tl.int64), pointer(offsets, tl.int32)
    starts, tile_starts = pointer(starts, tl.int64), pointer(tile_starts, tl.int64)
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


@Kernel
def _spread(
    firsts, offsets, ends, shard_sizes, slot_sizes, given, tile_starts, n, shards, tables, tile_count,
    SPREAD: tl.constexpr, TABLES: tl.constexpr, SHARDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Give later occurrences the offset of the first; count the elements per shard, and per (shard, table)."""
    firsts = pointer(firsts, tl.int32)
    ends, offsets, tile_starts = pointer(ends, tl.int32), pointer(offsets, tl.int32), pointer(tile_starts, tl.int64)
    shard_sizes, slot_sizes = pointer(shard_sizes, tl.int32), pointer(slot_sizes, tl.int32)
    if SPREAD:
        o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = o < n
        first = tl.load(firsts + o, mask=inside, other=0)
        later = inside & (first != o)
        tl.store(offsets + o, tl.load(offsets + first, mask=later, other=0), mask=later)
        if not TABLES:
            tl.store(pointer(given, tl.int32) + o, n.to(tl.int32), mask=o == 0)
    list_ = tl.program_id(0) * SHARDS + tl.arange(0, SHARDS)
    real = list_ < shards * tables
    shard = (list_ // tables).to(tl.int64) * tile_count
    first_tile, last_tile = shard, shard + tile_count
    if TABLES:
        table = list_ % tables
        first_tile = shard + tl.load(tile_starts + table, mask=real, other=0)
        last_tile = shard + tl.load(tile_starts + table + 1, mask=real, other=0)
    low = tl.load(ends + first_tile - 1, mask=real & (first_tile > 0), other=0)
    high = tl.load(ends + last_tile - 1, mask=real & (last_tile > 0), other=0)
    tl.store(slot_sizes + list_, high - low, mask=real)
    mine = list_ < shards
    stop = list_.to(tl.int64) * tile_count
    low = tl.load(ends + stop - 1, mask=mine & (list_ > 0), other=0)
    high = tl.load(ends + stop + tile_count - 1, mask=mine, other=0)
    tl.store(shard_sizes + list_, high - low, mask=mine)


class _Work:
    """Workspace for the passes over the keys: addresses of int32 vectors in one tensor. The constructor hashes them."""

    def __init__(self, keys: Tensor, cells: int, starts: Tensor | None = None) -> None:
        n = keys.shape[0]
        room, slots = aligned(n), capacity(n)
        self.tensor = torch.empty(3 * room + aligned(cells) + slots, dtype=torch.int32, device=keys.device)
        self.places = self.tensor.data_ptr()
        self.firsts, self.codes = self.places + 4 * room, self.places + 8 * room
        self.counts = self.places + 12 * room
        self.slots = self.counts + 4 * aligned(cells)
        insert_at(keys, self.slots, slots, self.places, starts)
        self.counts_tensor = self.tensor[3 * room : 3 * room + cells]


def reorder_by_indices(keys: Tensor, shard_ids: Tensor, num_of_shards: int) -> tuple[Tensor, Tensor]:
    keys, shard_ids = keys.contiguous(), shard_ids.contiguous()
    n, words = keys.shape[0], words_of(num_of_shards)
    count = max(1, -(-n // TILE))
    work = _Work(keys, num_of_shards * count)
    if not words:
        work.counts_tensor.zero_()
    flag = torch.zeros(1, dtype=torch.int64, device=keys.device)
    common: dict[str, Any] = {"TABLES": False, "STEPS": 0, "TILE": TILE}
    _rank(
        count, keys.data_ptr(), shard_ids.data_ptr(), work.slots, work.places, work.firsts, work.codes, work.counts,
        flag.data_ptr(), n, num_of_shards, 0, 0, 0, 1, count, warps=1 if words else 4, GIVEN=True, WORDS=words,
        **common,
    )  # fmt: skip
    ends = torch.cumsum(work.counts_tensor, 0, dtype=torch.int32)
    order, sizes = torch.empty_like(keys), torch.empty((2, num_of_shards), dtype=torch.int32, device=keys.device)
    _place(
        count, keys.data_ptr(), work.codes, work.counts, ends.data_ptr(), ends.data_ptr(), 0, order.data_ptr(), 0, n,
        0, 0,
        0, 1, count, warps=1, GIVEN=True, MIXED=False, **common,
    )  # fmt: skip
    _spread(
        blocks(num_of_shards, 1024)[0], work.firsts, 0,
        ends.data_ptr(), sizes.data_ptr(), sizes.data_ptr() + 4 * num_of_shards, 0, 0, n, num_of_shards, 1, count,
        SPREAD=False, TABLES=False, SHARDS=1024, BLOCK=1024,
    )  # fmt: skip
    kept, bad = torch.cat([ends[-1:], flag]).tolist()
    if bad:
        raise ConfigError(
            f"reorder_by_indices: a shard id must be in [0, {num_of_shards}), got {int(shard_ids[n - bad])}"
        )
    return order[:kept], sizes[0]


def fused_reorder_by_indices(
    inputs: list[Tensor], num_of_shards: int, dim_sizes: list[int], rank0_empty: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    empty = empty_shards(num_of_shards, None if rank0_empty < 0 else bool(rank0_empty))
    lengths, tables, shards = [ids.shape[0] for ids in inputs], len(inputs), num_of_shards
    keys = inputs[0].contiguous() if tables == 1 else torch.cat(inputs)
    n, device, words = keys.shape[0], keys.device, words_of(shards)
    edges = tiles(lengths, TILE)
    count = max(1, edges[-1])
    start = edge = dims = given = None
    if tables > 1:
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        numbers = upload([*starts, *edges, *dim_sizes, *lengths], keys)
        start, edge, dims, given = numbers.split([tables + 1, tables + 1, tables, tables])
        given = given.int()
    start_at, edge_at, dims_at = (0 if t is None else t.data_ptr() for t in (start, edge, dims))
    work = _Work(keys, shards * count, start)
    if not words:
        work.counts_tensor.zero_()
    common: dict[str, Any] = {"TABLES": tables > 1, "STEPS": steps(tables), "TILE": TILE}
    _rank(
        count, keys.data_ptr(), 0, work.slots, work.places, work.firsts, work.codes, work.counts, 0, n, shards, empty,
        start_at, edge_at, tables, count, warps=1 if words else 4, GIVEN=False, WORDS=words, **common,
    )  # fmt: skip
    ends = torch.cumsum(work.counts_tensor, 0, dtype=torch.int32)
    mixed = any(dim != dim_sizes[0] for dim in dim_sizes)
    floats = ends
    if mixed:
        assert dims is not None
        assert edge is not None
        widths = dims.repeat_interleave(edge.diff(), output_size=edges[-1]) if edges[-1] else dims[:1]
        floats = torch.cumsum((work.counts_tensor.view(shards, count) * widths).view(-1), 0)
    output, offsets = torch.empty_like(keys), torch.empty(n, dtype=torch.int32, device=device)
    _place(
        count, keys.data_ptr(), work.codes, work.counts, ends.data_ptr(), floats.data_ptr(), dims_at, output.data_ptr(),
        offsets.data_ptr(), n, dim_sizes[0], start_at, edge_at, tables, count, warps=1, GIVEN=False, MIXED=mixed,
        **common,
    )  # fmt: skip
    shard_sizes = torch.empty(shards, dtype=torch.int32, device=device)
    slot_sizes = torch.empty(shards * tables, dtype=torch.int32, device=device)
    if given is None:
        given = torch.empty(1, dtype=torch.int32, device=device)
    _spread(
        max(blocks(n, 1024)[0], blocks(shards * tables, 1024)[0]), work.firsts, offsets.data_ptr(), ends.data_ptr(),
        shard_sizes.data_ptr(), slot_sizes.data_ptr(), given.data_ptr(), edge_at, n, shards, tables, count,
        SPREAD=True, TABLES=tables > 1, SHARDS=1024, BLOCK=1024,
    )  # fmt: skip
    kept = int(ends[-1])
    if sum(length * dim for length, dim in zip(lengths, dim_sizes, strict=True)) > _FLOATS:
        total = int(floats[-1]) if mixed else kept * dim_sizes[0]
        if total > _FLOATS:
            raise ConfigError(
                "fused_reorder_by_indices: the embeddings must have at most 2^31 - 1 floats in all; spread the tables "
                "over more calls"
            )
    return output[:kept], shard_sizes, slot_sizes, given, offsets
