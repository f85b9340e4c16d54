"""`split_by_indices`, its gradient, and `ragged_split_by_indices`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shoal.errors import ConfigError
from shoal.ops.checks import check_same
from shoal.ops.cuda import launch
from shoal.ops.cuda.launch import WORDS, Fast, Kernel, as_words, blocks, pointer, upload
from shoal.ops.cuda.partition import TILE, Partition, partition, place_in_part
from shoal.ops.split.op import plain_bytes


@Kernel
def _move(
    indices, ranks, counts, ends, addresses, rows, n, tiles,
    words: tl.constexpr, BACK: tl.constexpr, ELEMENT: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy rows to their parts, or back from them."""
    indices, ranks, counts = pointer(indices, tl.int64), pointer(ranks, tl.int32), pointer(counts, tl.int32)
    ends, addresses, rows = pointer(ends, tl.int32), pointer(addresses, tl.int64), pointer(rows, ELEMENT)
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    part = tl.load(indices + o, mask=inside, other=0)
    rank = tl.load(ranks + o, mask=inside, other=0)
    place = place_in_part(part, rank, o // TILE, tiles, counts, ends, inside)
    there = pointer(tl.load(addresses + part, mask=inside, other=0), ELEMENT)
    for begin in range(0, words, COLUMNS):
        c = begin + tl.arange(0, COLUMNS)
        both = inside[:, None] & (c < words)[None, :]
        mine = rows + o[:, None] * words + c[None, :]
        other = there[:, None] + place.to(tl.int64)[:, None] * words + c[None, :]
        if BACK:
            tl.store(mine, tl.load(other, mask=both, other=0), mask=both)
        else:
            tl.store(other, tl.load(mine, mask=both, other=0), mask=both)


@Fast
def _ragged(
    indices, ranks, counts, ends, values, value_at, pos_at, n, tiles, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    part = tl.load(indices + o, mask=inside, other=0)
    rank = tl.load(ranks + o, mask=inside, other=0)
    place = place_in_part(part, rank, o // TILE, tiles, counts, ends, inside)
    value = tl.load(values + o, mask=inside, other=0)
    tl.store(pointer(tl.load(value_at + part, mask=inside, other=0), tl.int64) + place, value, mask=inside)
    tl.store(pointer(tl.load(pos_at + part, mask=inside, other=0), tl.int64) + place, o, mask=inside)


@Fast
def _row_splits(
    indices, counts, ends, row_splits, splits_at, n, tiles, parts, TILE: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """The number of elements of each part before a row."""
    row = tl.program_id(0)
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    real = part < parts
    at = tl.load(row_splits + row)
    tile = tl.minimum(at // TILE, tiles - 1)
    o = tile * TILE + tl.arange(0, TILE)
    here = o < at
    index = tl.load(indices + o, mask=here & (o < n), other=-1)
    inside = tl.sum((index[None, :] == part[:, None]).to(tl.int32), axis=1)
    cell = part.to(tl.int64) * tiles + tile
    before = tl.load(ends + cell, mask=real, other=0) - tl.load(counts + cell, mask=real, other=0)
    before -= tl.load(ends + part.to(tl.int64) * tiles - 1, mask=real & (part > 0), other=0)
    out = pointer(tl.load(splits_at + part, mask=real, other=0), tl.int64)
    tl.store(out + row, (before + inside).to(tl.int64), mask=real)


def _parts(indices: Tensor, parts: int) -> Partition:
    made = partition(indices, parts)
    if made.bad:
        bad = int(indices[indices.shape[0] - made.bad])
        raise ConfigError(f"split_by_indices: an index must be in [0, {parts}), got {bad}")
    return made


def _copy(indices: Tensor, made: Partition, parts: list[Tensor], rows: Tensor, back: bool) -> None:
    words = as_words(rows)
    n, width = words.shape
    if not n or not width:
        return
    columns = min(64, triton.next_power_of_2(width))
    block = max(16, min(128, 4096 // columns))
    addresses = upload([p.data_ptr() for p in parts], rows)
    _move(
        blocks(n, block)[0], indices.data_ptr(), made.ranks.data_ptr(), made.counts.data_ptr(), made.ends.data_ptr(),
        addresses.data_ptr(), words.data_ptr(), n, made.ends.shape[0] // len(parts), words=width, BACK=back,
        ELEMENT=WORDS[words.dtype], TILE=TILE, COLUMNS=columns, BLOCK=block,
    )  # fmt: skip


def split_by_indices(indices: Tensor, tensor: Tensor, num_splits: int) -> list[Tensor]:
    indices, tensor = indices.contiguous(), plain_bytes(tensor)
    made = _parts(indices, num_splits)
    outs = [tensor.new_empty((size, *tensor.shape[1:])) for size in made.sizes]
    _copy(indices, made, outs, tensor, False)
    return outs


def split_by_indices_backward(indices: Tensor, grads: list[Tensor]) -> Tensor:
    indices, grads = indices.contiguous(), [plain_bytes(g) for g in grads]
    made = _parts(indices, len(grads))
    for s, (grad, size) in enumerate(zip(grads, made.sizes, strict=True)):
        check_same("split_by_indices", f"the gradient of part {s}", grad.shape[0], "its row count", size)
    out = grads[0].new_empty((indices.shape[0], *grads[0].shape[1:]))
    _copy(indices, made, grads, out, True)
    return out


def ragged_split_by_indices(
    indices: Tensor, values: Tensor, row_splits: Tensor, num_splits: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    indices, values, row_splits = indices.contiguous(), values.contiguous(), row_splits.contiguous()
    n, rows = indices.shape[0], row_splits.shape[0] - 1
    launch.check_row_splits(row_splits, n)
    made = _parts(indices, num_splits)
    out_values = [values.new_empty(size) for size in made.sizes]
    out_pos = [values.new_empty(size) for size in made.sizes]
    out_splits = [values.new_empty(rows + 1) for _ in made.sizes]
    tiles = made.ends.shape[0] // num_splits
    at = upload([t.data_ptr() for t in (*out_values, *out_pos, *out_splits)], values)
    value_at, pos_at, splits_at = at[:num_splits], at[num_splits : 2 * num_splits], at[2 * num_splits :]
    if n:
        _ragged[blocks(n, 512)](
            indices, made.ranks, made.counts, made.ends, values, value_at, pos_at, n, tiles, TILE=TILE, BLOCK=512
        )
    group = min(64, triton.next_power_of_2(num_splits))
    _row_splits[(rows + 1, -(-num_splits // group))](
        indices,
        made.counts,
        made.ends,
        row_splits,
        splits_at,
        n,
        tiles,
        num_splits,
        TILE=TILE,
        PARTS=group,
        num_warps=1 if group <= 16 else 4,
    )
    return out_values, out_pos, out_splits
