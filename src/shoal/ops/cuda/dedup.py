"""The distinct keys in order of first occurrence, and every key's place among them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.ops.cuda.hashing import insert
from shoal.ops.cuda.launch import blocks


class Distinct(NamedTuple):
    """What `dedup` finds, all on the device: nothing has waited for it."""

    keys: Tensor
    """int64 ``[n]``; the first ``count`` are the distinct keys in order of first occurrence."""
    inverse: Tensor
    """``[n]``: each key's number among the distinct ones, int32 or as asked for."""
    count: Tensor
    """int32 ``[1]``."""
    ends: Tensor
    """int32 ``[n]``: how many distinct keys have occurred up to and including each position."""


@triton.jit
def _mark(slots, places, firsts, marks, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    place = tl.load(places + o, mask=inside, other=0)
    first = tl.load(slots + place, mask=inside, other=0)
    tl.store(firsts + o, first, mask=inside)
    tl.store(marks + o, (first == o).to(tl.int8), mask=inside)


@triton.jit
def _compact(keys, firsts, ends, distinct, inverse, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    first = tl.load(firsts + o, mask=inside, other=0)
    number = tl.load(ends + first, mask=inside, other=1) - 1
    tl.store(inverse + o, number, mask=inside)
    mine = inside & (first == o)
    tl.store(distinct + number, tl.load(keys + o, mask=mine, other=0), mask=mine)


def dedup(keys: Tensor, starts: Tensor | None = None, inverse_dtype: torch.dtype = torch.int32) -> Distinct:
    """The distinct keys of ``keys`` (int64 ``[n]``, contiguous), per part if ``starts`` ``[parts + 1]`` cuts them."""
    n = keys.shape[0]
    slots, places = insert(keys, starts)
    firsts = torch.empty_like(places)
    marks = torch.empty(n, dtype=torch.int8, device=keys.device)
    _mark[blocks(n, 1024)](slots, places, firsts, marks, n, BLOCK=1024)
    ends = torch.cumsum(marks, 0, dtype=torch.int32)
    distinct = torch.empty_like(keys)
    inverse = places if inverse_dtype is torch.int32 else torch.empty(n, dtype=inverse_dtype, device=keys.device)
    _compact[blocks(n, 1024)](keys, firsts, ends, distinct, inverse, n, BLOCK=1024)
    return Distinct(distinct, inverse, ends[-1:] if n else torch.zeros_like(ends[:1]), ends)


def unique_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ids in order of first occurrence, and each id's place among them, int64; waits for their number."""
    ids = ids.contiguous()
    if not ids.numel():
        return ids, torch.empty_like(ids)
    found = dedup(ids, inverse_dtype=torch.int64)
    return found.keys[: int(found.count)], found.inverse
