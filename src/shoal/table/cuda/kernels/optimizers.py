# pyrefly: ignore-errors
"""Row optimizers fused with the read and write of the row: one launch per segment of a batch of gradients."""

import triton
import triton.language as tl

from shoal.table.cuda.kernels.index import FRESH, ROW, hash_id
from shoal.table.cuda.kernels.rows import first_weights
from shoal.table.cuda.kernels.runs import crossing_runs, runs_of, sum_across, sums_of_runs
from shoal.table.cuda.kernels.steps import round_to_half, step_rows


@triton.jit
def _step(
    w, g, at, arena, known, here, inside, d, position, lr1, lr2, numbers, step, noise,
    OPT: tl.constexpr, NESTEROV: tl.constexpr, DECOUPLED: tl.constexpr, ROUND: tl.constexpr, ONE_BIT: tl.constexpr,
    INDEX: tl.constexpr, D: tl.constexpr, WEIGHT: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """`step_rows`, with the hash-net gradient before it and stochastic rounding after it; stores the weights."""
    if ONE_BIT:
        amplitude = numbers[9]
        scale = numbers[10]
        t = 1 - 2 / (tl.exp(2 * scale * w) + 1)
        g = g * amplitude * scale * (1 - t * t)
    base = arena + at + STATE
    w = step_rows(w, g, base, known, here, inside, d, lr1, lr2, numbers, step, OPT, NESTEROV, DECOUPLED, D)
    if ROUND:
        own = hash_id(((position * 0 + noise).to(tl.uint64) ^ hash_id(position)) + INDEX)
        w = round_to_half(w, d, own)
    tl.store(arena + at[:, None] + WEIGHT + d[None, :], w, mask=here[:, None] & inside)


@triton.jit
def _fetch_ahead(base, here, WORDS: tl.constexpr, LINES: tl.constexpr):
    """Prefetches WORDS words from each address into the cache, without registers or a wait.

    LINES, a power of two, is the number of cache lines of 32 words, plus one because a row can begin within a line.
    """
    if WORDS > 0:
        word = tl.minimum(tl.arange(0, LINES) * 32, WORDS - 1)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r",
            [(base[:, None] + word[None, :]).to(tl.int64), here[:, None].to(tl.int32) + word[None, :] * 0],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _rates(numbers, rates, table_of, position, here, MULTI: tl.constexpr):
    """The learning rates as ``[B]`` and ``[B, 1]``, one per row by its table (MULTI); else one scalar, twice."""
    lr1 = numbers[0]
    lr2 = numbers[0]
    if MULTI:
        table = tl.load(table_of + position, mask=here, other=0)
        lr1 = tl.load(rates + table, mask=here, other=0.0)
        lr2 = lr1[:, None]
    return lr1, lr2


@triton.jit(do_not_specialize=["n", "seed", "step", "noise"])
def update_distinct(
    rows, ids, table_of, rates, grads, arena, n, seed, first, numbers, step, noise,
    INIT: tl.constexpr, MULTI: tl.constexpr, OPT: tl.constexpr, NESTEROV: tl.constexpr, DECOUPLED: tl.constexpr,
    ROUND: tl.constexpr, ONE_BIT: tl.constexpr, INDEX: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    STRIDE: tl.constexpr, WEIGHT: tl.constexpr, STATE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A step on distinct rows; those marked FRESH start from their initializer, ``first``."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(rows + position, mask=position < n, other=-1)
    here = code >= 0
    known = here & ((code & FRESH) == 0)
    at = (code & ROW).to(tl.int64) * STRIDE
    d = tl.arange(0, WIDTH)
    inside = (d < D)[None, :]
    m = here[:, None] & inside
    g = tl.load(grads + position[:, None] * DIM + WEIGHT + d[None, :], mask=m, other=0.0)
    w = tl.load(arena + at[:, None] + WEIGHT + d[None, :], mask=known[:, None] & inside, other=0.0)
    new = here & (known == 0)
    if tl.max(new.to(tl.int32), axis=0) > 0:
        id = tl.load(ids + position, mask=new, other=0)
        w0 = first_weights(id, d, seed, first[0], first[1], first[2], INIT, INDEX)
        w = tl.where(new[:, None] & inside, w0, w)
    lr1, lr2 = _rates(numbers, rates, table_of, position, here, MULTI)
    _step(
        w, g, at, arena, known, here, inside, d, position, lr1, lr2, numbers, step, noise, OPT, NESTEROV, DECOUPLED,
        ROUND, ONE_BIT, INDEX, D, WEIGHT, STATE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "step", "noise"])
def update_each(
    rows, order, table_of, rates, grads, arena, n, numbers, step, noise,
    MULTI: tl.constexpr, OPT: tl.constexpr, NESTEROV: tl.constexpr, DECOUPLED: tl.constexpr, ROUND: tl.constexpr,
    ONE_BIT: tl.constexpr, INDEX: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    WEIGHT: tl.constexpr, STATE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A step for every occurrence of a row, in input order. ``rows`` are sorted, ``order`` has their positions."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + k, mask=k < n, other=-1)
    before = tl.load(rows + k - 1, mask=(k > 0) & (k < n), other=-1)
    active = (row >= 0) & (before != row)
    at = tl.where(active, row, 0).to(tl.int64) * STRIDE
    d = tl.arange(0, WIDTH)
    inside = (d < D)[None, :]
    while tl.max(active.to(tl.int32), axis=0) > 0:
        m = active[:, None] & inside
        position = tl.load(order + k, mask=active, other=0)
        g = tl.load(grads + position[:, None] * DIM + WEIGHT + d[None, :], mask=m, other=0.0)
        w = tl.load(arena + at[:, None] + WEIGHT + d[None, :], mask=m, other=0.0)
        lr1, lr2 = _rates(numbers, rates, table_of, position, active, MULTI)
        _step(
            w, g, at, arena, active, active, inside, d, position, lr1, lr2, numbers, step, noise, OPT, NESTEROV,
            DECOUPLED, ROUND, ONE_BIT, INDEX, D, WEIGHT, STATE,
        )  # fmt: skip
        tl.debug_barrier()  # the next step reads values that other threads wrote
        k += 1
        active = active & (tl.load(rows + k, mask=active & (k < n), other=-1) == row)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["n", "step", "noise"])
def update_summed(
    rows, order, table_of, rates, grads, arena, opened, closed, n, numbers, step, noise,
    MULTI: tl.constexpr, OPT: tl.constexpr, NESTEROV: tl.constexpr, DECOUPLED: tl.constexpr, ROUND: tl.constexpr,
    ONE_BIT: tl.constexpr, INDEX: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    WEIGHT: tl.constexpr, STATE: tl.constexpr, HELD: tl.constexpr, LINES: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums the gradients of equal rows in order and steps each row once, for rows whose gradients are in one block.

    ``rows`` are sorted, ``order`` has their positions. Partial sums of rows that cross blocks go to ``opened`` and
    ``closed`` for `update_crossing`; see runs.py.
    """
    o, row, position, head, carried, ended, alone = runs_of(rows, order, n, BLOCK)
    here = row >= 0
    at = tl.where(alone, row, 0).to(tl.int64) * STRIDE
    d = tl.arange(0, WIDTH)
    inside = (d < D)[None, :]
    # All distant reads start before the first wait.
    g = tl.load(grads + position[:, None] * DIM + WEIGHT + d[None, :], mask=here[:, None] & inside, other=0.0)
    _fetch_ahead(arena + at + STATE, alone, HELD, LINES)
    if HELD > 0:
        _fetch_ahead(arena + at + WEIGHT, alone, D, LINES)
    total = sums_of_runs(g, head, carried, ended, opened, closed, d, inside, WIDTH, BLOCK)
    w = tl.load(arena + at[:, None] + WEIGHT + d[None, :], mask=alone[:, None] & inside, other=0.0)
    lr1, lr2 = _rates(numbers, rates, table_of, position, alone, MULTI)
    if ROUND:  # the noise depends on the first position of the id
        first = tl.associative_scan(tl.where(head != 0, o, 0), 0, _larger)
        position = tl.load(order + first, mask=alone, other=0)
    _step(
        w, total, at, arena, alone, alone, inside, d, position, lr1, lr2, numbers, step, noise, OPT, NESTEROV,
        DECOUPLED, ROUND, ONE_BIT, INDEX, D, WEIGHT, STATE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "step", "noise"])
def update_crossing(
    rows, order, table_of, rates, opened, closed, arena, n, numbers, step, noise,
    MULTI: tl.constexpr, OPT: tl.constexpr, NESTEROV: tl.constexpr, DECOUPLED: tl.constexpr, ROUND: tl.constexpr,
    ONE_BIT: tl.constexpr, INDEX: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    WEIGHT: tl.constexpr, STATE: tl.constexpr, HELD: tl.constexpr, LINES: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Steps the rows whose gradients are in several blocks of `update_summed`; a program has TILES blocks."""
    tile, row, mine = crossing_runs(rows, n, TILE, TILES)
    begin = tile * TILE
    if tl.max(mine.to(tl.int32), axis=0) > 0:
        d = tl.arange(0, WIDTH)
        inside = (d < D)[None, :]
        at = tl.where(mine, row, 0).to(tl.int64) * STRIDE
        _fetch_ahead(arena + at + STATE, mine, HELD, LINES)
        w = tl.load(arena + at[:, None] + WEIGHT + d[None, :], mask=mine[:, None] & inside, other=0.0)
        position = tl.load(order + begin + TILE - 1, mask=mine, other=0)
        total = sum_across(row, mine, tile, rows, opened, closed, n, d, inside, WIDTH, TILE, TILES, SPAN)
        lr1, lr2 = _rates(numbers, rates, table_of, position, mine, MULTI)
        if ROUND:
            spots = begin[:, None] + tl.arange(0, TILE)[None, :]
            same = tl.load(rows + spots, mask=mine[:, None], other=-1) == row[:, None]
            first = tl.min(tl.where(same, spots, n), axis=1)
            position = tl.load(order + first, mask=mine, other=0)
        _step(
            w, total, at, arena, mine, mine, inside, d, position, lr1, lr2, numbers, step, noise, OPT, NESTEROV,
            DECOUPLED, ROUND, ONE_BIT, INDEX, D, WEIGHT, STATE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def check_gradients(
    grads, drop, bad, n, WANT_DROP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Adds the number of rows with NaN or infinity to ``bad``; WANT_DROP also marks them in ``drop``."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDTH)
    m = (o < n)[:, None] & (d < D)[None, :]
    g = tl.load(grads + o[:, None] * D + d[None, :], mask=m, other=0.0)
    finite = tl.abs(g) < float("inf")
    wrong = tl.max((finite == 0).to(tl.int32), axis=1)
    if WANT_DROP:
        tl.store(drop + o, wrong.to(tl.uint8), mask=o < n)
    count = tl.sum(wrong, axis=0)
    if count > 0:
        tl.atomic_add(bad, count.to(tl.int64), sem="relaxed")
