"""The distinct keys in order of first occurrence, and every key's place among them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.ops.cuda.hashing import insert
from shoal.ops.cuda.launch import Kernel, aligned, blocks, on_its_device, pointer

_BLOCK = 1024
_SCANNED = 8192  # blocks whose counts a single program adds up


class Distinct(NamedTuple):
    """The result of `dedup`; all tensors are on the device, and the host does not wait for them."""

    keys: Tensor
    """int64 ``[n]``; the first ``count`` are the distinct keys in order of first occurrence."""
    inverse: Tensor
    """``[n]``: each key's number among the distinct ones, int32 or ``inverse_dtype``."""
    count: Tensor
    """int32 ``[1]``."""
    ranks: Tensor
    """int32 ``[n]``: how many first occurrences the block of 1024 has up to and including each position."""
    bases: Tensor
    """int32 ``[blocks + 1]``: how many first occurrences come before each block."""


@Kernel
def _mark(slots, places, firsts, ranks, counts, n, BLOCK: tl.constexpr):
    """Mark the first occurrence of each key, and count them within the block."""
    slots, places, firsts = pointer(slots, tl.int32), pointer(places, tl.int32), pointer(firsts, tl.int32)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    place = tl.load(places + o, mask=inside, other=0)
    first = tl.load(slots + place, mask=inside, other=-1)
    tl.store(firsts + o, first, mask=inside)
    mark = (inside & (first == o)).to(tl.int32)
    tl.store(pointer(ranks, tl.int32) + o, tl.cumsum(mark, axis=0), mask=inside)
    tl.store(pointer(counts, tl.int32) + tl.program_id(0), tl.sum(mark, axis=0))


@Kernel
def _scan(counts, bases, n, BLOCK: tl.constexpr):
    """The exclusive running sum of the counts, followed by the total."""
    i = tl.arange(0, BLOCK)
    count = tl.load(pointer(counts, tl.int32) + i, mask=i < n, other=0)
    end = tl.cumsum(count, axis=0)
    tl.store(pointer(bases, tl.int32) + i, end - count, mask=i <= n)


@Kernel
def _compact(
    keys, firsts, ranks, bases, distinct, inverse, n, WIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the distinct keys to their places, and every key's number."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    first = tl.load(pointer(firsts, tl.int32) + o, mask=inside, other=0)
    number = tl.load(pointer(ranks, tl.int32) + first, mask=inside, other=0) - 1
    number += tl.load(pointer(bases, tl.int32) + first // BLOCK, mask=inside, other=0)
    if WIDE:
        tl.store(pointer(inverse, tl.int64) + o, number.to(tl.int64), mask=inside)
    else:
        tl.store(pointer(inverse, tl.int32) + o, number, mask=inside)
    mine = inside & (first == o)
    tl.store(pointer(distinct, tl.int64) + number, tl.load(pointer(keys, tl.int64) + o, mask=mine, other=0), mask=mine)


def dedup(keys: Tensor, starts: Tensor | None = None, inverse_dtype: torch.dtype = torch.int32) -> Distinct:
    """The distinct keys in ``keys`` (int64 ``[n]``, contiguous), per part if ``starts`` ``[parts + 1]`` is given."""
    n = keys.shape[0]
    count = blocks(n, _BLOCK)[0]
    room = aligned(n)
    work = torch.empty(3 * room + 2 * aligned(count + 1), dtype=torch.int32, device=keys.device)
    places = work.data_ptr()
    firsts, ranks = places + 4 * room, places + 8 * room
    counts = places + 12 * room
    bases = counts + 4 * aligned(count + 1)
    slots = insert(keys, places, starts)
    _mark(count, slots.data_ptr(), places, firsts, ranks, counts, n, BLOCK=_BLOCK)
    bases_tensor = work[3 * room + aligned(count + 1) :][: count + 1]
    if count < _SCANNED:
        _scan(1, counts, bases, count, BLOCK=triton.next_power_of_2(count + 1))
    else:
        bases_tensor[0] = 0
        torch.cumsum(work[3 * room :][:count], 0, dtype=torch.int32, out=bases_tensor[1:])
    distinct = torch.empty_like(keys)
    inverse = torch.empty(n, dtype=inverse_dtype, device=keys.device)
    _compact(
        count, keys.data_ptr(), firsts, ranks, bases, distinct.data_ptr(), inverse.data_ptr(), n,
        WIDE=inverse_dtype is torch.int64, BLOCK=_BLOCK,
    )  # fmt: skip
    return Distinct(distinct, inverse, bases_tensor[count:], work[2 * room : 2 * room + n], bases_tensor)


@on_its_device
def unique_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ids in order of first occurrence, and each id's place among them, int64; waits for their number."""
    ids = ids.contiguous()
    if not ids.numel():
        return ids, torch.empty_like(ids)
    found = dedup(ids, inverse_dtype=torch.int64)
    return found.keys[: int(found.count)], found.inverse
