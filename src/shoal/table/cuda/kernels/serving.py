# pyrefly: ignore-errors
"""Serving rows in kernels: weights encoded as float32, float16, one byte or one bit; each row fills 4-byte words.

One launch per segment. The codecs are those of csrc/table/rows/optimizers.isa.cpp.
"""
# ruff: noqa: RET505 - Triton's compiler omits a branch only if it is an `else`

import triton
import triton.language as tl

from shoal.table.cuda.kernels.index import FRESH, ROW

FP32 = tl.constexpr(0)
FP16 = tl.constexpr(1)
FIXED_R8 = tl.constexpr(2)


@triton.jit
def _encoded(w, number, CODEC: tl.constexpr):
    """The codes of weights; ``number`` is the step of fixed_r8, or the amplitude of one_bit."""
    if CODEC == FP32:
        return w
    elif CODEC == FP16:
        return w.to(tl.float16)
    elif CODEC == FIXED_R8:
        q = tl.div_rn(w + tl.where(w < 0, -0.5 * number, 0.5 * number), tl.zeros_like(w) + number)
        q = tl.where(w != w, 0.0, q)
        return tl.minimum(tl.maximum(q, -128.0), 127.0).to(tl.int8)
    else:
        return tl.where(w > 0, 1, -1).to(tl.int8)


@triton.jit
def _decoded(code, number, CODEC: tl.constexpr):
    if CODEC == FP32:
        return code
    elif CODEC == FP16:
        return code.to(tl.float32)
    else:
        return code.to(tl.float32) * number


@triton.jit
def _place(base, d, CODEC: tl.constexpr):
    """Pointers ``[B, W]`` to the codes of rows ``[B]``."""
    if CODEC == FP32:
        return base[:, None] + d[None, :]
    elif CODEC == FP16:
        return base.to(tl.pointer_type(tl.float16))[:, None] + d[None, :]
    else:
        return base.to(tl.pointer_type(tl.int8))[:, None] + d[None, :]


@triton.jit(do_not_specialize=["n"])
def decode(
    rows, arena, out, n, number,
    CODEC: tl.constexpr, CODE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    WEIGHT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the weights of rows to ``out``; zeros for row -1."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + o, mask=o < n, other=-1)
    d = tl.arange(0, WIDTH)
    inside = (d < D)[None, :]
    here = (row >= 0)[:, None] & inside
    place = _place(arena + (row & ROW).to(tl.int64) * STRIDE + CODE, d, CODEC)
    w = _decoded(tl.load(place, mask=here, other=0), number, CODEC)
    tl.store(out + o[:, None] * DIM + WEIGHT + d[None, :], w, mask=(o < n)[:, None] & inside)


@triton.jit(do_not_specialize=["n"])
def encode_sorted(
    rows, codes, order, arena, values, n, number,
    ADD: tl.constexpr, CODEC: tl.constexpr, CODE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    STRIDE: tl.constexpr, WEIGHT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Encodes the last value of equal rows or, with ADD, decodes, adds and encodes for each value in order.

    ``rows`` are sorted, ``codes`` are the same with their marks, ``order`` has their positions. The first value added
    to a row that is marked FRESH is encoded as it is.
    """
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + o, mask=o < n, other=-1)
    d = tl.arange(0, WIDTH)
    inside = (d < D)[None, :]
    place = _place(arena + tl.where(row >= 0, row, 0).to(tl.int64) * STRIDE + CODE, d, CODEC)
    if ADD:
        before = tl.load(rows + o - 1, mask=(o > 0) & (o < n), other=-1)
        head = (row >= 0) & (before != row)
        new = head & (o < 0)
        active = head
        k = o
        while tl.max(active.to(tl.int32), axis=0) > 0:
            new = new | (active & ((tl.load(codes + k, mask=active, other=0) & FRESH) != 0))
            k += 1
            active = active & (tl.load(rows + k, mask=active & (k < n), other=-1) == row)
        old = (head & (new == 0))[:, None] & inside
        w = _decoded(tl.load(place, mask=old, other=0), number, CODEC)
        w = tl.where(old, w, 0.0)
        active = head
        k = o
        while tl.max(active.to(tl.int32), axis=0) > 0:
            from_ = tl.load(order + k, mask=active, other=0)
            there = values + from_[:, None] * DIM + WEIGHT + d[None, :]
            more = w + tl.load(there, mask=active[:, None] & inside, other=0.0)
            w = tl.where(active[:, None], _decoded(_encoded(more, number, CODEC), number, CODEC), w)
            k += 1
            active = active & (tl.load(rows + k, mask=active & (k < n), other=-1) == row)
        tl.store(place, _encoded(w, number, CODEC), mask=head[:, None] & inside)
    else:
        after = tl.load(rows + o + 1, mask=o + 1 < n, other=-1)
        last = (row >= 0) & (after != row)
        from_ = tl.load(order + o, mask=last, other=0)
        there = values + from_[:, None] * DIM + WEIGHT + d[None, :]
        w = tl.load(there, mask=last[:, None] & inside, other=0.0)
        tl.store(place, _encoded(w, number, CODEC), mask=last[:, None] & inside)
