# pyrefly: ignore-errors
"""Gradients of bags of max and firstn, which differ between the rows of a bag: each is aimed at its row."""

import triton
import triton.language as tl

from shoal.table.cuda.kernels.changed import BAD, FLAGS, MARKED, NONE_, WRONG, aimed
from shoal.table.cuda.kernels.located import PADDING, last_not_above
from shoal.table.cuda.kernels.pooled import FIRSTN_, MAX_, MEAN_, SQRTN_


@triton.jit(do_not_specialize=["n", "some", "each", "width"])
def share(
    grads, offsets, where, marks, columns, numbers, n, some, each, width,
    D: tl.constexpr, WIDTH: tl.constexpr, BYTES: tl.constexpr, UNIT: tl.constexpr, BAGS: tl.constexpr,
):  # fmt: skip
    """Divides gradients of max by the number of rows that have the maximum; bags are distributed as in `pool`."""
    feature = tl.load(numbers + tl.program_id(0) % some)
    place = (tl.program_id(0) // some) * BAGS + tl.arange(0, BAGS)
    m = place < each
    begin = tl.maximum(tl.load(offsets + feature * each + place, mask=m, other=0), 0)
    end = tl.minimum(tl.load(offsets + feature * each + place + 1, mask=m, other=0), n)
    d = tl.arange(0, WIDTH)
    inside = (d < D)[None, :]
    equal = tl.zeros([BAGS, WIDTH], tl.int32)
    longest = tl.max(end - begin, axis=0)
    k = longest * 0
    while k < longest:
        p = begin + k
        there = m & (p < end)
        there = there & (tl.load(where + p, mask=there, other=PADDING) != PADDING)
        bits = tl.load(marks + p[:, None] * BYTES + d[None, :] // 8, mask=there[:, None] & inside, other=0).to(tl.int32)
        equal += (bits >> (d % 8)[None, :]) & 1
        k += 1
    at = grads + (place.to(tl.int64) * width + tl.load(columns + feature))[:, None] * UNIT + d[None, :]
    several = m[:, None] & inside & (equal > 1)
    g = tl.load(at, mask=several, other=0.0)
    tl.store(at, tl.div_rn(g, tl.maximum(equal, 1).to(tl.float32)), mask=several)


@triton.jit(do_not_specialize=["n", "start", "room", "bags", "each", "jump", "width", "begins_at"])
def aim(
    grads, offsets, where, before, weights, marks, columns, combiners, lengths, workspace, tally, n, start, room, bags,
    each, jump, width, begins_at,
    PAD: tl.constexpr, WEIGHTED: tl.constexpr, FACTOR: tl.constexpr, JUDGE: tl.constexpr, COUNT: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BYTES: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes where the gradient of each id of a part begins, its flags and its factor to the workspace.

    ``before`` ``[n + 1]``, with PAD: the number of ids before each that are not padding. ``marks`` begin at the part's
    first id. JUDGE flags gradients with NaN or infinity, and COUNT also counts them as bad.
    """
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    bag = last_not_above(offsets, bags, jump, o, m)
    feature = bag // each
    kind = tl.load(combiners + feature, mask=m, other=0)
    begin = tl.minimum(tl.maximum(tl.load(offsets + bag, mask=m, other=0), 0), n)
    end = tl.maximum(tl.minimum(tl.load(offsets + bag + 1, mask=m, other=0), n), begin)
    there = m
    if PAD:
        there = m & (tl.load(where + o, mask=m, other=PADDING) != PADDING)
        first = tl.load(before + begin, mask=m, other=0)
        rank = tl.load(before + o, mask=m, other=0) - first
        count = tl.load(before + end, mask=m, other=0) - first
    else:
        rank = o - begin
        count = end - begin
    source = begins_at + (bag % each) * width + tl.load(columns + feature, mask=m, other=0)
    left_out = (kind == FIRSTN_) & (rank >= tl.load(lengths + feature, mask=m, other=1))
    source += tl.where((kind == FIRSTN_) & (left_out == 0), rank.to(tl.int64) * (DIM // UNIT), 0)
    none = left_out | (there == 0)
    word = (source << FLAGS) | tl.where(none, NONE_, 0) | tl.where(kind == MAX_, MARKED, 0)
    factor = there.to(tl.float32)
    if FACTOR:
        if WEIGHTED:
            factor = tl.load(weights + o, mask=there, other=0.0)
        rows = tl.maximum(count, 1).to(tl.float32)
        by = tl.where(kind == MEAN_, rows, tl.where(kind == SQRTN_, tl.sqrt_rn(rows), 1.0))
        factor *= tl.div_rn(1.0 + by * 0, by)
        tl.store((workspace + 3 * room).to(tl.pointer_type(tl.float32)) + start + o, factor, mask=m)
    if JUDGE:
        d = tl.arange(0, WIDTH)
        g = aimed(grads, marks, word, o, there, d, (d < DIM)[None, :], 0, BYTES, UNIT)
        if FACTOR:
            g *= factor[:, None]
        wrong = tl.min((tl.abs(g) < float("inf")).to(tl.int32), axis=1) == 0
        word = word | tl.where(wrong, WRONG, 0)
        if COUNT:
            bad = tl.sum((there & wrong).to(tl.int64), axis=0)
            if bad > 0:
                tl.atomic_add(tally + BAD, bad, sem="relaxed")
    tl.store(workspace + start + o, word, mask=m)
