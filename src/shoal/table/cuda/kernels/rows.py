# pyrefly: ignore-errors
"""Rows in kernels: initialize them, copy their weights, and set their weights. One launch per segment of a row.

A row has the layout of the CPU table: the weights of all segments, then the optimizers' states, in 4-byte words.
"""

import triton
import triton.language as tl

from shoal.table.cuda.kernels.index import FRESH, ROW, hash_id

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def uniform(noise, i):
    """Random numbers in [0, 1) with 24 bits; the same as `uniform` in csrc/table/rows/optimizers.isa.cpp."""
    return (hash_id(noise + i.to(tl.uint64) * GOLDEN) >> 40).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def first_weights(id, d, seed, low, high, last, INIT: tl.constexpr, INDEX: tl.constexpr):
    """The initial weights of ids ``[B]`` at columns ``[W]``, a function of only the seed and the id.

    ``INIT`` is the initializer, plus 4 times the first column if rows are slices of wider ones.
    """
    shape_of = id[:, None] + d[None, :]
    if INIT % 4 == 3:
        noise = (id * 0 + seed).to(tl.uint64) ^ hash_id(id)
        stream = hash_id(noise + (INDEX + 1))
        w = tl.minimum(low + uniform(stream[:, None], d[None, :] + INIT // 4) * (high - low), last)
    else:
        w = tl.zeros_like(shape_of).to(tl.float32) + low
    return w


@triton.jit
def _start_rows(
    arena, at, w, here, d, accumulator, beta1, beta2,
    D: tl.constexpr, WIDTH: tl.constexpr, WEIGHT: tl.constexpr, STATE: tl.constexpr, VECTORS: tl.constexpr,
    TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a segment of new rows, which begin at words ``at``: weights ``w`` and the optimizer's initial state."""
    m = here[:, None] & (d < D)[None, :]
    tl.store(arena + at[:, None] + WEIGHT + d[None, :], w, mask=m)
    state = arena + at[:, None] + STATE + d[None, :]
    for v in tl.static_range(VECTORS):
        value = tl.zeros([BLOCK, WIDTH], tl.float32)
        if v == 0:
            value += accumulator
        tl.store(state + v * D, value, mask=m)
    tail = arena + at + (STATE + VECTORS * D)
    if TAIL == 1:  # an int64 of 0
        tl.store(tail, 0.0, mask=here)
        tl.store(tail + 1, 0.0, mask=here)
    elif TAIL == 2:  # powers of the betas
        tl.store(tail, beta1, mask=here)
        tl.store(tail + 1, beta2, mask=here)
    elif TAIL == 3:  # one accumulator
        tl.store(tail, accumulator, mask=here)


@triton.jit(do_not_specialize=["n", "seed"])
def fresh(
    rows, ids, arena, out, n, seed, low, high, last, accumulator, beta1, beta2,
    INIT: tl.constexpr, INDEX: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    WEIGHT: tl.constexpr, STATE: tl.constexpr, VECTORS: tl.constexpr, TAIL: tl.constexpr, DIM: tl.constexpr,
    ALL: tl.constexpr, OUT: tl.constexpr, REFUSED: tl.constexpr, CLEAN: tl.constexpr, BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Initializes a segment of the rows marked FRESH (ALL: of every row).

    OUT also writes their weights to ``out [n, DIM]``, and with REFUSED the initial weights of ids without a row; CLEAN
    removes the mark. A program reads SPAN row numbers, and ends if none of them is fresh.
    """
    begin = tl.program_id(0).to(tl.int64) * SPAN
    spots = begin + tl.arange(0, SPAN)
    codes = tl.load(rows + spots, mask=spots < n, other=0)
    any_here = codes >= 0
    if ALL == 0:
        any_here = any_here & ((codes & FRESH) != 0)
    if REFUSED:
        any_here = any_here | (codes < 0)
    any_here = any_here & (spots < n)
    if tl.max(any_here.to(tl.int32), axis=0) > 0:
        for at_ in range(0, SPAN, BLOCK):
            o = begin + at_ + tl.arange(0, BLOCK)
            code = tl.load(rows + o, mask=o < n, other=-1)
            here = code >= 0
            if ALL == 0:
                here = here & ((code & FRESH) != 0)
            at = (code & ROW).to(tl.int64) * STRIDE
            d = tl.arange(0, WIDTH)
            shown = here
            if REFUSED:
                shown = here | ((code < 0) & (o < n))
            id = tl.load(ids + o, mask=shown, other=0)
            w = first_weights(id, d, seed, low, high, last, INIT, INDEX)
            if OUT:
                m = shown[:, None] & (d < D)[None, :]
                tl.store(out + o[:, None] * DIM + WEIGHT + d[None, :], w, mask=m)
            _start_rows(arena, at, w, here, d, accumulator, beta1, beta2, D, WIDTH, WEIGHT, STATE, VECTORS, TAIL, BLOCK)
            if CLEAN:
                tl.debug_barrier()  # all threads have read `code`
                tl.store(rows + o, code & ROW, mask=here)


@triton.jit(do_not_specialize=["n", "seed"])
def first(
    ids, out, n, seed, low, high, last,
    INIT: tl.constexpr, INDEX: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, WEIGHT: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a segment of the initial weights of ids to ``out [n, DIM]``."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDTH)
    w = first_weights(tl.load(ids + o, mask=o < n, other=0), d, seed, low, high, last, INIT, INDEX)
    tl.store(out + o[:, None] * DIM + WEIGHT + d[None, :], w, mask=(o < n)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["n"])
def gather(
    rows, arena, out, n,
    SKIP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies weights to ``out``; zeros for row -1. SKIP omits rows that `fresh` has written already.

    1: rows marked FRESH; 2: also row -1.
    """
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(rows + o, mask=o < n, other=-1)
    d = tl.arange(0, WIDTH)
    m = (o < n)[:, None] & (d < D)[None, :]
    if SKIP == 1:
        m = m & ((code < 0) | ((code & FRESH) == 0))[:, None]
    elif SKIP == 2:
        m = m & ((code >= 0) & ((code & FRESH) == 0))[:, None]
    at = (code & ROW).to(tl.int64) * STRIDE
    w = tl.load(arena + at[:, None] + d[None, :], mask=m & (code >= 0)[:, None], other=0.0)
    tl.store(out + o[:, None] * D + d[None, :], w, mask=m)


@triton.jit(do_not_specialize=["n"])
def scatter(rows, arena, values, n, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Sets complete rows, or their weights, to ``values``; rows are distinct, -1 is skipped."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(rows + o, mask=o < n, other=-1)
    d = tl.arange(0, WIDTH)
    m = (code >= 0)[:, None] & (d < D)[None, :]
    at = (code & ROW).to(tl.int64) * STRIDE
    w = tl.load(values + o[:, None] * D + d[None, :], mask=m, other=0.0)
    tl.store(arena + at[:, None] + d[None, :], w, mask=m)


@triton.jit(do_not_specialize=["n"])
def assign_sorted(
    rows, order, arena, values, n,
    ADD: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sets weights to the last value of equal rows or, with ADD, adds all of their values in order.

    ``rows`` are sorted, ``order`` has their positions.
    """
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + o, mask=o < n, other=-1)
    d = tl.arange(0, WIDTH)
    inside = (d < D)[None, :]
    at = arena + row.to(tl.int64)[:, None] * STRIDE + d[None, :]
    if ADD:
        before = tl.load(rows + o - 1, mask=(o > 0) & (o < n), other=-1)
        active = (row >= 0) & (before != row)
        w = tl.load(at, mask=active[:, None] & inside, other=0.0)
        head = active
        k = o
        while tl.max(active.to(tl.int32), axis=0) > 0:
            from_ = tl.load(order + k, mask=active, other=0)
            w += tl.load(values + from_[:, None] * D + d[None, :], mask=active[:, None] & inside, other=0.0)
            k += 1
            active = active & (tl.load(rows + k, mask=active & (k < n), other=-1) == row)
        tl.store(at, w, mask=head[:, None] & inside)
    else:
        after = tl.load(rows + o + 1, mask=o + 1 < n, other=-1)
        last = (row >= 0) & (after != row)
        from_ = tl.load(order + o, mask=last, other=0)
        w = tl.load(values + from_[:, None] * D + d[None, :], mask=last[:, None] & inside, other=0.0)
        tl.store(at, w, mask=last[:, None] & inside)
