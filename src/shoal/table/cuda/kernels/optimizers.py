# pyrefly: ignore-errors
"""Row optimizers fused with the read and write of the row: one launch is one segment of a batch of gradients."""

import triton
import triton.language as tl

from shoal.table.cuda.kernels.index import FRESH, ROW, hash_id
from shoal.table.cuda.kernels.rows import first_weights
from shoal.table.cuda.kernels.steps import round_to_half, step_rows


@triton.jit
def _step(
    w, g, at, arena, known, here, inside, d, position, lr1, lr2, numbers, step, noise,
    OPT: tl.constexpr, NESTEROV: tl.constexpr, DECOUPLED: tl.constexpr, ROUND: tl.constexpr, ONE_BIT: tl.constexpr,
    INDEX: tl.constexpr, D: tl.constexpr, WEIGHT: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """`step_rows` with what stands around it: the hash-net gradient before, stochastic rounding after; stores ``w``."""
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
    """Has WORDS words from each address on brought into the cache; costs neither registers nor a wait.

    LINES is a power of two: of 32 words each, and one more, since rows begin anywhere in a line.
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
    """The learning rate, for rows and for weights: one for all, or that of each row's table."""
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
    """A step of rows that are all different; those marked FRESH start from their initializer, ``first``."""
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
        tl.debug_barrier()  # the next step reads what other threads of this program wrote
        k += 1
        active = active & (tl.load(rows + k, mask=active & (k < n), other=-1) == row)


@triton.jit
def _join(head, total, head2, total2):
    return head | head2, tl.where(head2 != 0, total2, total + total2)


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

    ``rows`` are sorted, ``order`` has their positions. The sum of a row that goes on in the next block is left in
    ``opened``, what a block adds to a row from the block before in ``closed``; `update_crossing` does the rest.
    """
    tile = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    o = tile * BLOCK + i
    row = tl.load(rows + o, mask=o < n, other=-1)
    before = tl.load(rows + o - 1, mask=(o > 0) & (o < n), other=-1)
    after = tl.load(rows + o + 1, mask=o + 1 < n, other=-1)
    position = tl.load(order + o, mask=o < n, other=0)
    here = row >= 0
    head = (before != row).to(tl.int32)
    begun = tl.cumsum(head, axis=0) > 0
    tail = here & (after != row)
    alone = tail & begun
    at = tl.where(alone, row, 0).to(tl.int64) * STRIDE
    d = tl.arange(0, WIDTH)
    inside = (d < D)[None, :]
    # All that is read from afar is under way before the first of it is waited for.
    g = tl.load(grads + position[:, None] * DIM + WEIGHT + d[None, :], mask=here[:, None] & inside, other=0.0)
    _fetch_ahead(arena + at + STATE, alone, HELD, LINES)
    if HELD > 0:
        _fetch_ahead(arena + at + WEIGHT, alone, D, LINES)
    heads = head[:, None] + tl.zeros([BLOCK, WIDTH], tl.int32)
    _, total = tl.associative_scan((heads, g), 0, _join)
    partial = tile * WIDTH + d[None, :] + tl.zeros([BLOCK, 1], tl.int64)
    tl.store(opened + partial, total, mask=(here & (after == row) & (i == BLOCK - 1))[:, None] & inside)
    tl.store(closed + partial, total, mask=(tail & (begun == 0))[:, None] & inside)
    w = tl.load(arena + at[:, None] + WEIGHT + d[None, :], mask=alone[:, None] & inside, other=0.0)
    lr1, lr2 = _rates(numbers, rates, table_of, position, alone, MULTI)
    if ROUND:  # the noise follows from where the id came first
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
    """Steps the rows whose gradients are in several blocks of `update_summed`; a program looks at TILES blocks.

    Most of them end one or two blocks on. An id may have been in thousands of them: then SPAN sums are taken at once.
    """
    each = tl.arange(0, TILES)
    tile = tl.program_id(0).to(tl.int64) * TILES + each
    begin = tile * TILE
    end = begin + TILE
    row = tl.load(rows + end - 1, mask=end < n, other=-1)
    goes_on = tl.load(rows + end, mask=end < n, other=-1) == row
    before = tl.load(rows + begin - 1, mask=(begin > 0) & (end < n), other=-1)
    mine = (row >= 0) & goes_on & (before != row)
    if tl.max(mine.to(tl.int32), axis=0) > 0:
        d = tl.arange(0, WIDTH)
        inside = (d < D)[None, :]
        at = tl.where(mine, row, 0).to(tl.int64) * STRIDE
        _fetch_ahead(arena + at + STATE, mine, HELD, LINES)
        w = tl.load(arena + at[:, None] + WEIGHT + d[None, :], mask=mine[:, None] & inside, other=0.0)
        position = tl.load(order + end - 1, mask=mine, other=0)
        total = tl.load(opened + tile[:, None] * WIDTH + d[None, :], mask=mine[:, None] & inside, other=0.0)
        further = mine
        k = tile + 1
        for _ in tl.static_range(2):
            here = further
            further = here & (tl.load(rows + (k + 1) * TILE, mask=here & ((k + 1) * TILE < n), other=-1) == row)
            part = tl.where(further, opened + k * WIDTH, closed + k * WIDTH)
            total += tl.load(part[:, None] + d[None, :], mask=here[:, None] & inside, other=0.0)
            k += 1
        if tl.max(further.to(tl.int32), axis=0) > 0:
            for which in range(TILES):
                own = further & (each == which)
                if tl.max(own.to(tl.int32), axis=0) > 0:
                    the_row = tl.max(tl.where(own, row, -1), axis=0)
                    first = tl.max(tl.where(own, k, 0), axis=0)
                    rest = _rest_of(the_row, first, rows, opened, closed, n, d, inside, WIDTH, TILE, SPAN)
                    total += tl.where(own[:, None], rest, 0.0)
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


@triton.jit
def _rest_of(row, k, rows, opened, closed, n, d, inside, WIDTH: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr):
    """``[1, W]``: what blocks from ``k`` on have of a row that is in all of the first."""
    j = tl.arange(0, SPAN)
    total = tl.zeros([1, WIDTH], tl.float32)
    count = SPAN
    while count == SPAN:
        stop = (k + j + 1) * TILE
        further = tl.load(rows + stop, mask=stop < n, other=-1) == row  # of sorted rows: some, then none
        count = tl.sum(further.to(tl.int32), axis=0)
        whole = tl.load(opened + (k + j)[:, None] * WIDTH + d[None, :], mask=further[:, None] & inside, other=0.0)
        last = inside & (count < SPAN)
        end = tl.load(closed + (k + count) * WIDTH + d[None, :], mask=last, other=0.0)
        total += tl.sum(whole, axis=0)[None, :] + end
        k += SPAN
    return total


@triton.jit(do_not_specialize=["n"])
def check_gradients(
    grads, drop, bad, n, WANT_DROP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Counts rows that hold NaN or infinity in ``bad``; with WANT_DROP marks them in ``drop``."""
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
