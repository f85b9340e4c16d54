"""A scratch hash table of positions: finds the first element that is equal to each element.

A slot holds the position of an element, -1 while it is free. Elements claim slots by compare-and-swap with linear
probing; equal ones lower the position to the first of them. A claimed slot keeps its key, so the second pass needs no
probing. Elements of different parts (tables, rows) are never equal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.errors import ConfigError
from shoal.ops.cuda.launch import INTERPRETED, Fast, Kernel, blocks, part_of, pointer, steps

_MOST = 1 << 30  # so that 31 bits can number the slots


@triton.jit
def mix(key):
    """Hash int64 keys, with every bit affecting the result."""
    h = key.to(tl.uint64)
    h ^= h >> 33
    h *= 0xFF51AFD7ED558CCD
    h ^= h >> 33
    h *= 0xC4CEB9FE1A85EC53
    h ^= h >> 33
    return h


@triton.jit
def _claim(slot, value, wanted, spare, INLINE: tl.constexpr):
    """Store the value in a wanted slot that is free (-1); returns the slot's previous value."""
    free = value * 0 - 1
    if INLINE:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $4, 0; mov.b32 $0, $2;"
            " @p atom.global.relaxed.gpu.cas.b32 $0, [$1], $2, $3; }",
            "=&r,l,r,r,r",
            [slot.to(tl.int64), free, value, wanted.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    # tl.atomic_cas has no mask: lanes that want no slot swap in a spare place of their own.
    return tl.atomic_cas(tl.where(wanted, slot, spare), tl.where(wanted, free, free - 1), value, sem="relaxed")


@Kernel
def _clear(slots, pairs, BLOCK: tl.constexpr):
    """Free all slots, two per store instruction."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(pointer(slots, tl.int64) + i, (i * 0 - 1).to(tl.int64), mask=i < pairs)


@Kernel
def _insert(
    keys, slots, places, n, mask, starts, parts,
    PARTS: tl.constexpr, STEPS: tl.constexpr, INLINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    keys, slots, places = pointer(keys, tl.int64), pointer(slots, tl.int32), pointer(places, tl.int32)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    todo = o < n
    key = tl.load(keys + o, mask=todo, other=0)
    h = mix(key)
    begin = o * 0
    end = o * 0 + n.to(tl.int32)
    if PARTS:
        starts = pointer(starts, tl.int64)
        part = part_of(o.to(tl.int64), starts, parts, STEPS)
        begin = tl.load(starts + part, mask=todo, other=0).to(tl.int32)
        end = tl.load(starts + part + 1, mask=todo, other=0).to(tl.int32)
        h += part.to(tl.uint64) * 0x9E3779B97F4A7C15
        h ^= h >> 29
    mask = mask.to(tl.int32)
    at = h.to(tl.int32) & mask
    while tl.max(todo.to(tl.int32), axis=0) > 0:
        found = tl.load(slots + at, mask=todo, other=0, volatile=True)
        free = todo & (found == -1)
        before = _claim(slots + at, o, free, places + o, INLINE)
        won = free & (before == -1)
        found = tl.where(free, before, found)
        other = tl.load(keys + found, mask=todo & (found >= 0), other=0)
        same = won | (todo & (found >= 0) & (other == key) & (found >= begin) & (found < end))
        tl.atomic_min(slots + at, o, mask=same & (found > o), sem="relaxed")
        tl.store(places + o, at, mask=same)
        todo = todo & (same == 0)
        at = tl.where(todo, (at + 1) & mask, at)


@Fast
def _find(keys, slots, wanted, places, n, mask, flag, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    todo = o < n
    key = tl.load(wanted + o, mask=todo, other=0)
    at = mix(key).to(tl.int32) & mask
    while tl.max(todo.to(tl.int32), axis=0) > 0:
        found = tl.load(slots + at, mask=todo, other=-1)
        other = tl.load(keys + found, mask=todo & (found >= 0), other=0)
        same = todo & (found >= 0) & (other == key)
        missing = todo & (found < 0)
        tl.store(places + o, found.to(tl.int64), mask=same | missing)
        tl.atomic_max(flag + o * 0, n - o, mask=missing, sem="relaxed")
        todo = todo & (same == 0) & (missing == 0)
        at = tl.where(todo, (at + 1) & mask, at)


def capacity(n: int) -> int:
    """Slots for ``n`` elements: a power of two, at most half full, or a quarter while that fits in the cache."""
    return max(64, 1 << ((4 if n <= 1 << 21 else 2) * max(1, n) - 1).bit_length())


def insert(keys: Tensor, places: int, starts: Tensor | None = None) -> Tensor:
    """Hash at most 2^30 contiguous keys; the slot of every key is written to address ``places``, int32 ``[n]``.

    ``starts`` ``[parts + 1]`` cuts the keys into independent parts. In the returned slots, the slot of key ``i`` holds
    the position of the first key that is equal to it.
    """
    size = capacity(keys.shape[0])
    slots = torch.empty(size, dtype=torch.int32, device=keys.device)
    insert_at(keys, slots.data_ptr(), size, places, starts)
    return slots


def insert_at(keys: Tensor, slots: int, size: int, places: int, starts: Tensor | None = None) -> None:
    """`insert` with room for ``size`` slots at address ``slots``, a multiple of 8."""
    n = keys.shape[0]
    if n > _MOST:
        raise ConfigError(f"a call on a GPU must have at most {_MOST} ids, got {n}; split the batch")
    _clear(blocks(size // 2, 4096)[0], slots, size // 2, BLOCK=4096)
    parts = 1 if starts is None else starts.shape[0] - 1
    _insert(
        blocks(n, 128)[0], keys.data_ptr(), slots, places, n, size - 1,
        0 if starts is None else starts.data_ptr(), parts, warps=4,
        PARTS=parts > 1, STEPS=steps(parts), INLINE=not INTERPRETED, BLOCK=128,
    )  # fmt: skip


def find(keys: Tensor, wanted: Tensor, flag: Tensor) -> Tensor:
    """The first position of each wanted key in ``keys``, int64; -1 for a missing one, and ``n - i`` in the flag."""
    scratch = torch.empty(keys.shape[0], dtype=torch.int32, device=keys.device)
    slots = insert(keys, scratch.data_ptr())
    n = wanted.numel()
    places = torch.empty(n, dtype=torch.int64, device=wanted.device)
    _find[blocks(n, 128)](keys, slots, wanted, places, n, slots.shape[0] - 1, flag, BLOCK=128)
    return places
