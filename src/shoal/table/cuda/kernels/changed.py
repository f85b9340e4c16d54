# pyrefly: ignore-errors
"""Updates of several tables in one launch sequence: judge gradients, give ids rows, sum what equal rows get, step.

A gradient is that of a bag, read where it lies and multiplied by the factor of each of its rows. Between the kernels
lies a workspace of int64 words, ``room`` for each of: where a gradient begins, a new row's id, the table and number of
a new row, and the factor of a gradient. Where an update has bags of max or firstn (AIMED), what is said of where a
gradient begins has flags below it; those gradients were aimed at their rows by kernels/aimed.py.
"""

import triton
import triton.language as tl

from shoal.table.cuda.kernels.evict import FRESH_ROWS, enlist, touch
from shoal.table.cuda.kernels.index import (
    BUCKETS,
    EMPTY,
    FREE,
    FULL,
    LOST,
    NEXT,
    ROOM,
    SIZE,
    TAKEN,
    _places,
)
from shoal.table.cuda.kernels.located import (
    ARENA,
    BASE,
    BUDGET,
    DESCRIBED,
    EVICTS,
    FREE_ROWS,
    KEYS,
    MOVED,
    PADDING,
    ROWS,
    SALT,
    SCORES,
    SEED,
    SKIPPED,
    STASH_KEYS,
    STASH_ROWS,
    STATE,
    WORDS,
    column,
    ints,
    last_not_above,
    locate,
    longs,
    stamp,
)
from shoal.table.cuda.kernels.optimizers import _fetch_ahead, _join, _rest_of, _step
from shoal.table.cuda.kernels.policy import COMING, HELD
from shoal.table.cuda.kernels.pooled import divisor
from shoal.table.cuda.kernels.rows import _start_rows, first_weights

# Words of a group's tally.
BAD = tl.constexpr(0)  # gradients of this update that hold NaN or infinity
FRESH = FRESH_ROWS
TOLD = tl.constexpr(2)  # bad gradients of all updates so far
NUMBER = tl.constexpr(3)  # of the last update that was not captured

# Words of what the host is told; located.py writes the second.
TOLD_BAD = tl.constexpr(0)
TOLD_ROOM = tl.constexpr(2)

# Words of a group's control block: common ones, then two for each table.
STEP = tl.constexpr(0)

RAISE = tl.constexpr(0)
SKIP = tl.constexpr(1)

# Flags of an aimed gradient, and the bits that they take.
NONE_ = tl.constexpr(1)  # it is zero
MARKED = tl.constexpr(2)  # in the columns that are marked
WRONG = tl.constexpr(4)  # it holds NaN or infinity
FLAGS = tl.constexpr(3)


@triton.jit(do_not_specialize=["n", "features", "each", "width"])
def survey(
    grads, offsets, where, columns, combiners, seen, tally, n, features, each, width,
    ROWS_: tl.constexpr, PAD: tl.constexpr, KIND: tl.constexpr, JUDGE: tl.constexpr, COUNT: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, BAGS: tl.constexpr,
):  # fmt: skip
    """What is to be known of each bag: the factor of its rows and its largest gradient, ``seen [2, bags]``.

    JUDGE looks at gradients at all; COUNT counts the rows of bags with NaN or infinity as bad.
    ROWS_: each row is a bag, of one feature. Programs have bags as those of `pool` do.
    """
    feature = tl.program_id(0) % features
    place = (tl.program_id(0) // features) * BAGS + tl.arange(0, BAGS)
    m = place < each
    bag = feature * each + place
    bags = features * each
    if ROWS_:
        count = m.to(tl.int64)
        if PAD:
            count = (tl.load(where + bag, mask=m, other=PADDING) != PADDING).to(tl.int64)
    else:
        begin = tl.load(offsets + bag, mask=m, other=0)
        begin = tl.maximum(begin, 0)
        end = tl.minimum(tl.load(offsets + bag + 1, mask=m, other=0), n)
        count = tl.maximum(end - begin, 0)
        if PAD:
            longest = tl.max(count, axis=0)
            k = longest * 0
            while k < longest:
                none = tl.load(where + begin + k, mask=m & (begin + k < end), other=0) == PADDING
                count -= none.to(tl.int64)
                k += 1
    if KIND != 0:
        by = divisor(count.to(tl.int32), combiners, feature, KIND)
        tl.store(seen + bag, tl.div_rn(1.0 + by * 0, by), mask=m)
    if JUDGE:
        d = tl.arange(0, WIDTH)
        at = place.to(tl.int64) * width
        if ROWS_ == 0:
            at += tl.load(columns + feature)
        g = tl.load(grads + at[:, None] * UNIT + d[None, :], mask=m[:, None] & (d < D)[None, :], other=0.0)
        size = tl.abs(g)
        largest = tl.max(tl.where(size < float("inf"), size, float("inf")), axis=1)
        tl.store(seen + bags + bag, largest, mask=m)
        if COUNT:
            wrong = tl.sum(tl.where(m & (largest == float("inf")), count, 0), axis=0)
            if wrong > 0:
                tl.atomic_add(tally + BAD, wrong, sem="relaxed")


@triton.jit(do_not_specialize=["n", "bags", "jump"])
def weigh(
    offsets, where, weights, seen, tally, n, bags, jump, PAD: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """Counts gradients that are bad once they have their weights."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    bag = last_not_above(offsets, bags, jump, o, m)
    if PAD:
        m = m & (tl.load(where + o, mask=m, other=PADDING) != PADDING)
    factor = tl.load(weights + o, mask=m, other=0.0)
    if KIND != 0:
        factor *= tl.load(seen + bag, mask=m, other=0.0)
    size = tl.abs(factor) * tl.load(seen + bags + bag, mask=m, other=0.0)
    wrong = tl.sum((m & ((size < float("inf")) == 0)).to(tl.int64), axis=0)
    if wrong > 0:
        tl.atomic_add(tally + BAD, wrong, sem="relaxed")


@triton.jit
def _new_rows(won, count, of, origin, SINGLE: tl.constexpr):
    """Rows for the ``count`` lanes that have won a slot, freed ones first; row 0, nobody's, where no room is."""
    state = longs(origin, of, STATE)
    words = longs(origin, of, WORDS)
    if SINGLE:
        taken = tl.atomic_add(state + TAKEN, count.to(tl.int64), sem="relaxed")
        rank = taken + tl.cumsum(won.to(tl.int32), axis=0) - 1
        tl.atomic_add(words + SIZE, count.to(tl.int64), sem="relaxed")
    else:
        one = won.to(tl.int64)
        rank = tl.atomic_add(state + TAKEN, one, mask=won, sem="relaxed")
        tl.atomic_add(words + SIZE, one, mask=won, sem="relaxed")
    free_count = tl.load(state + FREE)
    again = won & (rank < free_count)
    reused = tl.load(ints(origin, of, FREE_ROWS) + rank, mask=again, other=0).to(tl.int64)
    new = tl.where(again, reused, tl.load(state + NEXT) + rank - free_count)
    lost = won & (new >= tl.load(state + ROOM))
    if tl.max(lost.to(tl.int32), axis=0) > 0:
        tl.atomic_add(state + LOST + won.to(tl.int64) * 0, lost.to(tl.int64), mask=lost, sem="relaxed")
    return tl.where(lost, 0, new).to(tl.int32)


@triton.jit
def _take(id, of, m, o, origin, spare, SINGLE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of ids, and which of them were made; as `insert` of the index does it."""
    keys = longs(origin, of, KEYS)
    rows = ints(origin, of, ROWS)
    stash_keys = longs(origin, of, STASH_KEYS)
    stash_rows = ints(origin, of, STASH_ROWS)
    key, first, second, home, stash_mask = _places(id, longs(origin, of, WORDS), 0, tl.load(of + SALT), False)
    lane = tl.arange(0, 8)[None, :]
    held = tl.load(column(keys, SINGLE) + first[:, None] * 8 + lane, mask=m[:, None], other=EMPTY)
    slot = tl.min(tl.where(held == key[:, None], lane, 8), axis=1)
    free = tl.min(tl.where(held == EMPTY, lane, 8), axis=1)
    where = first * 8 + slot
    row = tl.load(rows + where, mask=m & (slot < 8), other=-1)
    todo = m & (slot == 8)
    won = m & (o < 0)
    in_stash = m & (o < 0)
    if tl.max(todo.to(tl.int32), axis=0) > 0:
        held = tl.load(column(keys, SINGLE) + second[:, None] * 8 + lane, mask=todo[:, None], other=EMPTY)
        slot2 = tl.min(tl.where(held == key[:, None], lane, 8), axis=1)
        free2 = tl.min(tl.where(held == EMPTY, lane, 8), axis=1)
        hit2 = todo & (slot2 < 8)
        where = tl.where(hit2, second * 8 + slot2, where)
        row = tl.where(hit2, tl.load(rows + where, mask=hit2, other=-1), row)
        todo = todo & (slot2 == 8)
        step = tl.where(free < 8, free, 8 + free2).to(tl.int64)  # place in the id's order; 16 and on: the stash
        while tl.max(todo.to(tl.int32), axis=0) > 0:
            main = step < 16
            place = tl.where(step < 8, first * 8 + step, second * 8 + step - 8)
            stash_at = (home + step - 16) & stash_mask
            cell = tl.where(main, keys + place, stash_keys + stash_at)
            # A lane with nothing to do compares a spare cell, which holds 0, with -1.
            cell = tl.where(todo, cell, spare + (o & 65535))
            wanted = tl.where(todo, tl.full([BLOCK], EMPTY, tl.int64), tl.full([BLOCK], -1, tl.int64))
            old = tl.atomic_cas(cell, wanted, key, sem="relaxed")
            mine = todo & (old == EMPTY)
            done = mine | (todo & (old == key))
            won = won | mine
            in_stash = tl.where(done, main == 0, in_stash)
            where = tl.where(done, tl.where(main, place, stash_at), where)
            todo = todo & (done == 0)
            step += 1
        count = tl.sum(won.to(tl.int32), axis=0)
        if count > 0:
            row = tl.where(won, _new_rows(won, count, of, origin, SINGLE), row)
            tl.store(rows + where, row, mask=won & (in_stash == 0))
            tl.store(stash_rows + where, row, mask=won & in_stash)
    wait = m & (row < 0)  # for another program, which has the slot and is about to write the row there
    while tl.max(wait.to(tl.int32), axis=0) > 0:
        cell = tl.where(in_stash, stash_rows + where, rows + where)
        now = tl.atomic_add(cell, 0, mask=wait, sem="relaxed")
        row = tl.where(wait, now, row)
        wait = wait & (now < 0)
    return row, won


@triton.jit
def _count_coming(table, won, described, origin):
    """Counts the new ids of each table with a budget."""
    left = won
    while tl.max(left.to(tl.int32), axis=0) > 0:  # neighbours are mostly of one table
        one = tl.min(tl.where(left, table, 1 << 40), axis=0)
        mine = left & (table == one)
        of = described + one * DESCRIBED
        if tl.load(of + EVICTS) != 0:
            count = tl.sum(mine.to(tl.int64), axis=0)
            tl.atomic_add(longs(origin, of, BUDGET) + COMING, count, sem="relaxed")
        left = left & (mine == 0)


@triton.jit(
    do_not_specialize=[
        "n", "start", "room", "only", "features", "bags", "each", "jump", "width", "begins_at", "mask",
    ]
)  # fmt: skip
def claim(
    ids, places, where, versions, weights, seen, tables, columns, described, origin, control, spare, workspace, keys,
    tally, all_ids, cells, comers, n, start, room, only, features, bags, each, jump, width, begins_at, mask,
    SINGLE: tl.constexpr, ROWS_: tl.constexpr, WEIGHTED: tl.constexpr, KIND: tl.constexpr, AIMED: tl.constexpr,
    OWN: tl.constexpr, JUDGE: tl.constexpr, STAMP: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    EVICT: tl.constexpr, LRU_: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row for each id, in ``keys`` from ``start`` on, and where its gradient is; -1 for an id that is passed over.

    ``places`` are the offsets of bags or, with ROWS_, the first ids of features. Gradients begin at ``begins_at``.
    WIDE: keys are int64, here and in the kernels that read them. AIMED: the update has flags; OWN: these gradients
    were aimed, and are judged. EVICT: some table has a budget (LRU_: all of these evict by `Lru`), so rows of known
    ids are held, and new ids wait in a list for the kernels of evict.py; ``all_ids`` are those of all parts.
    """
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    if ROWS_:
        bag = o
        source = begins_at + o * width
        feature = o * 0
        if SINGLE == 0:
            feature = last_not_above(places, features, jump, o, m)
    else:
        bag = o * 0
        if OWN == 0 or SINGLE == 0:
            bag = last_not_above(places, bags, jump, o, m)
        feature = bag // each
        source = begins_at + (bag % each) * width + tl.load(columns + feature, mask=m, other=0)
    if OWN:
        flags = tl.load(workspace + start + o, mask=m, other=0)
    elif AIMED:
        tl.store(workspace + start + o, source << FLAGS, mask=m)
    else:
        tl.store(workspace + start + o, source, mask=m)
    row = tl.load(where + o, mask=m, other=PADDING)
    here = m & (row != PADDING)
    if JUDGE == RAISE:
        here = here & (tl.load(tally + BAD) == 0)
    if SINGLE:
        table = only
    else:
        table = tl.load(tables + feature, mask=m, other=0)
    of = described + table * DESCRIBED
    if OWN == 0 and (WEIGHTED or KIND != 0):
        factor = here.to(tl.float32)
        if WEIGHTED:
            factor = tl.load(weights + o, mask=here, other=0.0)
        if KIND != 0:
            factor *= tl.load(seen + bag, mask=here, other=0.0)
        tl.store((workspace + 3 * room).to(tl.pointer_type(tl.float32)) + start + o, factor, mask=m)
    if JUDGE == SKIP:
        if OWN:
            good = (flags & WRONG) == 0
        else:
            size = tl.load(seen + bags + bag, mask=here, other=0.0)
            if WEIGHTED or KIND != 0:
                size *= tl.abs(factor)
            good = size < float("inf")
        wrong = here & (good == 0)
        if tl.max(wrong.to(tl.int32), axis=0) > 0:
            tl.atomic_add(longs(origin, of, SKIPPED) + o * 0, wrong.to(tl.int64), mask=wrong, sem="relaxed")
        here = here & good
    state = longs(origin, of, STATE)
    moved = tl.load(versions + table) != tl.load(state + MOVED)
    look = here & ((row < 0) | moved | (row >= tl.load(state + ROOM)))
    code = o * 0 - 1
    if EVICT:
        if tl.max(look.to(tl.int32), axis=0) > 0:
            id = tl.load(ids + o, mask=look, other=0)
            row = tl.where(look, locate(id, of, look, origin, SINGLE), row)
            new = look & (row < 0)
            if tl.max(new.to(tl.int32), axis=0) > 0:
                whose = o * 0 + table
                code, won = enlist(id, whose, new, start + o, all_ids, cells, comers, mask, spare, BLOCK)
                _count_coming(whose, won, described, origin)
        here = here & (row >= 0)
        held = here & (tl.load(of + EVICTS) != 0)
        if LRU_:
            touch(row, held, of, origin)
        else:
            tl.atomic_or(ints(origin, of, SCORES) + row, HELD, mask=held, sem="relaxed")
    else:
        if tl.max(look.to(tl.int32), axis=0) > 0:
            id = tl.load(ids + o, mask=look, other=0)
            taken, won = _take(id, of, look, o, origin, spare, SINGLE, BLOCK)
            row = tl.where(look, taken, row)
            made = tl.sum(won.to(tl.int32), axis=0)
            if made > 0:
                at = tl.atomic_add(tally + FRESH, made.to(tl.int64), sem="relaxed")
                at += tl.cumsum(won.to(tl.int32), axis=0) - 1
                tl.store(workspace + room + at, id, mask=won)
                packed = ((row.to(tl.int64) * 0 + table) << 32) | row.to(tl.int64)
                tl.store(workspace + 2 * room + at, packed, mask=won)
    if STAMP:
        stamp(row, table, of, here, origin, control)
    key = row.to(tl.int64) + tl.load(of + BASE)
    tl.store(keys + start + o, tl.where(here, key, code).to(keys.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["room"])
def start(
    workspace, tally, described, origin, room, low, high, last, accumulator, beta1, beta2,
    INIT: tl.constexpr, INDEX: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    WEIGHT: tl.constexpr, STATE_: tl.constexpr, VECTORS: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A segment of the rows that `claim` made, as new ones have it."""
    count = tl.load(tally + FRESH)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    words = origin.to(tl.pointer_type(tl.float32))
    d = tl.arange(0, WIDTH)
    while begin < count:
        o = begin + tl.arange(0, BLOCK)
        here = o < count
        id = tl.load(workspace + room + o, mask=here, other=0)
        packed = tl.load(workspace + 2 * room + o, mask=here, other=0)
        of = described + (packed >> 32) * DESCRIBED
        at = (packed & 0x7FFFFFFF) * STRIDE + tl.load(of + ARENA) * 4
        w = first_weights(id, d, tl.load(of + SEED), low, high, last, INIT, INDEX)
        _start_rows(words, at, w, here, d, accumulator, beta1, beta2, D, WIDTH, WEIGHT, STATE_, VECTORS, TAIL, BLOCK)
        begin += tl.num_programs(0).to(tl.int64) * BLOCK


@triton.jit
def _home(key, m, bases, described, tables, jump, SINGLE: tl.constexpr):
    """The table of rows, and the row's number in it."""
    if SINGLE:
        table = 0
        row = key
    else:
        table = last_not_above(bases, tables, jump, key.to(tl.int64), m)
        row = (key - tl.load(bases + table)).to(tl.int32)
    return table, described + table * DESCRIBED, row


@triton.jit
def aimed(grads, marks, word, position, here, d, inside, WEIGHT: tl.constexpr, BYTES: tl.constexpr, UNIT: tl.constexpr):
    """Columns ``d`` of a segment of aimed gradients, of which ``word`` says where they begin."""
    here = here & ((word & NONE_) == 0)
    g = tl.load(grads + (word >> FLAGS)[:, None] * UNIT + WEIGHT + d[None, :], mask=here[:, None] & inside, other=0.0)
    some = (here & ((word & MARKED) != 0))[:, None] & inside
    c = WEIGHT + d[None, :]
    bits = tl.load(marks + position[:, None] * BYTES + c // 8, mask=some, other=255).to(tl.int32)
    return tl.where(((bits >> (c % 8)) & 1) != 0, g, 0.0)


@triton.jit
def _gradients(
    grads, marks, workspace, room, position, here, d, inside,
    AIMED: tl.constexpr, FACTOR: tl.constexpr, WEIGHT: tl.constexpr, BYTES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    source = tl.load(workspace + position, mask=here, other=0)
    if AIMED:
        g = aimed(grads, marks, source, position, here, d, inside, WEIGHT, BYTES, UNIT)
    else:
        g = tl.load(grads + WEIGHT + source[:, None] * UNIT + d[None, :], mask=here[:, None] & inside, other=0.0)
    if FACTOR:
        at = (workspace + 3 * room).to(tl.pointer_type(tl.float32))
        g *= tl.load(at + position, mask=here, other=0.0)[:, None]
    return g


@triton.jit
def room_left(described, origin, TABLES: tl.constexpr):
    """Ids that fit into every table, whichever they are."""
    of = described + tl.arange(0, TABLES) * DESCRIBED  # those beyond the last are as the first
    state, words = longs(origin, of, STATE), longs(origin, of, WORDS)
    rows = tl.load(state + ROOM) - tl.load(state + NEXT) + tl.load(state + FREE) - tl.load(state + TAKEN)
    slots = tl.load(words + BUCKETS) * FULL - tl.load(words + SIZE)
    least = tl.where(tl.load(of + EVICTS) == 2, 0x7FFFFFFF, tl.minimum(rows, slots))  # for others rows leave
    return tl.minimum(tl.min(least, axis=0), 0x7FFFFFFF)


@triton.jit
def close(tally, told, described, origin, number, TABLES: tl.constexpr):
    """Makes the tally ready for the next update, and tells the host of bad gradients and of the room that is left.

    ``number`` is the update's; -1 in a captured graph, whose updates the host does not count.
    """
    if tl.program_id(0) == 0:
        last = tl.load(tally + NUMBER)
        last = tl.where(number < 0, last, number)
        tl.debug_barrier()
        tl.store(tally + NUMBER, last)
        tl.store(told + TOLD_ROOM, (room_left(described, origin, TABLES) << 31) | last)  # one word: both or neither
        bad = tl.load(tally + BAD)
        if bad > 0:
            total = tl.load(tally + TOLD) + bad
            tl.debug_barrier()
            tl.store(tally + TOLD, total)
            tl.store(told + TOLD_BAD, total)
            tl.store(tally + BAD, bad * 0)
        tl.store(tally + FRESH, bad * 0)


@triton.jit(do_not_specialize=["n", "room", "tables", "jump", "segments", "number"])
def add(
    keys, workspace, grads, marks, bases, described, origin, rates, tally, told, n, room, tables, jump, segments,
    number,
    SINGLE: tl.constexpr, TABLES: tl.constexpr, WIDE: tl.constexpr, AIMED: tl.constexpr, FACTOR: tl.constexpr,
    LAST: tl.constexpr, INDEX: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    WEIGHT: tl.constexpr, BYTES: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A step of SGD: every gradient is taken off its row as it comes, since the sum is the same in any order."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + o, mask=o < n, other=-1)
    here = key >= 0
    d = tl.arange(0, WIDTH)
    inside = (d < D)[None, :]
    table, of, row = _home(key, here, bases, described, tables, jump, SINGLE)
    at = row.to(tl.int64) * STRIDE + tl.load(of + ARENA) * 4
    g = _gradients(grads, marks, workspace, room, o, here, d, inside, AIMED, FACTOR, WEIGHT, BYTES, UNIT)
    rate = tl.load(rates + table * segments + INDEX) + row.to(tl.float32) * 0
    words = origin.to(tl.pointer_type(tl.float32))
    m = here[:, None] & inside
    if AIMED:
        m = m & (g != 0)
    tl.atomic_add(words + at[:, None] + WEIGHT + d[None, :], -rate[:, None] * g, mask=m, sem="relaxed")
    if LAST:
        close(tally, told, described, origin, number, TABLES)


@triton.jit(do_not_specialize=["n", "room", "tables", "jump", "segments"])
def step_within(
    keys, order, workspace, grads, marks, bases, described, origin, control, rates, n, room, tables, jump, segments,
    numbers,
    SINGLE: tl.constexpr, WIDE: tl.constexpr, AIMED: tl.constexpr, FACTOR: tl.constexpr, STAMP: tl.constexpr,
    OPT: tl.constexpr, NESTEROV: tl.constexpr, DECOUPLED: tl.constexpr, INDEX: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, WEIGHT: tl.constexpr, STATE_: tl.constexpr, HELD: tl.constexpr,
    LINES: tl.constexpr, BYTES: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums the gradients of equal rows in order and steps each row once, for rows whose gradients are in one block.

    ``keys`` are sorted, ``order`` has their positions. The sum of a row that goes on in the next block is left in
    the workspace, and what a block adds to a row from the block before; `step_across` does the rest.
    """
    tile = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    o = tile * BLOCK + i
    key = tl.load(keys + o, mask=o < n, other=-1)
    before = tl.load(keys + o - 1, mask=(o > 0) & (o < n), other=-1)
    after = tl.load(keys + o + 1, mask=o + 1 < n, other=-1)
    position = tl.load(order + o, mask=o < n, other=0)
    here = key >= 0
    head = (before != key).to(tl.int32)
    begun = tl.cumsum(head, axis=0) > 0
    tail = here & (after != key)
    alone = tail & begun
    table, of, row = _home(key, alone, bases, described, tables, jump, SINGLE)
    at = tl.where(alone, row, 0).to(tl.int64) * STRIDE + tl.load(of + ARENA) * 4
    d = tl.arange(0, WIDTH)
    inside = (d < D)[None, :]
    words = origin.to(tl.pointer_type(tl.float32))
    g = _gradients(grads, marks, workspace, room, position, here, d, inside, AIMED, FACTOR, WEIGHT, BYTES, UNIT)
    _fetch_ahead(words + at + STATE_, alone, HELD, LINES)
    if HELD > 0:
        _fetch_ahead(words + at + WEIGHT, alone, D, LINES)
    heads = head[:, None] + tl.zeros([BLOCK, WIDTH], tl.int32)
    _, total = tl.associative_scan((heads, g), 0, _join)
    partial = tile * WIDTH + d[None, :] + tl.zeros([BLOCK, 1], tl.int64)
    opened = (workspace + 4 * room).to(tl.pointer_type(tl.float32))
    closed = opened + tl.num_programs(0).to(tl.int64) * WIDTH
    tl.store(opened + partial, total, mask=(here & (after == key) & (i == BLOCK - 1))[:, None] & inside)
    tl.store(closed + partial, total, mask=(tail & (begun == 0))[:, None] & inside)
    w = tl.load(words + at[:, None] + WEIGHT + d[None, :], mask=alone[:, None] & inside, other=0.0)
    rate = tl.load(rates + table * segments + INDEX) + row.to(tl.float32) * 0
    if STAMP:
        stamp(row, table, of, alone, origin, control)
    _step(
        w, total, at, words, alone, alone, inside, d, position, rate, rate[:, None], numbers, tl.load(control + STEP),
        0, OPT, NESTEROV, DECOUPLED, False, False, INDEX, D, WEIGHT, STATE_,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "room", "tables", "jump", "segments", "number"])
def step_across(
    keys, workspace, bases, described, origin, control, rates, tally, told, n, room, tables, jump, segments, numbers,
    number,
    SINGLE: tl.constexpr, TABLES: tl.constexpr, WIDE: tl.constexpr, STAMP: tl.constexpr, LAST: tl.constexpr,
    OPT: tl.constexpr, NESTEROV: tl.constexpr, DECOUPLED: tl.constexpr, INDEX: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, WEIGHT: tl.constexpr, STATE_: tl.constexpr, HELD: tl.constexpr,
    LINES: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Steps the rows whose gradients are in several blocks of `step_within`; a program looks at TILES blocks."""
    each = tl.arange(0, TILES)
    tile = tl.program_id(0).to(tl.int64) * TILES + each
    begin = tile * TILE
    end = begin + TILE
    key = tl.load(keys + end - 1, mask=end < n, other=-1)
    goes_on = tl.load(keys + end, mask=end < n, other=-1) == key
    before = tl.load(keys + begin - 1, mask=(begin > 0) & (end < n), other=-1)
    mine = (key >= 0) & goes_on & (before != key)
    if tl.max(mine.to(tl.int32), axis=0) > 0:
        d = tl.arange(0, WIDTH)
        inside = (d < D)[None, :]
        words = origin.to(tl.pointer_type(tl.float32))
        opened = (workspace + 4 * room).to(tl.pointer_type(tl.float32))
        closed = opened + tl.cdiv(n, TILE).to(tl.int64) * WIDTH
        table, of, row = _home(key, mine, bases, described, tables, jump, SINGLE)
        at = tl.where(mine, row, 0).to(tl.int64) * STRIDE + tl.load(of + ARENA) * 4
        _fetch_ahead(words + at + STATE_, mine, HELD, LINES)
        w = tl.load(words + at[:, None] + WEIGHT + d[None, :], mask=mine[:, None] & inside, other=0.0)
        total = tl.load(opened + tile[:, None] * WIDTH + d[None, :], mask=mine[:, None] & inside, other=0.0)
        further = mine
        k = tile + 1
        for _ in tl.static_range(2):
            here = further
            further = here & (tl.load(keys + (k + 1) * TILE, mask=here & ((k + 1) * TILE < n), other=-1) == key)
            part = tl.where(further, opened + k * WIDTH, closed + k * WIDTH)
            total += tl.load(part[:, None] + d[None, :], mask=here[:, None] & inside, other=0.0)
            k += 1
        if tl.max(further.to(tl.int32), axis=0) > 0:
            for which in range(TILES):
                own = further & (each == which)
                if tl.max(own.to(tl.int32), axis=0) > 0:
                    the_key = tl.max(tl.where(own, key, -1), axis=0)
                    first = tl.max(tl.where(own, k, 0), axis=0)
                    rest = _rest_of(the_key, first, keys, opened, closed, n, d, inside, WIDTH, TILE, SPAN)
                    total += tl.where(own[:, None], rest, 0.0)
        rate = tl.load(rates + table * segments + INDEX) + row.to(tl.float32) * 0
        if STAMP:
            stamp(row, table, of, mine, origin, control)
        _step(
            w, total, at, words, mine, mine, inside, d, tile, rate, rate[:, None], numbers, tl.load(control + STEP), 0,
            OPT, NESTEROV, DECOUPLED, False, False, INDEX, D, WEIGHT, STATE_,
        )  # fmt: skip
    if LAST:
        close(tally, told, described, origin, number, TABLES)
