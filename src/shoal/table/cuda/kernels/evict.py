# pyrefly: ignore-errors
"""Rows for new ids in tables that may be full: one sequence of kernels finds, lets go and inserts.

`hold` (of a group: `claim`) finds the rows of known ids and holds them, so that no row leaves that the call needs; new
ids come into a list, equal ones once. `replace` gives each of them the row of the id which the policy wants least of
those in its bucket, whose slot it takes over: so the index stays as it was but for the id in that slot. `borrow` finds
rows elsewhere for the few ids whose buckets have none to give, and `place` gives slots to these and to the ids that get
a row which nobody has. `settle` resolves equal ids, lets the rows go that were held, and writes what the policy keeps
of them. In a small table exactly the rows leave that its policy wants least: `weigh` and `let_go` find them before.

Rows of tables that evict by `Lru` are held by the number of the call, which they keep: `settle` has little to do.

Work space of a call: head words, then cells in which equal ids meet (table and position of the first, 0: free).
"""

import triton
import triton.language as tl

from shoal.table.cuda.kernels.index import (
    BUCKETS,
    EMPTY,
    EPOCH,
    FREE,
    FRESH,
    LOST,
    NEXT,
    ROOM,
    SIZE,
    TAKEN,
    _places,
    hash_id,
)
from shoal.table.cuda.kernels.located import (
    BASE,
    BUDGET,
    DESCRIBED,
    EPOCHS,
    EVICTS,
    FREE_ROWS,
    KEYS,
    ROWS,
    SALT,
    SCORES,
    STASH_KEYS,
    STASH_ROWS,
    STATE,
    TIMED,
    TIMES,
    WORDS,
    ints,
    locate,
    longs,
    stamp,
)
from shoal.table.cuda.kernels.policy import (
    AGE_MAX,
    AGE_MIN,
    AGE_SUM,
    CALL,
    COMING,
    CREATED,
    EVICTED,
    HELD,
    IF_BETTER,
    LEFT,
    LEFT_KEYS,
    LRU,
    MIN_AGE_S,
    NOW_S,
    PINNED,
    PINS,
    POLICY,
    REFUSED,
    SHIFT,
    SMALL,
    TYPICAL,
    VALUE,
    order,
    score_code,
    tick,
    written,
)

# Head words.
COMERS = tl.constexpr(0)  # ids in the list
GONE = tl.constexpr(1)  # rows that left
REST = tl.constexpr(2)  # ids that did not take the place of another
HEAD = tl.constexpr(8)

FRESH_ROWS = tl.constexpr(1)  # of a group's tally: rows that this update made
NONE = tl.constexpr(0x7FFFFFFF)  # above all keys
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MOST_SMALL = tl.constexpr(8192)  # rows of a small table
ELSEWHERE = tl.constexpr(64)  # buckets that are looked at where an id's own have no row to give
ELSEWHERE_BETTER = tl.constexpr(4)  # likewise of a table that may refuse the id


@triton.jit(do_not_specialize=["n", "tables", "time"])
def prepare(
    cells, described, origin, control, n, tables, time,
    TABLES: tl.constexpr, GROUP: tl.constexpr, TIMES_AT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Clears the work space, and begins a call of one table at ``time``, or of a GROUP at the control block's times."""
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
    """Puts new ids on the list, equal ones of a table once: -1 for those, -2 - p for one that position ``p`` has."""
    code = (table << 32) | (position + 1)
    at = (hash_id(id) + table.to(tl.uint64) * GOLDEN).to(tl.int64) & mask
    todo = new
    won = new & (position < 0)
    out = position * 0 - 1
    while tl.max(todo.to(tl.int32), axis=0) > 0:
        # A lane with nothing to do compares a spare cell, which holds 0, with -1.
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
    """Rows of known ids of a table that evicts by `Lru` are those of this call from now on, which holds them, too."""
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
    """Rows of known ids, which are held; -1 for ids that are passed over and those on the list, else as `enlist`.

    Known rows get the time and the epoch where STAMP and TRACK are 1, and with LRU_ the call.
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


# --- small tables -----------------------------------------------------------------------------------------------------


@triton.jit
def _may_leave(row, word, could, of, budget, origin, AGED: tl.constexpr):
    """Of rows that are there: those that the call does not hold, that are not pinned and old enough."""
    could = could & ((word & (HELD | PINNED)) == 0)
    call = (tl.load(budget + CALL) & VALUE).to(tl.int32)
    could = could & ((tl.load(budget + POLICY) != LRU) | (((word >> SHIFT) & VALUE) != call))
    if AGED:
        age = tl.load(budget + MIN_AGE_S)
        time = tl.load(ints(origin, of, TIMES) + row, mask=could & (tl.load(of + TIMED) != 0), other=0)
        could = could & (tl.load(budget + NOW_S) - (time.to(tl.int64) & 0xFFFFFFFF) >= age)
    return could


@triton.jit(do_not_specialize=["tables"])
def weigh(described, origin, smalls, work, tables, GIVEN: tl.constexpr, BLOCK: tl.constexpr):
    """The keys and slots of the rows of small tables that may leave, by row, to ``work [tables, 3, MOST_SMALL + 1]``.

    Below a key there is a hash of the id, which decides among equal ones: whatever rows they have, also once they were
    restored from a checkpoint.

    A full bucket keeps its ids: others, in the stash, are found there because it is full. There is hardly ever one.
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
    """Takes the ids of small tables out of the index whose rows new ids need, those with the lowest keys.

    Their rows, in that order, are the third part of ``work``, -1 behind the last.
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


# --- all tables -------------------------------------------------------------------------------------------------------


@triton.jit
def _leave(goes, row, cell, apart, table, of, budget, origin, cells, gone, stride, LIST: tl.constexpr):
    """Counts rows that leave, and lists them if anybody wants to know: ids, tables and rows, times, ``stride`` each."""
    count = tl.sum(goes.to(tl.int32), axis=0)
    if count > 0:
        timed = goes & (tl.load(of + TIMED) != 0)
        time = tl.load(ints(origin, of, TIMES) + row, mask=timed, other=0).to(tl.int64) & 0xFFFFFFFF
        age = tl.maximum(tl.load(budget + NOW_S) - time, 0)
        tl.atomic_add(budget + EVICTED, count.to(tl.int64), sem="relaxed")
        tl.atomic_add(budget + AGE_SUM, tl.sum(tl.where(goes, age, 0), axis=0), sem="relaxed")
        tl.atomic_min(budget + AGE_MIN, tl.min(tl.where(goes, age, 1 << 40), axis=0), sem="relaxed")
        tl.atomic_max(budget + AGE_MAX, tl.max(tl.where(goes, age, -1), axis=0), sem="relaxed")
        at = tl.atomic_add(cells + GONE, count.to(tl.int64), sem="relaxed")
        if LIST:
            at += tl.cumsum(goes.to(tl.int32), axis=0) - 1
            id = tl.load(cell, mask=goes, other=0)
            tl.store(gone + at, tl.where(apart, EMPTY, id), mask=goes)
            tl.store(gone + stride + at, (table << 32) | row.to(tl.int64), mask=goes)
            tl.store(gone + 2 * stride + at, time, mask=goes)
        tl.store(ints(origin, of, TIMES) + row, 0, mask=timed)  # as nobody's rows have


@triton.jit
def _weights(row, m, of, budget, origin, AGED: tl.constexpr, LRU_: tl.constexpr):
    """The keys of rows; NONE for one that stays, or is not there."""
    there = m & (row >= 0)
    word = tl.load(ints(origin, of, SCORES) + row, mask=there, other=HELD)
    could = _may_leave(row, word, there, of, budget, origin, AGED)
    return tl.where(could, order(word, budget, LRU_), NONE)


@triton.jit
def _claim_row(victim, todo, of, budget, origin):
    """Which lanes have their victim's row now: nobody else had, in this call."""
    at = ints(origin, of, SCORES) + victim
    before = tl.atomic_or(at, HELD, mask=todo, sem="relaxed")
    call = (tl.load(budget + CALL) & VALUE).to(tl.int32)
    taken = (tl.load(budget + POLICY) == LRU) & (((before >> SHIFT) & VALUE) == call)
    free = (before & HELD) == 0
    wrong = todo & free & taken  # it was another's, who has let go of it
    if tl.max(wrong.to(tl.int32), axis=0) > 0:
        tl.atomic_and(at, ~HELD, mask=wrong, sem="relaxed")
    return todo & free & (taken == 0)


@triton.jit
def _least(row, weight, todo, highest, of, budget, origin, BLOCK: tl.constexpr):
    """For each lane the row with the lowest key of eight that nobody else has taken, and its slot; -1: none."""
    lane = tl.arange(0, 8)[None, :]
    got = tl.full([BLOCK], -1, tl.int32)
    slot = tl.full([BLOCK], 0, tl.int32)
    while tl.max(todo.to(tl.int32), axis=0) > 0:
        lowest = tl.min(weight, axis=1)
        todo = todo & (lowest <= highest)
        pick = tl.min(tl.where(weight == lowest[:, None], lane, 8), axis=1)
        that = lane == pick[:, None]
        victim = tl.max(tl.where(that, row, -1), axis=1)
        mine = _claim_row(victim, todo, of, budget, origin)
        got = tl.where(mine, victim, got)
        slot = tl.where(mine, pick, slot)
        weight = tl.where(that & todo[:, None], NONE, weight)
        todo = todo & (mine == 0)
    return got, slot


@triton.jit
def _highest(position, m, budget, given, GIVEN: tl.constexpr, LRU_: tl.constexpr, BLOCK: tl.constexpr):
    """The highest key of a row that may leave for a new id."""
    if GIVEN:
        newcomer = score_code(tl.load(given + position, mask=m, other=0.0))
    else:
        newcomer = order(written(tl.zeros([BLOCK], tl.int32), budget, 0, False), budget, LRU_)
    return tl.where(tl.load(budget + IF_BETTER) != 0, newcomer, NONE - 1)


@triton.jit
def _welcome(row, m, budget, of, origin):
    """What is kept of rows that new ids of one table have; `settle` completes it where the policy is not `Lru`."""
    call = ((tl.load(budget + CALL) & VALUE) << SHIFT).to(tl.int32)
    word = tl.where(tl.load(budget + POLICY) == LRU, call, HELD)
    tl.store(ints(origin, of, SCORES) + row, word + row * 0, mask=m)
    tl.atomic_add(budget + CREATED, tl.sum(m.to(tl.int64), axis=0), sem="relaxed")


@triton.jit
def _hand_over(
    row, id, position, table_of, here, described, origin, control, out, fresh_ids, fresh_rows, tally, time,
    GROUP: tl.constexpr, STAMP: tl.constexpr, TRACK: tl.constexpr,
):  # fmt: skip
    """Tells which rows new ids have, -1 for none, and stamps them.

    Rows are marked FRESH; of a GROUP they count from the table's first one on, and are listed as `claim` does. Of a
    GROUP with STAMP time and epoch are those of the control block.
    """
    made = here & (row >= 0)
    if GROUP:
        of = described + table_of * DESCRIBED
        key = tl.where(made, row.to(tl.int64) + tl.load(of + BASE), -1).to(out.dtype.element_ty)
        tl.store(out + position, key, mask=here)
        count = tl.sum(made.to(tl.int64), axis=0)
        at = tl.atomic_add(tally + FRESH_ROWS, count, sem="relaxed") + tl.cumsum(made.to(tl.int32), axis=0) - 1
        tl.store(fresh_ids + at, id, mask=made)
        tl.store(fresh_rows + at, (table_of << 32) | row.to(tl.int64), mask=made)
        if STAMP:
            stamp(row, table_of, of, made, origin, control)
    else:
        tl.store(out + position, tl.where(made, row | FRESH, -1), mask=here)
        if STAMP > 0:
            seconds = (row.to(tl.int64) * 0 + time).to(tl.int32)
            tl.store(ints(origin, described, TIMES) + row, seconds, mask=made)
        if TRACK > 0:
            epoch = tl.load(longs(origin, described, STATE) + EPOCH).to(tl.int32)
            tl.store(ints(origin, described, EPOCHS) + row, epoch + row * 0, mask=made)


@triton.jit
def _row_left(here, of, origin):
    """A row that nobody has for each of the ids of one table; -1 where there are no more."""
    state = longs(origin, of, STATE)
    count = tl.sum(here.to(tl.int64), axis=0)
    rank = tl.atomic_add(state + TAKEN, count, sem="relaxed") + tl.cumsum(here.to(tl.int32), axis=0) - 1
    free_count = tl.load(state + FREE)
    again = here & (rank < free_count)
    reused = tl.load(ints(origin, of, FREE_ROWS) + rank, mask=again, other=0).to(tl.int64)
    row = tl.where(again, reused, tl.load(state + NEXT) + rank - free_count)
    over = row - tl.load(state + ROOM)
    return tl.where(here & (over < 0), row, -1).to(tl.int32), over


@triton.jit
def _replace(
    id, position, table, here, described, origin, cells, given, gone, stride,
    GIVEN: tl.constexpr, LIST: tl.constexpr, AGED: tl.constexpr, LRU_: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each id of one table the row that the policy wants least of those in its two buckets, with its slot.

    By `Lru` the first bucket is enough where one of its rows is as old as those that leave typically. The id's first
    place in the stash counts, too, where both are full, so that ids of theirs may be there. -1: none of them may leave.
    """
    of = described + table * DESCRIBED
    budget = longs(origin, of, BUDGET)
    key, first, second, home, _ = _places(id, longs(origin, of, WORDS), 0, tl.load(of + SALT), False)
    rows = ints(origin, of, ROWS)
    lane = tl.arange(0, 8)[None, :]
    row = tl.load(rows + first[:, None] * 8 + lane, mask=here[:, None], other=-1)
    weight = _weights(row, here[:, None], of, budget, origin, AGED, LRU_)
    full = here & (tl.min(row, axis=1) >= 0) & (first != second)
    more = here & (first != second)
    if LRU_:
        more = more & (tl.min(weight, axis=1) > tl.load(budget + TYPICAL))
    bucket = first
    stashed = first < 0
    if tl.max((more | full).to(tl.int32), axis=0) > 0:
        row2 = tl.load(rows + second[:, None] * 8 + lane, mask=(more | full)[:, None], other=-1)
        weight2 = _weights(row2, more[:, None], of, budget, origin, AGED, LRU_)
        full = full & (tl.min(row2, axis=1) >= 0)
        other = more & (tl.min(weight2, axis=1) < tl.min(weight, axis=1))
        bucket = tl.where(other, second, bucket)
        row = tl.where(other[:, None], row2, row)
        weight = tl.where(other[:, None], weight2, weight)
        row3 = tl.load(ints(origin, of, STASH_ROWS) + home, mask=full, other=-1)
        weight3 = _weights(row3, full, of, budget, origin, AGED, LRU_)
        stashed = full & (weight3 < tl.min(weight, axis=1))
        last = stashed[:, None] & (lane == 7)  # in the place of another
        row = tl.where(last, row3[:, None], row)
        weight = tl.where(last, weight3[:, None], weight)
    highest = _highest(position, here, budget, given, GIVEN, LRU_, BLOCK)
    lowest = tl.min(weight, axis=1)
    row, slot = _least(row, weight, here, highest, of, budget, origin, BLOCK)
    if LRU_:
        left = row >= 0
        tl.atomic_add(budget + LEFT_KEYS, tl.sum(tl.where(left, lowest, 0).to(tl.int64), axis=0), sem="relaxed")
        tl.atomic_add(budget + LEFT, tl.sum(left.to(tl.int64), axis=0), sem="relaxed")
    cell = longs(origin, of, KEYS) + bucket * 8 + slot
    cell = tl.where(stashed & (slot == 7), longs(origin, of, STASH_KEYS) + home, cell)
    got = here & (row >= 0)
    _leave(got, row, cell, first < 0, table, of, budget, origin, cells, gone, stride, LIST)
    tl.store(cell, key, mask=got)
    _welcome(row, got, budget, of, origin)
    return row


@triton.jit(do_not_specialize=["stride", "time"])
def replace(
    ids, described, origin, control, cells, comers, rest, given, out, gone, fresh_ids, fresh_rows, tally, stride, time,
    GIVEN: tl.constexpr, LIST: tl.constexpr, GROUP: tl.constexpr, AGED: tl.constexpr, LRU_: tl.constexpr,
    STAMP: tl.constexpr, TRACK: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of others for ids on the list whose tables have none left, into ``out``.

    The other ids come on the list ``rest``: those that get a row which nobody has, in ``out`` already, or -1, and
    those that found none here.
    """
    count = tl.load(cells + COMERS)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    while begin < count:
        o = begin + tl.arange(0, BLOCK)
        here = o < count
        packed = tl.load(comers + o, mask=here, other=0)
        position = packed & 0xFFFFFFFF
        id = tl.load(ids + position, mask=here, other=0)
        table_of = packed >> 32
        row = tl.full([BLOCK], -1, tl.int32)
        later = here
        left = here
        while tl.max(left.to(tl.int32), axis=0) > 0:  # one table after the other; neighbours are mostly of one
            table = tl.min(tl.where(left, table_of, 1 << 40), axis=0)
            mine = left & (table_of == table)
            of = described + table * DESCRIBED
            unused, over = _row_left(mine, of, origin)
            row = tl.where(mine, unused, row)
            if tl.load(of + EVICTS) != 0:
                small = tl.load(longs(origin, of, BUDGET) + SMALL) != 0
                todo = mine & (unused < 0) & (small == 0)
                if tl.max(todo.to(tl.int32), axis=0) > 0:
                    found = _replace(
                        id, position, table, todo, described, origin, cells, given, gone, stride, GIVEN, LIST, AGED,
                        LRU_, BLOCK,
                    )  # fmt: skip
                    row = tl.where(todo, found, row)
                    later = later & ((todo == 0) | (found < 0))
            left = left & (mine == 0)
            over = tl.where(mine & (unused < 0), -2 - over, -1)  # of a small table: which of those that were let go
            tl.store(out + position, tl.where(unused >= 0, unused, over).to(out.dtype.element_ty), mask=mine & later)
        _hand_over(
            row, id, position, table_of, here & (later == 0), described, origin, control, out, fresh_ids, fresh_rows,
            tally, time, GROUP, STAMP, TRACK,
        )  # fmt: skip
        waiting = tl.sum(later.to(tl.int64), axis=0)
        if waiting > 0:
            at = tl.atomic_add(cells + REST, waiting, sem="relaxed") + tl.cumsum(later.to(tl.int32), axis=0) - 1
            tl.store(rest + at, packed, mask=later)
        begin += tl.num_programs(0).to(tl.int64) * BLOCK


@triton.jit
def _insert(key, first, second, home, stash_mask, row, m, o, of, origin, BLOCK: tl.constexpr):
    """Distinct ids that have a row now into free slots of their buckets, or the stash."""
    keys = longs(origin, of, KEYS)
    rows = ints(origin, of, ROWS)
    stash_keys = longs(origin, of, STASH_KEYS)
    stash_rows = ints(origin, of, STASH_ROWS)
    lane = tl.arange(0, 8)[None, :]
    held = tl.load(keys + first[:, None] * 8 + lane, mask=m[:, None], other=EMPTY)
    free = tl.min(tl.where(held == EMPTY, lane, 8), axis=1)
    todo = m & (free == 8)
    held = tl.load(keys + second[:, None] * 8 + lane, mask=todo[:, None], other=EMPTY)
    step = tl.where(free < 8, free, 8 + tl.min(tl.where(held == EMPTY, lane, 8), axis=1)).to(tl.int64)
    todo = m
    while tl.max(todo.to(tl.int32), axis=0) > 0:
        main = step < 16
        place = tl.where(step < 8, first * 8 + step, second * 8 + step - 8)
        stash_at = (home + step - 16) & stash_mask
        cell = tl.where(main, keys + place, stash_keys + stash_at)
        # A lane with nothing to do compares a spare cell, which holds 0, with -1.
        cell = tl.where(todo, cell, origin + (o & 65535))
        wanted = tl.where(todo, tl.full([BLOCK], EMPTY, tl.int64), tl.full([BLOCK], -1, tl.int64))
        mine = todo & (tl.atomic_cas(cell, wanted, key, sem="relaxed") == EMPTY)
        tl.store(tl.where(main, rows + place, stash_rows + stash_at), row, mask=mine)
        todo = todo & (mine == 0)
        step += 1


@triton.jit
def _from_elsewhere(
    key, first, m, highest, table, of, budget, origin, cells, gone, stride,
    LIST: tl.constexpr, AGED: tl.constexpr, LRU_: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of other buckets for ids whose own have none to give, whose slots are free from now on; -1: none."""
    keys = longs(origin, of, KEYS)
    rows = ints(origin, of, ROWS)
    lane = tl.arange(0, 8)[None, :]
    buckets = tl.load(longs(origin, of, WORDS) + BUCKETS)
    row = tl.full([BLOCK], -1, tl.int32)
    todo = m
    tries = buckets * 0
    most = tl.where(tl.load(budget + IF_BETTER) != 0, ELSEWHERE_BETTER, ELSEWHERE)
    while (tries < most) & (tl.max(todo.to(tl.int32), axis=0) > 0):
        tries += 1
        bucket = ((hash_id(key + tries) >> 1).to(tl.int64) % buckets) + 1
        others = tl.load(rows + bucket[:, None] * 8 + lane, mask=todo[:, None], other=-1)
        weight = _weights(others, todo[:, None], of, budget, origin, AGED, LRU_)
        loose = todo & (tl.min(others, axis=1) < 0)  # a full bucket keeps its ids: see `weigh`
        other, slot = _least(others, weight, loose, highest, of, budget, origin, BLOCK)
        got = todo & (other >= 0)
        at = bucket * 8 + slot
        _leave(got, other, keys + at, first < 0, table, of, budget, origin, cells, gone, stride, LIST)
        tl.store(rows + at, -1, mask=got)
        tl.store(keys + at, EMPTY, mask=got)
        row = tl.where(got, other, row)
        todo = todo & (got == 0)
    return row


@triton.jit
def _row_of_rest(
    id, unused, table, small, here, o, described, origin, work, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row for each of the rest of one table, with a slot; -1 where none may leave for it."""
    of = described + table * DESCRIBED
    words = longs(origin, of, WORDS)
    key, first, second, home, stash_mask = _places(id, words, 0, tl.load(of + SALT), False)
    none = here & (unused < 0)
    row = unused.to(tl.int32)
    tl.atomic_add(words + SIZE, tl.sum((here & (none == 0)).to(tl.int64), axis=0), sem="relaxed")
    if tl.load(of + EVICTS) != 0:
        budget = longs(origin, of, BUDGET)
        if EXACT:  # noqa: SIM102 - a constant first
            if tl.load(budget + SMALL) != 0:
                released = work + small.to(tl.int64) * (3 * (MOST_SMALL + 1)) + 2 * (MOST_SMALL + 1) + (-2 - unused)
                one = tl.load(released, mask=none & (-2 - unused <= MOST_SMALL), other=-1)
                row = tl.where(none, one.to(tl.int32), row)
        got = here & (row >= 0)
        _welcome(row, got, budget, of, origin)
        refused = tl.sum((here & (row < 0)).to(tl.int64), axis=0)
        if refused > 0:
            tl.atomic_add(budget + REFUSED, refused, sem="relaxed")
    else:
        lost = tl.sum(none.to(tl.int64), axis=0)
        if lost > 0:
            tl.atomic_add(longs(origin, of, STATE) + LOST, lost, sem="relaxed")
        row = tl.where(none, 0, row)
        got = here
    _insert(key, first, second, home, stash_mask, row, got, o, of, origin, BLOCK)
    return row


@triton.jit(do_not_specialize=["stride"])
def borrow(
    ids, described, origin, cells, rest, given, out, gone, stride,
    GIVEN: tl.constexpr, LIST: tl.constexpr, AGED: tl.constexpr, LRU_: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of other buckets, into ``out``, for the ids that `replace` has left without one; there are hardly any.

    Nothing is inserted meanwhile: a bucket that has a free slot keeps one, and no id is in the stash because of it.
    """
    count = tl.load(cells + REST)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    while begin < count:
        o = begin + tl.arange(0, BLOCK)
        here = o < count
        packed = tl.load(rest + o, mask=here, other=0)
        position = packed & 0xFFFFFFFF
        id = tl.load(ids + position, mask=here, other=0)
        table_of = packed >> 32
        left = here & (tl.load(out + position, mask=here, other=0) < 0)
        while tl.max(left.to(tl.int32), axis=0) > 0:
            table = tl.min(tl.where(left, table_of, 1 << 40), axis=0)
            mine = left & (table_of == table)
            of = described + table * DESCRIBED
            if tl.load(of + EVICTS) != 0:
                budget = longs(origin, of, BUDGET)
                if tl.load(budget + SMALL) == 0:
                    words = longs(origin, of, WORDS)
                    key, first, _, _, _ = _places(id, words, 0, tl.load(of + SALT), False)
                    highest = _highest(position, mine, budget, given, GIVEN, LRU_, BLOCK)
                    row = _from_elsewhere(
                        key, first, mine, highest, table, of, budget, origin, cells, gone, stride, LIST, AGED, LRU_,
                        BLOCK,
                    )  # fmt: skip
                    got = mine & (row >= 0)
                    tl.store(out + position, row.to(out.dtype.element_ty), mask=got)
                    tl.atomic_add(words + SIZE, -tl.sum(got.to(tl.int64), axis=0), sem="relaxed")
            left = left & (mine == 0)
        begin += tl.num_programs(0).to(tl.int64) * BLOCK


@triton.jit(do_not_specialize=["time"])
def place(
    ids, described, origin, control, cells, rest, small_of, work, out, fresh_ids, fresh_rows, tally, time,
    EXACT: tl.constexpr, GROUP: tl.constexpr, STAMP: tl.constexpr, TRACK: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Slots for the ids that `replace` has left, and their rows into ``out``; -1 for one that is refused.

    ``small_of`` is the place of each small table in ``work``.
    """
    count = tl.load(cells + REST)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    while begin < count:
        o = begin + tl.arange(0, BLOCK)
        here = o < count
        packed = tl.load(rest + o, mask=here, other=0)
        position = packed & 0xFFFFFFFF
        id = tl.load(ids + position, mask=here, other=0)
        unused = tl.load(out + position, mask=here, other=-1).to(tl.int64)
        table_of = packed >> 32
        row = tl.full([BLOCK], -1, tl.int32)
        left = here
        while tl.max(left.to(tl.int32), axis=0) > 0:
            table = tl.min(tl.where(left, table_of, 1 << 40), axis=0)
            mine = left & (table_of == table)
            small = tl.load(small_of + table) if EXACT else 0
            found = _row_of_rest(id, unused, table, small, mine, o, described, origin, work, EXACT, BLOCK)
            row = tl.where(mine, found, row)
            left = left & (mine == 0)
        _hand_over(
            row, id, position, table_of, here, described, origin, control, out, fresh_ids, fresh_rows, tally, time,
            GROUP, STAMP, TRACK,
        )  # fmt: skip
        begin += tl.num_programs(0).to(tl.int64) * BLOCK


@triton.jit
def copy_gone(cells, gone, arena, out, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Copies of the rows that left, ``gone`` being the list of tables and rows, before they are others'."""
    count = tl.load(cells + GONE)
    d = tl.arange(0, WIDTH)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    while begin < count:
        o = begin + tl.arange(0, BLOCK)
        row = tl.load(gone + o, mask=o < count, other=0) & 0xFFFFFFFF
        m = (o < count)[:, None] & (d < D)[None, :]
        words = tl.load(arena + row[:, None] * STRIDE + d[None, :], mask=m, other=0.0)
        tl.store(out + o[:, None] * D + d[None, :], words, mask=m)
        begin += tl.num_programs(0).to(tl.int64) * BLOCK
