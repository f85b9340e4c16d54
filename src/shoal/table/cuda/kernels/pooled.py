# pyrefly: ignore-errors
"""Bags of rows of several tables, pooled into columns in one launch for each way to pool: sums, maxima, first rows."""

import triton
import triton.language as tl

from shoal.table.cuda.kernels.located import ARENA, DESCRIBED, PADDING, SEED, UNKNOWN, still
from shoal.table.cuda.kernels.rows import first_weights

# As in `shoal.table.protocol`.
SUM_, MEAN_, FIRSTN_, SQRTN_, MAX_ = (
    tl.constexpr(0),
    tl.constexpr(1),
    tl.constexpr(2),
    tl.constexpr(3),
    tl.constexpr(4),
)


@triton.jit
def _bounds(offsets, bag, m, n, last, told):
    """Where bags, up to the ``last`` one, begin and end, within ``[0, n]``; the host is told of wrong offsets."""
    begin = tl.load(offsets + bag, mask=m, other=0)
    end = tl.load(offsets + bag + 1, mask=m, other=0)
    first_wrong = (bag == 0) & (begin != 0)
    last_wrong = (bag == last) & (end != n)
    wrong = (begin < 0) | (end < begin) | (end > n) | first_wrong | last_wrong
    if tl.max((m & wrong).to(tl.int32), axis=0) > 0:
        begin = tl.minimum(tl.maximum(begin, 0), n)
        end = tl.minimum(end, n)
        tl.store(told + 1, 1)
    return begin, end


@triton.jit
def _values(
    p, here, ids, weights, where, versions, table, of, arena, origin, d, inside, low, high, last,
    WEIGHTED: tl.constexpr, INITIAL: tl.constexpr, INIT: tl.constexpr, INDEX: tl.constexpr, STRIDE: tl.constexpr,
    WEIGHT: tl.constexpr,
):  # fmt: skip
    """The rows of ids at places ``p`` of the batch, and a segment of their numbers times their weights."""
    row = tl.load(where + p, mask=here, other=PADDING)
    row = still(row, ids + p, versions, table, of, here, origin, True)
    at = row.to(tl.int64) * STRIDE + arena
    words = origin.to(tl.pointer_type(tl.float32))
    w = tl.load(words + at[:, None] + WEIGHT + d[None, :], mask=(row >= 0)[:, None] & inside, other=0.0)
    if INITIAL:
        new = here & (row == UNKNOWN)
        if tl.max(new.to(tl.int32), axis=0) > 0:
            id = tl.load(ids + p, mask=new, other=0)
            first = first_weights(id, d, tl.load(of + SEED), low, high, last, INIT, INDEX)
            w = tl.where(new[:, None], first, w)
    if WEIGHTED:
        w *= tl.load(weights + p, mask=here, other=0.0)[:, None]
    return row, w


@triton.jit
def _feature(some, numbers, SOME: tl.constexpr):
    """Which of the features that a launch is of this program has: the neighbours of a program have the same bags."""
    feature = tl.program_id(0) % some
    if SOME:
        feature = tl.load(numbers + feature)
    return feature


@triton.jit(do_not_specialize=["n", "features", "some", "each", "width"])
def pool(
    ids, offsets, weights, tables, columns, combiners, numbers, described, origin, where, versions, out, told, n,
    features, some, each, width, low, high, last,
    SOME: tl.constexpr, WEIGHTED: tl.constexpr, INITIAL: tl.constexpr, KIND: tl.constexpr, INIT: tl.constexpr,
    INDEX: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, WEIGHT: tl.constexpr,
    UNIT: tl.constexpr, BAGS: tl.constexpr,
):  # fmt: skip
    """A segment of the sums of the rows of bags, ``each`` of every feature, into the features' columns of ``out``.

    A program has BAGS bags of one feature, and its neighbours the same bags of others: they write side by side. SOME:
    of the ``some`` features that are ``numbers``. ``columns`` and ``width`` are in units of UNIT floats. KIND is the
    combiner of all of them, -1 when they differ. ``told`` is where the host learns of offsets that are none.
    """
    feature = _feature(some, numbers, SOME)
    place = (tl.program_id(0) // some) * BAGS + tl.arange(0, BAGS)
    m = place < each
    begin, end = _bounds(offsets, feature * each + place, m, n, features * each - 1, told)
    table = tl.load(tables + feature)
    of = described + table * DESCRIBED
    arena = tl.load(of + ARENA) * 4
    d = tl.arange(0, WIDTH)
    inside = (d < D)[None, :]
    total = tl.zeros([BAGS, WIDTH], tl.float32)
    count = tl.zeros([BAGS], tl.int32)
    longest = tl.max(end - begin, axis=0)
    k = longest * 0
    while k < longest:
        p = begin + k
        row, w = _values(
            p, m & (p < end), ids, weights, where, versions, table, of, arena, origin, d, inside, low, high, last,
            WEIGHTED, INITIAL, INIT, INDEX, STRIDE, WEIGHT,
        )  # fmt: skip
        count += (row != PADDING).to(tl.int32)
        total += w
        k += 1
    if KIND != SUM_:
        total = tl.div_rn(total, divisor(count, combiners, feature, KIND)[:, None] + tl.zeros_like(total))
    at = place.to(tl.int64) * width + tl.load(columns + feature)
    tl.store(out + at[:, None] * UNIT + WEIGHT + d[None, :], total, mask=m[:, None] & inside)


@triton.jit(do_not_specialize=["n", "features", "some", "each", "width"])
def pool_largest(
    ids, offsets, weights, tables, columns, numbers, described, origin, where, versions, out, marks, told, n,
    features, some, each, width, low, high, last,
    SOME: tl.constexpr, WEIGHTED: tl.constexpr, INITIAL: tl.constexpr, MARK: tl.constexpr, INIT: tl.constexpr,
    INDEX: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, WEIGHT: tl.constexpr,
    UNIT: tl.constexpr, BYTES: tl.constexpr, BAGS: tl.constexpr,
):  # fmt: skip
    """The same of the largest numbers, and with MARK the marks ``[n, BYTES]`` of the rows that have them.

    WIDTH is at least 8, and covers the columns from the last one before the segment that begins a byte of marks.
    """
    feature = _feature(some, numbers, SOME)
    place = (tl.program_id(0) // some) * BAGS + tl.arange(0, BAGS)
    m = place < each
    begin, end = _bounds(offsets, feature * each + place, m, n, features * each - 1, told)
    table = tl.load(tables + feature)
    of = described + table * DESCRIBED
    arena = tl.load(of + ARENA) * 4
    d = tl.arange(0, WIDTH) - WEIGHT % 8
    inside = ((d >= 0) & (d < D))[None, :]
    best = tl.zeros([BAGS, WIDTH], tl.float32)
    begun = tl.zeros([BAGS], tl.int32)
    longest = tl.max(end - begin, axis=0)
    k = longest * 0
    while k < longest:
        p = begin + k
        row, w = _values(
            p, m & (p < end), ids, weights, where, versions, table, of, arena, origin, d, inside, low, high, last,
            WEIGHTED, INITIAL, INIT, INDEX, STRIDE, WEIGHT,
        )  # fmt: skip
        there = m & (p < end) & (row != PADDING)
        larger = (w > best) | (w != w) | (begun == 0)[:, None]
        best = tl.where(there[:, None] & larger, w, best)
        begun = begun | there.to(tl.int32)
        k += 1
    at = place.to(tl.int64) * width + tl.load(columns + feature)
    tl.store(out + at[:, None] * UNIT + WEIGHT + d[None, :], best, mask=m[:, None] & inside)
    if MARK:
        byte = tl.arange(0, WIDTH // 8) + WEIGHT // 8
        bit = tl.full([WIDTH], 1, tl.int32) << (tl.arange(0, WIDTH) % 8)
        k = longest * 0
        while k < longest:
            p = begin + k
            row, w = _values(
                p, m & (p < end), ids, weights, where, versions, table, of, arena, origin, d, inside, low, high, last,
                WEIGHTED, INITIAL, INIT, INDEX, STRIDE, WEIGHT,
            )  # fmt: skip
            there = m & (p < end) & (row != PADDING)
            bits = tl.where(there[:, None] & inside & (w == best), bit[None, :], 0)
            packed = tl.sum(tl.reshape(bits, [BAGS, WIDTH // 8, 8]), axis=2)
            to = marks + p[:, None] * BYTES + byte[None, :]
            its = there[:, None] & (byte < BYTES)[None, :]
            if WEIGHT % 8 != 0:  # its first byte has columns of the segment before
                packed = packed | tl.load(to, mask=its & (byte == WEIGHT // 8)[None, :], other=0).to(tl.int32)
            tl.store(to, packed.to(tl.uint8), mask=its)
            k += 1


@triton.jit(do_not_specialize=["n", "features", "some", "each", "width"])
def pool_first(
    ids, offsets, weights, tables, columns, lengths, numbers, described, origin, where, versions, out, told, n,
    features, some, each, width, low, high, last,
    SOME: tl.constexpr, WEIGHTED: tl.constexpr, INITIAL: tl.constexpr, PAD: tl.constexpr, INIT: tl.constexpr,
    INDEX: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, WEIGHT: tl.constexpr,
    DIM: tl.constexpr, UNIT: tl.constexpr, BAGS: tl.constexpr,
):  # fmt: skip
    """The same of the first ``lengths`` rows of bags, one after another."""
    feature = _feature(some, numbers, SOME)
    place = (tl.program_id(0) // some) * BAGS + tl.arange(0, BAGS)
    m = place < each
    begin, end = _bounds(offsets, feature * each + place, m, n, features * each - 1, told)
    table = tl.load(tables + feature)
    of = described + table * DESCRIBED
    arena = tl.load(of + ARENA) * 4
    length = tl.load(lengths + feature)
    d = tl.arange(0, WIDTH)
    inside = (d < D)[None, :]
    to = out + (place.to(tl.int64) * width + tl.load(columns + feature)) * UNIT + WEIGHT
    put = tl.zeros([BAGS], tl.int32)
    longest = tl.max(end - begin, axis=0)
    if PAD == 0:
        longest = tl.minimum(longest, length)
    k = longest * 0
    while k < longest:
        p = begin + k
        here = m & (p < end) & (put < length)
        row, w = _values(
            p, here, ids, weights, where, versions, table, of, arena, origin, d, inside, low, high, last,
            WEIGHTED, INITIAL, INIT, INDEX, STRIDE, WEIGHT,
        )  # fmt: skip
        here = here & (row != PADDING)
        tl.store((to + put.to(tl.int64) * DIM)[:, None] + d[None, :], w, mask=here[:, None] & inside)
        put += here.to(tl.int32)
        k += 1
    k = tl.min(tl.where(m, put, length), axis=0)
    while k < length:
        none = tl.zeros([BAGS, WIDTH], tl.float32)
        tl.store((to + k.to(tl.int64) * DIM)[:, None] + d[None, :], none, mask=(m & (put <= k))[:, None] & inside)
        k += 1


@triton.jit
def divisor(count, combiners, feature, KIND: tl.constexpr):
    """What the sum of a bag of ``count`` rows is divided by."""
    rows = tl.maximum(count, 1).to(tl.float32)
    if KIND == MEAN_:
        by = rows
    elif KIND == SQRTN_:
        by = tl.sqrt_rn(rows)
    else:
        kind = tl.load(combiners + feature)
        by = tl.where(kind == MEAN_, rows, tl.where(kind == SQRTN_, tl.sqrt_rn(rows), 1.0))
    return by
