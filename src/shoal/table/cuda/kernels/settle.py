# pyrefly: ignore-errors
"""The last kernel of a call on tables with a budget: it releases held rows and updates the policy's words.

hold.py and evict.py have the kernels that come before it.
"""

import triton
import triton.language as tl

from shoal.table.cuda.kernels.changed import _home
from shoal.table.cuda.kernels.hold import GONE
from shoal.table.cuda.kernels.index import FREE, MOVED, NEXT, ROOM, ROW, TAKEN, hash_id
from shoal.table.cuda.kernels.located import (
    BUDGET,
    DESCRIBED,
    EVICTS,
    PINNED_IDS,
    SCORES,
    STATE,
    ints,
    last_not_above,
    longs,
)
from shoal.table.cuda.kernels.policy import (
    BUDGET_WORDS,
    HELD,
    PINNED,
    PINS,
    RING,
    SAMPLE_BELOW,
    SAMPLED,
    SHIFT,
    VALUE,
    WRITTEN,
    score_code,
    written,
)

SAMPLE_SALT = tl.constexpr(0x5851F42D4C957F2D)  # csrc/table/budget/curve.cpp


@triton.jit
def _write_scores(row, position, m, of, origin, given, GIVEN: tl.constexpr, ONLY_NEW: tl.constexpr):
    """Releases the held rows of one table, and writes the policy's words after a write; equal rows count once."""
    budget = longs(origin, of, BUDGET)
    at = ints(origin, of, SCORES) + row
    before = tl.atomic_and(at, ~HELD, mask=m, sem="relaxed")
    mine = m & ((before & HELD) != 0)
    if GIVEN:
        after = written(before, budget, score_code(tl.load(given + position, mask=mine, other=0.0)), True)
    else:
        after = written(before, budget, 0, False)
    if ONLY_NEW:
        mine = mine & (((before >> SHIFT) & VALUE) == 0)
    tl.store(at, after, mask=mine)


@triton.jit
def _sample(id, m, budget):
    """Samples written ids by their hash, so that all writes of an id are in the sample or none."""
    hashed = hash_id(id + SAMPLE_SALT).to(tl.int64)
    mine = m & (hashed >= 0) & (hashed < tl.load(budget + SAMPLE_BELOW))
    count = tl.sum(mine.to(tl.int32), axis=0)
    if count > 0:
        at = tl.atomic_add(budget + SAMPLED, count.to(tl.int64), sem="relaxed")
        at += tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(budget + BUDGET_WORDS + (at & (RING - 1)), id, mask=mine)


@triton.jit
def _note(row, ids, position, m, of, origin):
    """Counts and samples the writes of one table, and marks the rows of pinned ids."""
    budget = longs(origin, of, BUDGET)
    count = tl.sum(m.to(tl.int64), axis=0)
    if count > 0:
        tl.atomic_add(budget + WRITTEN, count, sem="relaxed")
        id = tl.load(ids + position, mask=m, other=0)
        _sample(id, m, budget)
        pins = tl.load(budget + PINS)
        if pins > 0:
            pinned = longs(origin, of, PINNED_IDS)
            jump = pins  # rounded down to a power of two
            jump |= jump >> 1
            jump |= jump >> 2
            jump |= jump >> 4
            jump |= jump >> 8
            jump |= jump >> 16
            jump = (jump + 1) >> 1
            nearest = last_not_above(pinned, pins, jump, id, m)
            stays = m & (tl.load(pinned + nearest, mask=m, other=0) == id)
            tl.atomic_or(ints(origin, of, SCORES) + row, PINNED, mask=stays, sem="relaxed")


@triton.jit
def _close(described, origin, cells, TABLES: tl.constexpr):
    """Limits the count of rows given out to those that exist, and invalidates row numbers found before evictions."""
    of = described + tl.arange(0, TABLES) * DESCRIBED  # descriptions beyond the last equal the first
    evicts = tl.load(of + EVICTS) != 0
    state = longs(origin, of, STATE)
    taken = tl.load(state + TAKEN)
    most = tl.load(state + FREE) + tl.load(state + ROOM) - tl.load(state + NEXT)
    moved = tl.load(state + MOVED) + (1 << 32)
    tl.debug_barrier()
    tl.store(state + TAKEN, tl.minimum(taken, most), mask=evicts)
    tl.store(state + MOVED, moved, mask=evicts & (tl.load(cells + GONE) > 0))


@triton.jit(do_not_specialize=["n", "tables", "jump"])
def settle(
    out, ids, bases, described, origin, cells, given, n, tables, jump,
    SINGLE: tl.constexpr, TABLES: tl.constexpr, GROUP: tl.constexpr, LRU_: tl.constexpr, GIVEN: tl.constexpr,
    ONLY_NEW: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the rows of ids that equal listed ids to ``out``; then updates the policies' words of all rows in it.

    LRU_: the words are complete already.
    """
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(out + o, mask=o < n, other=-1)
    again = code < -1
    if tl.max(again.to(tl.int32), axis=0) > 0:
        first = tl.load(out + (-2 - code.to(tl.int64)), mask=again, other=-1)
        if GROUP == 0:
            first = tl.where(first >= 0, first & ROW, first)
        code = tl.where(again, first, code)
        tl.store(out + o, code, mask=again)
    m = code >= 0
    if GROUP:
        table, _, row = _home(code, m, bases, described, tables, jump, SINGLE)
        left = m
        while tl.max(left.to(tl.int32), axis=0) > 0:  # one table at a time; most lanes have the same
            one = tl.min(tl.where(left, table + code.to(tl.int64) * 0, 1 << 40), axis=0)
            mine = left & (table == one)
            its = described + one * DESCRIBED
            if tl.load(its + EVICTS) != 0:
                if LRU_ == 0:
                    _write_scores(row, o, mine, its, origin, given, False, False)
                    tl.debug_barrier()
                _note(row, ids, o, mine, its, origin)
            left = left & (mine == 0)
    else:
        row = code & ROW
        if LRU_ == 0:
            _write_scores(row, o, m, described, origin, given, GIVEN, ONLY_NEW)
            tl.debug_barrier()
        _note(row, ids, o, m, described, origin)
    if tl.program_id(0) == 0:
        _close(described, origin, cells, TABLES)
