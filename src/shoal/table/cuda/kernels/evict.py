# pyrefly: ignore-errors
"""Rows for the new ids of a call on tables that may be full.

hold.py comes first: it holds the rows of known ids and lists the new ids. `replace` then gives each new id the row and
the index slot of the id that the policy ranks lowest in its buckets. `borrow` takes rows from other buckets for the few
ids whose own buckets have none to give. `place` inserts these ids, and those that get an unused row, into the index.
settle.py ends the call. small.py evicts from small tables before `replace` runs.
"""

import triton
import triton.language as tl

from shoal.table.cuda.kernels.hold import COMERS, FRESH_ROWS, GONE, REST
from shoal.table.cuda.kernels.index import (
    BUCKETS,
    EMPTY,
    EPOCH,
    FRESH,
    LOST,
    ROOM,
    SIZE,
    TAKEN,
    _places,
    hash_id,
    row_of_rank,
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
    longs,
    stamp,
)
from shoal.table.cuda.kernels.policy import (
    AGE_MAX,
    AGE_MIN,
    AGE_SUM,
    CALL,
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
    POLICY,
    REFUSED,
    SHIFT,
    SMALL,
    TYPICAL,
    VALUE,
    order,
    score_code,
    written,
)

NONE = tl.constexpr(0x7FFFFFFF)  # above all keys
MOST_SMALL = tl.constexpr(8192)  # rows of a small table
ELSEWHERE = tl.constexpr(64)  # other buckets to search when an id's own have no row to give
ELSEWHERE_BETTER = tl.constexpr(4)  # the same for a table that can refuse the id


@triton.jit
def _may_leave(row, word, could, of, budget, origin, AGED: tl.constexpr):
    """Which of the rows ``could`` can be evicted: not held by the call, not pinned, and old enough."""
    could = could & ((word & (HELD | PINNED)) == 0)
    call = (tl.load(budget + CALL) & VALUE).to(tl.int32)
    could = could & ((tl.load(budget + POLICY) != LRU) | (((word >> SHIFT) & VALUE) != call))
    if AGED:
        age = tl.load(budget + MIN_AGE_S)
        time = tl.load(ints(origin, of, TIMES) + row, mask=could & (tl.load(of + TIMED) != 0), other=0)
        could = could & (tl.load(budget + NOW_S) - (time.to(tl.int64) & 0xFFFFFFFF) >= age)
    return could


@triton.jit
def _leave(goes, row, cell, apart, table, of, budget, origin, cells, gone, stride, LIST: tl.constexpr):
    """Counts evicted rows; with LIST also lists their ids, tables and rows, and times, each list ``stride`` long."""
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
        tl.store(ints(origin, of, TIMES) + row, 0, mask=timed)  # as for unused rows


@triton.jit
def _weights(row, m, of, budget, origin, AGED: tl.constexpr, LRU_: tl.constexpr):
    """The keys of rows; NONE for a row that cannot be evicted or does not exist."""
    there = m & (row >= 0)
    word = tl.load(ints(origin, of, SCORES) + row, mask=there, other=HELD)
    could = _may_leave(row, word, there, of, budget, origin, AGED)
    return tl.where(could, order(word, budget, LRU_), NONE)


@triton.jit
def _claim_row(victim, todo, of, budget, origin):
    """Which lanes got their victim's row; one that another lane took in this call is refused."""
    at = ints(origin, of, SCORES) + victim
    before = tl.atomic_or(at, HELD, mask=todo, sem="relaxed")
    call = (tl.load(budget + CALL) & VALUE).to(tl.int32)
    taken = (tl.load(budget + POLICY) == LRU) & (((before >> SHIFT) & VALUE) == call)
    free = (before & HELD) == 0
    wrong = todo & free & taken  # taken by another lane, which has released it
    if tl.max(wrong.to(tl.int32), axis=0) > 0:
        tl.atomic_and(at, ~HELD, mask=wrong, sem="relaxed")
    return todo & free & (taken == 0)


@triton.jit
def _least(row, weight, todo, highest, of, budget, origin, BLOCK: tl.constexpr):
    """For each lane, the row with the lowest key of eight that no other lane has taken, and its slot; -1: none."""
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
    """The highest key of a row that can be evicted for a new id."""
    if GIVEN:
        newcomer = score_code(tl.load(given + position, mask=m, other=0.0))
    else:
        newcomer = order(written(tl.zeros([BLOCK], tl.int32), budget, 0, False), budget, LRU_)
    return tl.where(tl.load(budget + IF_BETTER) != 0, newcomer, NONE - 1)


@triton.jit
def _welcome(row, m, budget, of, origin):
    """Writes the policy's words of rows given to new ids of one table; `settle` completes them unless it is `Lru`."""
    call = ((tl.load(budget + CALL) & VALUE) << SHIFT).to(tl.int32)
    word = tl.where(tl.load(budget + POLICY) == LRU, call, HELD)
    tl.store(ints(origin, of, SCORES) + row, word + row * 0, mask=m)
    tl.atomic_add(budget + CREATED, tl.sum(m.to(tl.int64), axis=0), sem="relaxed")


@triton.jit
def _hand_over(
    row, id, position, table_of, here, described, origin, control, out, fresh_ids, fresh_rows, tally, time,
    GROUP: tl.constexpr, STAMP: tl.constexpr, TRACK: tl.constexpr,
):  # fmt: skip
    """Writes the rows of new ids to ``out``, -1 for none, and stamps them.

    Rows of a single table are marked FRESH. Those of a GROUP are numbered across its tables and listed as by `claim`;
    with STAMP, their time and epoch come from the control block.
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
    """An unused row for each id of one table, -1 if there are no more; and by how much its number exceeds the room."""
    state = longs(origin, of, STATE)
    count = tl.sum(here.to(tl.int64), axis=0)
    rank = tl.atomic_add(state + TAKEN, count, sem="relaxed") + tl.cumsum(here.to(tl.int32), axis=0) - 1
    row = row_of_rank(rank, here, state, ints(origin, of, FREE_ROWS))
    over = row - tl.load(state + ROOM)
    return tl.where(here & (over < 0), row, -1).to(tl.int32), over


@triton.jit
def _replace(
    id, position, table, here, described, origin, cells, given, gone, stride,
    GIVEN: tl.constexpr, LIST: tl.constexpr, AGED: tl.constexpr, LRU_: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gives each id of one table the row and slot that the policy ranks lowest in its two buckets; -1: none.

    With `Lru` the first bucket is enough if it has a row as old as those evicted typically. If both buckets are full,
    the id's first place in the stash is searched as well.
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
        last = stashed[:, None] & (lane == 7)  # instead of the last row of the bucket
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


@triton.jit
def _listed(listed, ids, begin, count, BLOCK: tl.constexpr):
    """A block of a list: places, which of them exist, entries, and the positions, ids and tables of these."""
    o = begin + tl.arange(0, BLOCK)
    here = o < count
    packed = tl.load(listed + o, mask=here, other=0)
    position = packed & 0xFFFFFFFF
    return o, here, packed, position, tl.load(ids + position, mask=here, other=0), packed >> 32


@triton.jit(do_not_specialize=["stride", "time"])
def replace(
    ids, described, origin, control, cells, comers, rest, given, out, gone, fresh_ids, fresh_rows, tally, stride, time,
    GIVEN: tl.constexpr, LIST: tl.constexpr, GROUP: tl.constexpr, AGED: tl.constexpr, LRU_: tl.constexpr,
    STAMP: tl.constexpr, TRACK: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Evicts rows for listed ids whose tables have no unused rows, and writes them to ``out``.

    All other listed ids go on the list ``rest``: those with an unused row, which is in ``out``, and those without one.
    """
    count = tl.load(cells + COMERS)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    while begin < count:
        _o, here, packed, position, id, table_of = _listed(comers, ids, begin, count, BLOCK)
        row = tl.full([BLOCK], -1, tl.int32)
        later = here
        left = here
        while tl.max(left.to(tl.int32), axis=0) > 0:  # one table at a time; most lanes have the same
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
            over = tl.where(mine & (unused < 0), -2 - over, -1)  # small table: which of the rows that `let_go` freed
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
    """Inserts distinct ids with their rows into free slots of their buckets, or into the stash."""
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
        # An idle lane compares a spare cell, which holds 0, with -1.
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
    """Evicts rows from other buckets, whose slots become free, for ids whose own buckets have none; -1: none."""
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
    """A row and a slot for each id of one table that `replace` left; -1 if no row can be evicted for it."""
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
    """Evicts rows from other buckets, into ``out``, for the few ids that `replace` left without one.

    It inserts nothing: a bucket with a free slot keeps one, so no id is in the stash because that bucket was full.
    """
    count = tl.load(cells + REST)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    while begin < count:
        _o, here, _packed, position, id, table_of = _listed(rest, ids, begin, count, BLOCK)
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
    """Inserts the ids that `replace` left into the index and writes their rows to ``out``; -1 for a refused id.

    ``small_of`` is the place of each small table in ``work``.
    """
    count = tl.load(cells + REST)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    while begin < count:
        o, here, _packed, position, id, table_of = _listed(rest, ids, begin, count, BLOCK)
        unused = tl.load(out + position, mask=here, other=-1).to(tl.int64)
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
    """Copies evicted rows, listed in ``gone`` as tables and rows, before new ids overwrite them."""
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
