# pyrefly: ignore-errors
"""The first kernels of a call on tables that evict: known ids are held, new ids are listed.

`hold` (`claim` for a group of tables) finds the rows of known ids and holds them, so that they are not evicted during
the call. New ids go on a list, each once. evict.py gives them rows, settle.py ends the call.

With `Lru`, a row is held if its policy state is the number of the current call.

The work space of a call has head words, then cells that find equal ids: each cell has the table and position of the
first of them; 0 means free.
"""

import triton
import triton.language as tl

from shoal.table.cuda.kernels.index import (
    EPOCH,
    hash_id,
)
from shoal.table.cuda.kernels.located import (
    BUDGET,
    DESCRIBED,
    EPOCHS,
    EVICTS,
    SCORES,
    STATE,
    TIMES,
    ints,
    locate,
    longs,
)
from shoal.table.cuda.kernels.policy import (
    CALL,
    COMING,
    HELD,
    PINNED,
    PINS,
    SHIFT,
    VALUE,
    tick,
)

# Head words of the work space.
COMERS = tl.constexpr(0)  # listed ids
GONE = tl.constexpr(1)  # evicted rows
REST = tl.constexpr(2)  # listed ids that did not replace another id
HEAD = tl.constexpr(8)

FRESH_ROWS = tl.constexpr(1)  # word of a group's tally: rows created by this update
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit(do_not_specialize=["n", "tables", "time"])
def prepare(
    cells, described, origin, control, n, tables, time,
    TABLES: tl.constexpr, GROUP: tl.constexpr, TIMES_AT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Clears the work space and begins a call: on one table at ``time``, on a GROUP at its control block's times."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(cells + o, tl.zeros([BLOCK], tl.int64), mask=o < n)
    if tl.program_id(0) == 0:
        t = tl.arange(0, TABLES)
        of = described + t * DESCRIBED
        m = (t < tables) & (tl.load(of + EVICTS) != 0)
        if GROUP:
            now = tl.load(control + TIMES_AT + t * 2, mask=m, other=0)
        else:
            now = t.to(tl.int64) * 0 + time
        tick(longs(origin, of, BUDGET), now, m)


@triton.jit
def enlist(id, table, new, position, ids, cells, comers, mask, spare, BLOCK: tl.constexpr):
    """Lists new ids, equal ids of a table once: -1 for a listed id, -2 - p for one that equals the id at ``p``."""
    code = (table << 32) | (position + 1)
    at = (hash_id(id) + table.to(tl.uint64) * GOLDEN).to(tl.int64) & mask
    todo = new
    won = new & (position < 0)
    out = position * 0 - 1
    while tl.max(todo.to(tl.int32), axis=0) > 0:
        # An idle lane compares a spare cell, which holds 0, with -1.
        cell = tl.where(todo, cells + HEAD + at, spare + (position & 65535))
        wanted = tl.where(todo, tl.zeros([BLOCK], tl.int64), tl.full([BLOCK], -1, tl.int64))
        old = tl.atomic_cas(cell, wanted, code, sem="relaxed")
        mine = todo & (old == 0)
        other = (old & 0xFFFFFFFF) - 1
        near = todo & (old != 0) & ((old >> 32) == table)
        same = near & (tl.load(ids + other, mask=near, other=0) == id)
        won = won | mine
        out = tl.where(same, -2 - other, out)
        todo = todo & (mine == 0) & (same == 0)
        at = (at + 1) & mask
    count = tl.sum(won.to(tl.int32), axis=0)
    if count > 0:
        begin = tl.atomic_add(cells + COMERS, count.to(tl.int64), sem="relaxed")
        tl.store(comers + begin + tl.cumsum(won.to(tl.int32), axis=0) - 1, code - 1, mask=won)
    return out, won


@triton.jit
def touch(row, m, of, origin):
    """Marks rows of one `Lru` table as written by this call, which also holds them."""
    budget = longs(origin, of, BUDGET)
    at = ints(origin, of, SCORES) + row
    word = ((tl.load(budget + CALL) & VALUE) << SHIFT).to(tl.int32) + row * 0
    pinned = m & (tl.load(budget + PINS) > 0)
    if tl.max(pinned.to(tl.int32), axis=0) > 0:
        word = word | (tl.load(at, mask=pinned, other=0) & PINNED)
    tl.store(at, word, mask=m)


@triton.jit(do_not_specialize=["n", "mask", "time"])
def hold(
    ids, drop, gate, described, origin, cells, comers, out, n, mask, time,
    DROP: tl.constexpr, GATE: tl.constexpr, LRU_: tl.constexpr, STAMP: tl.constexpr, LATER: tl.constexpr,
    TRACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Holds the rows of known ids and writes them to ``out``; -1 for skipped and listed ids, others as in `enlist`.

    Known rows get the time if STAMP is 1, the epoch if TRACK is 1, and the number of the call if LRU_.
    """
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    id = tl.load(ids + o, mask=m, other=0)
    if DROP:
        m = m & (tl.load(drop + o, mask=m, other=1) == 0)
    if GATE:
        m = m & (tl.load(gate) == 0)
    row = locate(id, described, m, origin, True)
    known = m & (row >= 0)
    if LRU_:
        touch(row, known, described, origin)
    else:
        tl.atomic_or(ints(origin, described, SCORES) + row, HELD, mask=known, sem="relaxed")
    if STAMP == 1:
        at = ints(origin, described, TIMES).to(tl.pointer_type(tl.uint32)) + row
        seconds = (row.to(tl.int64) * 0 + time).to(tl.uint32)
        if LATER:
            tl.atomic_max(at, seconds, mask=known, sem="relaxed")
        else:
            tl.store(at, seconds, mask=known)
    if TRACK == 1:
        epoch = tl.load(longs(origin, described, STATE) + EPOCH).to(tl.int32)
        tl.store(ints(origin, described, EPOCHS) + row, epoch + row * 0, mask=known)
    new = m & (row < 0)
    code = o * 0 - 1
    if tl.max(new.to(tl.int32), axis=0) > 0:
        code, won = enlist(id, o * 0, new, o, ids, cells, comers, mask, origin, BLOCK)
        count = tl.sum(won.to(tl.int64), axis=0)
        tl.atomic_add(longs(origin, described, BUDGET) + COMING, count, sem="relaxed")
    tl.store(out + o, tl.where(known, row, code.to(tl.int32)), mask=o < n)
