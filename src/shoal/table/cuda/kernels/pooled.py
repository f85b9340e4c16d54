# pyrefly: ignore-errors
"""Bags of rows from several tables, pooled into columns in one launch per kind of pooling: sums, maxima, first rows."""

import triton
import triton.language as tl

from shoal.table.cuda.kernels.located import ARENA, DESCRIBED, PADDING, SEED, UNKNOWN, still
from shoal.table.cuda.kernels.rows import first_weights

# As in `shoal.table.protocol`.
SUM_, MEAN_, FIRSTN_, SQRTN_, MAX_ = (tl.constexpr(number) for number in range(5))

REPORT_OFFSETS = tl.constexpr(1)  # word of the report to the host; see changed.py


@triton.jit
def _bags(
    offsets, tables, numbers, described, n, features, some, each, report, SOME: tl.constexpr, BAGS: tl.constexpr
):  # fmt: skip
    """The bags of a program: their feature, places, mask, bounds within ``[0, n]``, and the feature's table, its
    description and the address of its rows.

    Reports invalid offsets to the host. Neighbouring programs have the same bags of different features.
    """
    feature = tl.program_id(0) % some
    if SOME:
        feature = tl.load(numbers + feature)
    place = (tl.program_id(0) // some) * BAGS + tl.arange(0, BAGS)
    m = place < each
    bag = feature * each + place
    begin = tl.load(offsets + bag, mask=m, other=0)
    end = tl.load(offsets + bag + 1, mask=m, other=0)
    first_wrong = (bag == 0) & (begin != 0)
    last_wrong = (bag == features * each - 1) & (end != n)
    wrong = (begin < 0) | (end < begin) | (end > n) | first_wrong | last_wrong
    if tl.max((m & wrong).to(tl.int32), axis=0) > 0:
        begin = tl.minimum(tl.maximum(begin, 0), n)
        end = tl.minimum(end, n)
        tl.store(report + REPORT_OFFSETS, 1)
    table = tl.load(tables + feature)
    of = described + table * DESCRIBED
    return feature, place, m, begin, end, table, of, tl.load(of + ARENA) * 4


@triton.jit
def _values(
    p, here, ids, weights, where, versions, table, of, arena, origin, d, inside, low, high, last,
    WEIGHTED: tl.constexpr, INITIAL: tl.constexpr, INIT: tl.constexpr, INDEX: tl.constexpr, STRIDE: tl.constexpr,
    WEIGHT: tl.constexpr,
):  # fmt: skip
    """The rows of the ids at places ``p`` of the batch, and a segment of their values times their weights."""
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


@triton.jit(do_not_specialize=["n", "features", "some", "each", "width"])
def pool(
    ids, offsets, weights, tables, columns, combiners, numbers, described, origin, where, versions, out, report, n,
    features, some, each, width, low, high, last,
    SOME: tl.constexpr, WEIGHTED: tl.constexpr, INITIAL: tl.constexpr, KIND: tl.constexpr, INIT: tl.constexpr,
    INDEX: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, WEIGHT: tl.constexpr,
    UNIT: tl.constexpr, BAGS: tl.constexpr,
):  # fmt: skip
    """Writes a segment of the sums of bags, ``each`` bags of every feature, to the features' columns of ``out``.

    A program has BAGS bags of one feature, and its neighbours the same bags of other features, so that their writes are
    adjacent. With SOME, only the ``some`` features in ``numbers`` are pooled. ``columns`` and ``width`` are in units of
    UNIT floats. KIND is the common combiner of the features, -1 if they differ. Invalid offsets are reported in
    ``report``.
    """
    feature, place, m, begin, end, table, of, arena = _bags(
        offsets, tables, numbers, described, n, features, some, each, report, SOME, BAGS
    )
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
    ids, offsets, weights, tables, columns, numbers, described, origin, where, versions, out, marks, report, n,
    features, some, each, width, low, high, last,
    SOME: tl.constexpr, WEIGHTED: tl.constexpr, INITIAL: tl.constexpr, MARK: tl.constexpr, INIT: tl.constexpr,
    INDEX: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, WEIGHT: tl.constexpr,
    UNIT: tl.constexpr, BYTES: tl.constexpr, BAGS: tl.constexpr,
):  # fmt: skip
    """As `pool`, with the maximum; MARK also writes which rows have it in which columns, as bits ``[n, BYTES]``.

    WIDTH is at least 8, and covers the segment from the beginning of its first byte of marks.
    """
    feature, place, m, begin, end, table, of, arena = _bags(
        offsets, tables, numbers, described, n, features, some, each, report, SOME, BAGS
    )
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
            if WEIGHT % 8 != 0:  # the first byte also has columns of the previous segment
                packed = packed | tl.load(to, mask=its & (byte == WEIGHT // 8)[None, :], other=0).to(tl.int32)
            tl.store(to, packed.to(tl.uint8), mask=its)
            k += 1


@triton.jit(do_not_specialize=["n", "features", "some", "each", "width"])
def pool_first(
    ids, offsets, weights, tables, columns, lengths, numbers, described, origin, where, versions, out, report, n,
    features, some, each, width, low, high, last,
    SOME: tl.constexpr, WEIGHTED: tl.constexpr, INITIAL: tl.constexpr, PAD: tl.constexpr, INIT: tl.constexpr,
    INDEX: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, WEIGHT: tl.constexpr,
    DIM: tl.constexpr, UNIT: tl.constexpr, BAGS: tl.constexpr,
):  # fmt: skip
    """As `pool`, but concatenates the first ``lengths`` rows of each bag."""
    feature, place, m, begin, end, table, of, arena = _bags(
        offsets, tables, numbers, described, n, features, some, each, report, SOME, BAGS
    )
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
    """The divisor of the sum of a bag of ``count`` rows."""
    rows = tl.maximum(count, 1).to(tl.float32)
    if KIND == MEAN_:
        by = rows
    elif KIND == SQRTN_:
        by = tl.sqrt_rn(rows)
    else:
        kind = tl.load(combiners + feature)
        by = tl.where(kind == MEAN_, rows, tl.where(kind == SQRTN_, tl.sqrt_rn(rows), 1.0))
    return by
