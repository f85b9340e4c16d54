"""`aligned_flat_concat` of tensors without gradients: one launch joins, pads and scales all of them."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from shoal.ops.cuda.launch import ELEMENTS, Kernel, float64_bits, part_of, pointer, steps, tiles, upload

_BLOCK = 2048


@Kernel
def _join(
    tile_starts, addresses, lengths, places, out, scale, parts,
    ALIGN: tl.constexpr, ELEMENT: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a block of one tensor to its place, times ``scale``, with zeros up to the next place."""
    tile_starts, addresses = pointer(tile_starts, tl.int64), pointer(addresses, tl.int64)
    lengths, places = pointer(lengths, tl.int64), pointer(places, tl.int64)
    tile = tl.program_id(0).to(tl.int64)
    part = part_of(tile, tile_starts, parts, STEPS)
    length = tl.load(lengths + part)
    i = (tile - tl.load(tile_starts + part)) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(pointer(tl.load(addresses + part), ELEMENT) + i, mask=i < length, other=0)
    value *= tl.load(pointer(scale, tl.float64)).to(ELEMENT)
    room = (length + ALIGN - 1) // ALIGN * ALIGN
    place = tl.multiple_of(tl.load(places + part), ALIGN)
    tl.store(tl.multiple_of(pointer(out, ELEMENT), 16) + place + i, value, mask=i < room)


def flat_concat(parts: list[Tensor], scale: float, align: int) -> Tensor:
    """Concatenate tensors of one dtype, float32 or float64, on one device."""
    parts = [part.contiguous() for part in parts]
    lengths = [part.numel() for part in parts]
    places = [0]
    for length in lengths:
        places.append(places[-1] + -(-length // align) * align)
    out = parts[0].new_empty(places[-1])
    edges = tiles(lengths, _BLOCK)  # the zeros after a tensor are in its last block
    if edges[-1]:
        count = len(parts)
        addresses = (part.data_ptr() for part in parts)
        numbers = upload([*edges, *addresses, *lengths, *places[:-1], float64_bits(scale)], out)
        at = numbers.data_ptr()
        first, second, third = (at + 8 * (count + 1 + i * count) for i in range(3))
        _join(
            edges[-1], at, first, second, third, out.data_ptr(), third + 8 * count, count, ALIGN=align,
            ELEMENT=ELEMENTS[out.dtype], STEPS=steps(count), BLOCK=_BLOCK,
        )  # fmt: skip
    return out
