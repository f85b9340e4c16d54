"""`unique_key_with_value_and_offset`, and the fills of a shared buffer with their gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from shoal.errors import ConfigError
from shoal.ops.cuda import launch
from shoal.ops.cuda.dedup import dedup
from shoal.ops.cuda.launch import Fast, blocks, on_its_device, part_of, steps, upload


@Fast
def _row_bounds(row_splits, ranks, bases, id_splits, rows, BLOCK: tl.constexpr):
    """The number of distinct keys before each row."""
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = r <= rows
    at = tl.load(row_splits + r, mask=inside, other=0)
    some = inside & (at > 0)
    before = tl.load(ranks + at - 1, mask=some, other=0) + tl.load(bases + (at - 1) // 1024, mask=some, other=0)
    tl.store(id_splits + r, before.to(tl.int64), mask=inside)


@Fast
def _offsets(
    numbers, order, row_splits, dims, bases, offset_splits, offsets, n, rows, STEPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Occurrences by distinct key: the first one of each key, and the float offset of each occurrence."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    number = tl.load(numbers + o, mask=inside, other=0)
    before = tl.load(numbers + o - 1, mask=inside & (o > 0), other=-1)
    tl.store(offset_splits + number, o, mask=inside & (number != before))
    tl.store(offset_splits + number + 1, o + 1, mask=o == n - 1)
    position = tl.load(order + o, mask=inside, other=0)
    row = part_of(position, row_splits, rows, STEPS)
    start = tl.load(row_splits + row, mask=inside, other=0)
    value = tl.load(bases + row, mask=inside, other=0) + (position - start) * tl.load(dims + row, mask=inside, other=0)
    tl.store(offsets + o, value, mask=inside)


def unique_key_with_value_and_offset(
    values: Tensor, row_splits: Tensor, dims: list[int], generate_buffer: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    values, row_splits = values.contiguous(), row_splits.contiguous()
    n, rows = values.shape[0], len(dims)
    flag = torch.zeros(1, dtype=torch.int64, device=values.device)
    launch.check_row_splits(row_splits, n, flag)
    widths = upload(dims, values)
    floats = widths * row_splits.diff()
    ends = floats.cumsum(0)
    # Check the splits before they are used: bad ones would reach past the keys.
    bad, total = torch.cat([flag, ends[-1:]]).tolist()
    if bad:
        launch.refuse_row_splits(row_splits, n)
    id_splits = torch.zeros_like(row_splits)
    buffer = values.new_zeros(total if generate_buffer else 0, dtype=torch.float32)
    if not n:
        return values.new_empty(0), id_splits, values.new_zeros(1), values.new_empty(0), buffer
    found = dedup(values, row_splits if rows > 1 else None)
    _row_bounds[blocks(rows + 1, 256)](row_splits, found.ranks, found.bases, id_splits, rows, BLOCK=256)
    numbers, order = torch.sort(found.inverse, stable=True)
    count = int(found.count)
    offset_splits, offsets = values.new_empty(count + 1), values.new_empty(n)
    _offsets[blocks(n, 512)](
        numbers, order, row_splits, widths, ends - floats, offset_splits, offsets, n, rows, STEPS=steps(rows), BLOCK=512
    )
    return found.keys[:count], id_splits, offset_splits, offsets, buffer


@Fast
def _own(pos, owner, flag, n, keys, BLOCK: tl.constexpr):
    """Find the owner of each key: the last element of ``pos`` that names it."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = e < n
    key = tl.load(pos + e, mask=inside, other=0)
    bad = inside & ((key < 0) | (key >= keys))
    tl.atomic_max(flag + e * 0, n - e, mask=bad, sem="relaxed")
    tl.atomic_max(owner + key, e.to(tl.int32), mask=inside & (bad == 0), sem="relaxed")


@Fast
def _pairs(
    offset_splits, offsets, owner, pos_splits, dims, bases, value, buffer, winners, n, keys, rows, floats, size,
    MODE: tl.constexpr, ORDERED: tl.constexpr, KEYS: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """For each offset of an owned key, ``MODE``: 0 checks it (``winners`` is a flag); 1 copies the key's vector there
    (``ORDERED``: only if it is the winner); 2 adds the floats there to the key's vector; 3 finds the winner of each
    float of the buffer, the last one to write it.
    """
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = j < n
    key = part_of(j, offset_splits, keys, KEYS)
    element = tl.load(owner + key, mask=inside, other=-1).to(tl.int64)
    # Offsets before the first split or past the last one belong to no key.
    inside = inside & (element >= 0) & (j >= tl.load(offset_splits + key, mask=inside, other=0))
    inside = inside & (j < tl.load(offset_splits + key + 1, mask=inside, other=0))
    row = part_of(element, pos_splits, rows, STEPS)
    width = tl.load(dims + row, mask=inside, other=0)
    start = tl.load(bases + row, mask=inside, other=0)
    start += (element - tl.load(pos_splits + row, mask=inside, other=0)) * width
    offset = tl.load(offsets + j, mask=inside, other=0)
    good = (offset >= 0) & (offset + width <= size) & (start + width <= floats)
    if MODE == 0:
        tl.atomic_max(winners + j * 0, n - j, mask=inside & (good == 0), sem="relaxed")
    else:
        inside = inside & good
        last = tl.max(tl.where(inside, width, 0), axis=0)
        begin = last * 0
        while begin < last:
            c = begin + tl.arange(0, COLUMNS)
            both = inside[:, None] & (c[None, :] < width[:, None])
            mine = value + start[:, None] + c[None, :]
            there = buffer + offset[:, None] + c[None, :]
            turn = (element * 4294967296 + j)[:, None]
            winner = winners + offset[:, None] + c[None, :]
            if MODE == 3:
                tl.atomic_max(winner, turn + c[None, :] * 0, mask=both, sem="relaxed")
            elif MODE == 1:
                if ORDERED:
                    both = both & (tl.load(winner, mask=both, other=-1) == turn)
                tl.store(there, tl.load(mine, mask=both, other=0), mask=both)
            else:
                tl.atomic_add(mine, tl.load(there, mask=both, other=0), mask=both, sem="relaxed")
            begin += COLUMNS


@Fast
def _repeat(
    pos, pos_splits, dims, bases, owner, offset_splits, offsets, grad, out, n, keys, rows, STEPS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of elements that name a key without owning it."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = e < n
    key = tl.load(pos + e, mask=inside, other=0)
    inside = inside & (key >= 0) & (key < keys)
    inside = inside & (tl.load(owner + key, mask=inside, other=0) != e)
    row = part_of(e, pos_splits, rows, STEPS)
    width = tl.load(dims + row, mask=inside, other=0)
    start = tl.load(bases + row, mask=inside, other=0)
    start += (e - tl.load(pos_splits + row, mask=inside, other=0)) * width
    first = tl.load(offset_splits + key, mask=inside, other=0)
    count = tl.load(offset_splits + key + 1, mask=inside, other=0) - first
    most = tl.max(count, axis=0)
    last = tl.max(tl.where(inside, width, 0), axis=0)
    begin = last * 0
    while begin < last:
        c = begin + tl.arange(0, COLUMNS)
        both = inside[:, None] & (c[None, :] < width[:, None])
        total = tl.zeros((BLOCK, COLUMNS), dtype=tl.float32)
        k = most * 0
        while k < most:
            here = inside & (k < count)
            offset = tl.load(offsets + first + k, mask=here, other=0)
            total += tl.load(grad + offset[:, None] + c[None, :], mask=both & here[:, None], other=0)
            k += 1
        tl.store(out + start[:, None] + c[None, :], total, mask=both)
        begin += COLUMNS


class _Map:
    """The elements of ``pos`` and the offsets of their keys, checked."""

    def __init__(
        self, op: str, pos: Tensor, pos_splits: Tensor, offset_splits: Tensor, offsets: Tensor, dims: Sequence[int],
        size: int, floats: int | None,
    ) -> None:  # fmt: skip
        self.pos, self.pos_splits = pos.contiguous(), pos_splits.contiguous()
        self.offset_splits, self.offsets = offset_splits.contiguous(), offsets.contiguous()
        self.keys, self.rows, self.size = offset_splits.shape[0] - 1, len(dims), size
        n = pos.shape[0]
        flags = list(torch.zeros((3, 1), dtype=torch.int64, device=pos.device))
        launch.check_row_splits(self.pos_splits, n, flags[0])
        launch.check_row_splits(self.offset_splits, offsets.shape[0], flags[1])
        self.dims = upload(dims, pos)
        total = self.dims * self.pos_splits.diff()
        ends = total.cumsum(0)
        self.bases = ends - total
        self.owner = torch.full((max(1, self.keys),), -1, dtype=torch.int32, device=pos.device)
        if n:
            _own[blocks(n, 512)](self.pos, self.owner, flags[2], n, self.keys, BLOCK=512)
        last = ends[-1:] if self.rows else torch.zeros_like(flags[0])
        bad_pos, bad_map, bad_key, self.floats = torch.cat([*flags, last]).tolist()
        if bad_pos:
            launch.refuse_row_splits(self.pos_splits, n)
        if bad_map:
            launch.refuse_row_splits(self.offset_splits, offsets.shape[0])
        if bad_key:
            at = n - bad_key
            raise ConfigError(f"{op}: an element of pos must be in [0, {self.keys}), got {int(pos[at])}")
        if floats is not None and floats != self.floats:
            raise ConfigError(f"{op}: pos and dims need {self.floats} floats, but value has {floats}")
        flag = launch.new_flag(pos)
        self._run(0, self.offsets, self.offsets, flag)
        launch.raise_if(flag, lambda at: f"{op}: an offset + width is outside the buffer of {size} floats")

    def _run(self, mode: int, value: Tensor, buffer: Tensor, winners: Tensor, ordered: bool = False) -> None:
        n = self.offsets.shape[0]
        if n and self.keys and self.pos.shape[0]:
            _pairs[blocks(n, 64)](
                self.offset_splits, self.offsets, self.owner, self.pos_splits, self.dims, self.bases, value, buffer,
                winners, n, self.keys, self.rows, self.floats, self.size, MODE=mode, ORDERED=ordered,
                KEYS=steps(self.keys),
                STEPS=steps(self.rows), COLUMNS=16, BLOCK=64,
            )  # fmt: skip

    def fill(self, value: Tensor, buffer: Tensor, disjoint: bool) -> None:
        value, winners = value.detach().contiguous(), self.owner
        if not disjoint:  # the last writer wins, in the order of pos
            winners = torch.full((buffer.shape[0],), -1, dtype=torch.int64, device=buffer.device)
            self._run(3, value, buffer, winners)
        self._run(1, value, buffer, winners, not disjoint)

    def sum(self, grad: Tensor) -> Tensor:
        grad, out = grad.contiguous(), grad.new_zeros(self.floats)
        self._run(2, out, grad, self.owner)
        n = self.pos.shape[0]
        if n and self.keys:
            _repeat[blocks(n, 64)](
                self.pos, self.pos_splits, self.dims, self.bases, self.owner, self.offset_splits, self.offsets, grad,
                out, n, self.keys, self.rows, STEPS=steps(self.rows), COLUMNS=16, BLOCK=64,
            )  # fmt: skip
        return out


@on_its_device
def fill_with_offset_map(
    pos: Tensor, pos_splits: Tensor, value: Tensor, offset_splits: Tensor, offsets: Tensor, buffer: Tensor,
    dims: Sequence[int], disjoint: bool = False,
) -> None:  # fmt: skip
    """Write ``buffer`` in place, or raise before anything is written. ``disjoint``: no two offsets overlap."""
    args = (pos, pos_splits, offset_splits, offsets)
    _Map("fill_with_offset_map", *args, dims, buffer.shape[0], value.shape[0]).fill(value, buffer, disjoint)


def fill_with_offset_map_gradient(
    pos: Tensor, pos_splits: Tensor, grad: Tensor, offset_splits: Tensor, offsets: Tensor, dims: list[int]
) -> Tensor:
    args = (pos, pos_splits, offset_splits, offsets)
    return _Map("fill_with_offset_map_gradient", *args, dims, grad.shape[0], None).sum(grad)


def fill_with_offset_maps(
    values: list[Tensor], pos: list[Tensor], pos_splits: list[Tensor], offset_splits: list[Tensor],
    offsets: list[Tensor], dims: list[int], counts: list[int], buffer: Tensor,
) -> Tensor:  # fmt: skip
    out, at = buffer.clone(), 0
    for value, p, s, splits, places, count in zip(values, pos, pos_splits, offset_splits, offsets, counts, strict=True):
        fill_with_offset_map(p, s, value, splits, places, out, dims[at : at + count])
        at += count
    return out
