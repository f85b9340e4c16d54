"""The fused gather and its gradient: one launch for all tables, a lane per float."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.ops.cuda import launch
from shoal.ops.cuda.launch import ELEMENTS, Kernel, float64_bits, part_of, pointer, steps, tiles, upload

_BLOCK = 1024


@Kernel
def _fused_rows(
    fused, size, tile_starts, offsets_at, wide, rows_at, lengths, dims, flag, scale, tables,
    BACK: tl.constexpr, ELEMENT: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`_fused_gather` for tables of similar width: an offset is read once per row."""
    fused, tile_starts, offsets_at = (
        pointer(fused, ELEMENT),
        pointer(tile_starts, tl.int64),
        pointer(offsets_at, tl.int64),
    )
    wide, rows_at, lengths = pointer(wide, tl.int64), pointer(rows_at, tl.int64), pointer(lengths, tl.int64)
    dims, flag, scale = (
        pointer(dims, tl.int64),
        pointer(flag, tl.int64),
        tl.load(pointer(scale, tl.float64)).to(ELEMENT),
    )
    tile = tl.program_id(0).to(tl.int64)
    table = part_of(tile, tile_starts, tables, STEPS)
    dim = tl.load(dims + table)
    row = (tile - tl.load(tile_starts + table)) * BLOCK + tl.arange(0, BLOCK)
    inside = row < tl.load(lengths + table)
    address = tl.load(offsets_at + table)
    if tl.load(wide + table) != 0:
        offset = tl.load(pointer(address, tl.int64) + row, mask=inside, other=0)
    else:
        offset = tl.load(pointer(address, tl.int32) + row, mask=inside, other=0).to(tl.int64)
    bad = inside & ((offset < 0) | (offset + dim > size))
    tl.atomic_max(flag + row * 0, (tables - table) * 4294967296 + 2147483647 - row, mask=bad, sem="relaxed")
    inside = inside & (bad == 0)
    rows = pointer(tl.load(rows_at + table), ELEMENT)
    begin = dim * 0
    while begin < dim:
        c = begin + tl.arange(0, COLUMNS)
        both = inside[:, None] & (c < dim)[None, :]
        there = fused + offset[:, None] + c[None, :]
        mine = rows + row[:, None] * dim + c[None, :]
        if BACK:
            value = tl.load(mine, mask=both, other=0) * scale
            tl.atomic_add(there, value, mask=both, sem="relaxed")
        else:
            tl.store(mine, tl.load(there, mask=both, other=0), mask=both)
        begin += COLUMNS


@Kernel
def _fused_gather(
    fused, size, tile_starts, offsets_at, wide, rows_at, lengths, dims, flag, scale, tables,
    BACK: tl.constexpr, ELEMENT: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy each table's vectors out of the buffer, or add them (``BACK``) into it."""
    fused, tile_starts, offsets_at = (
        pointer(fused, ELEMENT),
        pointer(tile_starts, tl.int64),
        pointer(offsets_at, tl.int64),
    )
    wide, rows_at, lengths = pointer(wide, tl.int64), pointer(rows_at, tl.int64), pointer(lengths, tl.int64)
    dims, flag, scale = (
        pointer(dims, tl.int64),
        pointer(flag, tl.int64),
        tl.load(pointer(scale, tl.float64)).to(ELEMENT),
    )
    tile = tl.program_id(0).to(tl.int64)
    table = part_of(tile, tile_starts, tables, STEPS)
    dim = tl.load(dims + table)
    count = tl.load(lengths + table) * dim
    f = (tile - tl.load(tile_starts + table)) * BLOCK + tl.arange(0, BLOCK)
    inside = f < count
    if count < 2147483648:
        row = (f.to(tl.uint32) // dim.to(tl.uint32)).to(tl.int64)
    else:
        row = f // dim
    column = f - row * dim
    address = tl.load(offsets_at + table)
    if tl.load(wide + table) != 0:
        offset = tl.load(pointer(address, tl.int64) + row, mask=inside, other=0)
    else:
        offset = tl.load(pointer(address, tl.int32) + row, mask=inside, other=0).to(tl.int64)
    bad = inside & ((offset < 0) | (offset + dim > size))
    tl.atomic_max(
        flag + f * 0, (tables - table) * 4294967296 + 2147483647 - row, mask=bad & (column == 0), sem="relaxed"
    )
    inside = inside & (bad == 0)
    rows = pointer(tl.load(rows_at + table), ELEMENT)
    if BACK:
        value = tl.load(rows + f, mask=inside, other=0) * scale
        tl.atomic_add(fused + offset + column, value, mask=inside, sem="relaxed")
    else:
        tl.store(rows + f, tl.load(fused + offset + column, mask=inside, other=0), mask=inside)


def _run(fused: Tensor, offsets: list[Tensor], rows: list[Tensor], dims: list[int], scale: float, back: bool) -> None:
    lengths, size = [o.shape[0] for o in offsets], fused.numel()
    tables, floats = len(dims), sum(n * d for n, d in zip(lengths, dims, strict=True))
    columns = min(128, triton.next_power_of_2(max(1, *dims, 1)))
    # By rows, lanes past a row's width are idle: use it only if more than half of the lanes work.
    by_rows = 2 * floats > sum(n * -(-d // columns) for n, d in zip(lengths, dims, strict=True)) * columns
    if by_rows:
        block = max(4, 2048 // columns)
        edges = tiles([n if d else 0 for n, d in zip(lengths, dims, strict=True)], block)
    else:
        edges = tiles([n * d for n, d in zip(lengths, dims, strict=True)], _BLOCK)
    if not edges[-1]:
        return
    flag = launch.new_flag(fused)
    numbers = upload(
        [
            *edges, *(o.data_ptr() for o in offsets), *(o.dtype is torch.int64 for o in offsets),
            *(r.data_ptr() for r in rows), *lengths, *dims, float64_bits(scale),
        ],
        fused,
    )  # fmt: skip
    at = numbers.data_ptr()
    parts = [at, *(at + 8 * (tables + 1 + i * tables) for i in range(6))]
    args = (fused.data_ptr(), size, *parts[:6], flag.data_ptr(), parts[6], tables)
    common: dict[str, Any] = {"BACK": back, "ELEMENT": ELEMENTS[fused.dtype], "STEPS": steps(tables)}
    if by_rows:
        _fused_rows(edges[-1], *args, **common, COLUMNS=columns, BLOCK=block)
    else:
        _fused_gather(edges[-1], *args, **common, BLOCK=_BLOCK)

    def message(at: int) -> str:
        table = tables - (at >> 32)
        row = 2147483647 - (at & 0xFFFFFFFF)
        return (
            f"offsets[{table}][{row}] = {int(offsets[table][row])} + width {dims[table]} is outside the buffer of "
            f"{size} floats"
        )

    launch.raise_if(flag, message)


def fused_gather_embeddings_by_input(fused: Tensor, offsets: list[Tensor], dims: list[int]) -> list[Tensor]:
    fused, offsets = fused.detach().contiguous(), [o.contiguous() for o in offsets]
    outs = [fused.new_empty((o.shape[0], dim)) for o, dim in zip(offsets, dims, strict=True)]
    _run(fused, offsets, outs, dims, 1.0, False)
    return outs


def fused_gather_embeddings_by_input_gradient(
    size: int, grads: list[Tensor], offsets: list[Tensor], dims: list[int], scale: float
) -> Tensor:
    if not grads:
        return torch.zeros(size, dtype=torch.float32, device=None)
    grads, offsets = [g.contiguous() for g in grads], [o.contiguous() for o in offsets]
    out = grads[0].new_zeros(size)
    _run(out, offsets, grads, dims, scale, True)
    return out
