# pyrefly: ignore-errors
"""Sums of the gradients of equal rows, whose keys are sorted so that equal ones form a run.

A first kernel sums within blocks: runs that are in one block are complete. If a run crosses blocks, the sum of its last
block is left in ``closed``, those of its other blocks in ``opened``; a second kernel adds these up.
"""

import triton
import triton.language as tl


@triton.jit
def _join(head, total, head2, total2):
    return head | head2, tl.where(head2 != 0, total2, total + total2)


@triton.jit
def runs_of(keys, order, n, BLOCK: tl.constexpr):
    """A block of sorted keys: places, keys, original positions, and masks.

    The masks: heads of runs (int32), the end of a run that continues in the next block, the end of a run from the
    previous block, and the ends of runs that began in this block.
    """
    i = tl.arange(0, BLOCK)
    o = tl.program_id(0).to(tl.int64) * BLOCK + i
    key = tl.load(keys + o, mask=o < n, other=-1)
    before = tl.load(keys + o - 1, mask=(o > 0) & (o < n), other=-1)
    after = tl.load(keys + o + 1, mask=o + 1 < n, other=-1)
    position = tl.load(order + o, mask=o < n, other=0)
    here = key >= 0
    head = (before != key).to(tl.int32)
    begun = tl.cumsum(head, axis=0) > 0
    tail = here & (after != key)
    carried = here & (after == key) & (i == BLOCK - 1)
    return o, key, position, head, carried, tail & (begun == 0), tail & begun


@triton.jit
def sums_of_runs(
    g, head, carried, ended, opened, closed, d, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sums of gradients from the head of each run on; partial sums of runs that cross blocks are stored."""
    heads = head[:, None] + tl.zeros([BLOCK, WIDTH], tl.int32)
    _, total = tl.associative_scan((heads, g), 0, _join)
    partial = tl.program_id(0).to(tl.int64) * WIDTH + d[None, :] + tl.zeros([BLOCK, 1], tl.int64)
    tl.store(opened + partial, total, mask=carried[:, None] & inside)
    tl.store(closed + partial, total, mask=ended[:, None] & inside)
    return total


@triton.jit
def crossing_runs(keys, n, TILE: tl.constexpr, TILES: tl.constexpr):
    """The blocks of a program, their last keys, and in which of them a run begins that crosses into the next block."""
    tile = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    begin = tile * TILE
    end = begin + TILE
    key = tl.load(keys + end - 1, mask=end < n, other=-1)
    crosses = tl.load(keys + end, mask=end < n, other=-1) == key
    before = tl.load(keys + begin - 1, mask=(begin > 0) & (end < n), other=-1)
    return tile, key, (key >= 0) & crosses & (before != key)


@triton.jit
def sum_across(
    key, mine, tile, keys, opened, closed, n, d, inside,
    WIDTH: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The sums of runs that cross blocks. Most end within two blocks; for longer ones SPAN sums are read at once."""
    total = tl.load(opened + tile[:, None] * WIDTH + d[None, :], mask=mine[:, None] & inside, other=0.0)
    further = mine
    k = tile + 1
    for _ in tl.static_range(2):
        here = further
        further = here & (tl.load(keys + (k + 1) * TILE, mask=here & ((k + 1) * TILE < n), other=-1) == key)
        part = tl.where(further, opened + k * WIDTH, closed + k * WIDTH)
        total += tl.load(part[:, None] + d[None, :], mask=here[:, None] & inside, other=0.0)
        k += 1
    if tl.max(further.to(tl.int32), axis=0) > 0:
        for which in range(TILES):
            own = further & (tl.arange(0, TILES) == which)
            if tl.max(own.to(tl.int32), axis=0) > 0:
                the_key = tl.max(tl.where(own, key, -1), axis=0)
                first = tl.max(tl.where(own, k, 0), axis=0)
                rest = _rest_of(the_key, first, keys, opened, closed, n, d, inside, WIDTH, TILE, SPAN)
                total += tl.where(own[:, None], rest, 0.0)
    return total


@triton.jit
def _rest_of(key, k, keys, opened, closed, n, d, inside, WIDTH: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr):
    """``[1, W]``: the sum of a run over the blocks from ``k`` on."""
    j = tl.arange(0, SPAN)
    total = tl.zeros([1, WIDTH], tl.float32)
    count = SPAN
    while count == SPAN:
        stop = (k + j + 1) * TILE
        further = tl.load(keys + stop, mask=stop < n, other=-1) == key  # True for some blocks, then False
        count = tl.sum(further.to(tl.int32), axis=0)
        whole = tl.load(opened + (k + j)[:, None] * WIDTH + d[None, :], mask=further[:, None] & inside, other=0.0)
        last = inside & (count < SPAN)
        end = tl.load(closed + (k + count) * WIDTH + d[None, :], mask=last, other=0.0)
        total += tl.sum(whole, axis=0)[None, :] + end
        k += SPAN
    return total
