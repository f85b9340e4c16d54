# pyrefly: ignore-errors
"""Eviction from small tables, in which exactly the rows that the policy ranks lowest leave.

`weigh` ranks all rows before `replace` of evict.py runs, and `let_go` removes the lowest ones from the index.
"""

import triton
import triton.language as tl

from shoal.table.cuda.kernels.evict import MOST_SMALL, _leave, _may_leave
from shoal.table.cuda.kernels.index import (
    BUCKETS,
    EMPTY,
    FREE,
    NEXT,
    ROOM,
    TAKEN,
    hash_id,
)
from shoal.table.cuda.kernels.located import (
    BUDGET,
    DESCRIBED,
    KEYS,
    ROWS,
    SCORES,
    STATE,
    WORDS,
    ints,
    longs,
)
from shoal.table.cuda.kernels.policy import (
    COMING,
    HELD,
    IF_BETTER,
    order,
    written,
)


@triton.jit(do_not_specialize=["tables"])
def weigh(described, origin, smalls, work, tables, GIVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the keys and slots of rows that can be evicted to ``work [tables, 3, MOST_SMALL + 1]``, by row.

    The low bits of a key are a hash of the id, which decides among rows of equal rank. So the order does not depend on
    row numbers, which a restore changes.

    A full bucket, which is rare, keeps its ids, because lookups search the stash only if a bucket is full.
    """
    place = tl.program_id(0) % tables
    of = described + tl.load(smalls + place).to(tl.int64) * DESCRIBED
    budget = longs(origin, of, BUDGET)
    buckets = tl.load(longs(origin, of, WORDS) + BUCKETS) + 1
    keys = work + place.to(tl.int64) * (3 * (MOST_SMALL + 1))
    newcomer = order(written(tl.zeros([1, 1], tl.int32), budget, 0, False), budget, False)
    choosy = (tl.load(budget + IF_BETTER) != 0) & (GIVEN == 0)
    begin = (tl.program_id(0) // tables).to(tl.int64) * BLOCK
    while begin < buckets:
        bucket = begin + tl.arange(0, BLOCK)
        at = bucket[:, None] * 8 + tl.arange(0, 8)[None, :]
        row = tl.load(ints(origin, of, ROWS) + at, mask=(bucket < buckets)[:, None], other=-1)
        there = row >= 0
        full = tl.min(there.to(tl.int32), axis=1) != 0
        could = there & (full == 0)[:, None]
        word = tl.load(ints(origin, of, SCORES) + row, mask=could, other=HELD)
        could = _may_leave(row, word, could, of, budget, origin, True)
        key = order(word, budget, False)
        could = could & ((key <= newcomer) | (choosy == 0))
        id = tl.load(longs(origin, of, KEYS) + at, mask=could, other=0)
        tl.store(keys + row, (key.to(tl.int64) << 32) | (hash_id(id) >> 32).to(tl.int64), mask=could)
        tl.store(keys + (MOST_SMALL + 1) + row, at, mask=could)
        begin += (tl.num_programs(0) // tables).to(tl.int64) * BLOCK


@triton.jit(do_not_specialize=["tables", "stride"])
def let_go(
    described, origin, smalls, work, cells, gone, tables, stride,
    LIST: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Removes as many ids from small tables as new ids need rows: those with the lowest keys.

    Their rows go to the third part of ``work``, in ascending order of their keys, -1 after the last.
    """
    place = tl.program_id(0) % tables
    table = tl.load(smalls + place).to(tl.int64)
    of = described + table * DESCRIBED
    budget = longs(origin, of, BUDGET)
    state = longs(origin, of, STATE)
    left = tl.load(state + FREE) + tl.load(state + ROOM) - tl.load(state + NEXT) - tl.load(state + TAKEN)
    wanted = tl.load(budget + COMING) - tl.maximum(left, 0)
    work += place.to(tl.int64) * (3 * (MOST_SMALL + 1))
    rows = tl.load(state + ROOM)
    begin = (tl.program_id(0) // tables).to(tl.int64) * BLOCK
    while (begin < rows) & (wanted > 0):
        row = begin + tl.arange(0, BLOCK)
        key = tl.load(work + row, mask=row < rows, other=-1)
        rank = tl.zeros([BLOCK], tl.int32)
        chunk = rows * 0
        while chunk < rows:
            other_row = chunk + tl.arange(0, SPAN)
            other = tl.load(work + other_row, mask=other_row < rows, other=-1)
            before = (other[None, :] < key[:, None]) | (
                (other[None, :] == key[:, None]) & (other_row[None, :] < row[:, None])
            )
            rank += tl.sum((before & (other >= 0)[None, :]).to(tl.int32), axis=1)
            chunk += SPAN
        goes = (key >= 0) & (rank < wanted)
        slot = tl.load(work + (MOST_SMALL + 1) + row, mask=goes, other=0)
        _leave(goes, row.to(tl.int32), longs(origin, of, KEYS) + slot, slot < 8, table, of, budget, origin, cells, gone,
               stride, LIST)  # fmt: skip
        tl.store(longs(origin, of, KEYS) + slot, EMPTY, mask=goes)
        tl.store(ints(origin, of, ROWS) + slot, -1, mask=goes)
        tl.store(ints(origin, of, SCORES) + row, HELD, mask=goes)
        tl.store(work + 2 * (MOST_SMALL + 1) + rank, row, mask=goes)
        begin += (tl.num_programs(0) // tables).to(tl.int64) * BLOCK
