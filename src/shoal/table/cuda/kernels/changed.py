# pyrefly: ignore-errors
"""Updates of several tables in one sequence of launches: check gradients, give ids rows, sum equal rows, step.

A row's gradient is that of its bag, read in place and multiplied by the row's factor. The kernels share a workspace of
int64 words, ``room`` words for each of: where a gradient begins, the id of a new row, the table and number of a new
row, and the factor of a gradient. If an update has bags of max or firstn (AIMED), the low bits of the words that say
where a gradient begins are flags; kernels/aimed.py writes those gradients' words.
"""

import triton
import triton.language as tl

from shoal.table.cuda.kernels.hold import FRESH_ROWS, enlist, touch
from shoal.table.cuda.kernels.index import (
    BUCKETS,
    FREE,
    FULL,
    LOST,
    NEXT,
    ROOM,
    SIZE,
    TAKEN,
    _places,
    awaited,
    row_of_rank,
    slots_of,
    take_slots,
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
from shoal.table.cuda.kernels.optimizers import _fetch_ahead, _step
from shoal.table.cuda.kernels.policy import COMING, HELD
from shoal.table.cuda.kernels.pooled import divisor
from shoal.table.cuda.kernels.rows import _start_rows, first_weights
from shoal.table.cuda.kernels.runs import crossing_runs, runs_of, sum_across, sums_of_runs

# Words of a group's tally.
BAD = tl.constexpr(0)  # gradients of this update that contain NaN or infinity
FRESH = FRESH_ROWS
BAD_EVER = tl.constexpr(2)  # bad gradients of all updates so far
NUMBER = tl.constexpr(3)  # number of the last update that was not captured

# Words of the report to the host; pooled.py writes the second.
REPORT_BAD = tl.constexpr(0)
REPORT_ROOM = tl.constexpr(2)

# Words of a group's control block: common ones, then two for each table.
STEP = tl.constexpr(0)

RAISE = tl.constexpr(0)
SKIP = tl.constexpr(1)

# Flags of an aimed gradient, and their number of bits.
NONE_ = tl.constexpr(1)  # it is zero
MARKED = tl.constexpr(2)  # it is zero in columns that are not marked
WRONG = tl.constexpr(4)  # it contains NaN or infinity
FLAGS = tl.constexpr(3)


@triton.jit(do_not_specialize=["n", "features", "each", "width"])
def survey(
    grads, offsets, where, columns, combiners, seen, tally, n, features, each, width,
    ROWS_: tl.constexpr, PAD: tl.constexpr, KIND: tl.constexpr, JUDGE: tl.constexpr, COUNT: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, BAGS: tl.constexpr,
):  # fmt: skip
    """For each bag, the factor of its rows and its largest absolute gradient, to ``seen [2, bags]``.

    JUDGE reads the gradients; COUNT counts the rows of bags with NaN or infinity as bad. ROWS_: each row is a bag, and
    there is one feature. Bags are distributed over programs as in `pool`.
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
    """Counts gradients that contain NaN or infinity once they are multiplied by their weights."""
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
    """Rows for the ``count`` lanes that won a slot; row 0, which no id has, where there is no room."""
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
    new = row_of_rank(rank, won, state, ints(origin, of, FREE_ROWS))
    lost = won & (new >= tl.load(state + ROOM))
    if tl.max(lost.to(tl.int32), axis=0) > 0:
        tl.atomic_add(state + LOST + won.to(tl.int64) * 0, lost.to(tl.int64), mask=lost, sem="relaxed")
    return tl.where(lost, 0, new).to(tl.int32)


@triton.jit
def _take(id, of, m, o, origin, spare, SINGLE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of ids, and which of them were created, as in `insert` of index.py."""
    keys = longs(origin, of, KEYS)
    rows = ints(origin, of, ROWS)
    stash_keys = longs(origin, of, STASH_KEYS)
    stash_rows = ints(origin, of, STASH_ROWS)
    key, first, second, home, stash_mask = _places(id, longs(origin, of, WORDS), 0, tl.load(of + SALT), False)
    slot, free = slots_of(column(keys, SINGLE), first, key, m)
    where = first * 8 + slot
    row = tl.load(rows + where, mask=m & (slot < 8), other=-1)
    todo = m & (slot == 8)
    won = m & (o < 0)
    in_stash = m & (o < 0)
    if tl.max(todo.to(tl.int32), axis=0) > 0:
        slot2, free2 = slots_of(column(keys, SINGLE), second, key, todo)
        hit2 = todo & (slot2 < 8)
        where = tl.where(hit2, second * 8 + slot2, where)
        row = tl.where(hit2, tl.load(rows + where, mask=hit2, other=-1), row)
        todo = todo & (slot2 == 8)
        won, in_stash, where = take_slots(
            key, first, second, home, stash_mask, 0, free, free2, todo, where, o, keys, stash_keys, spare, BLOCK,
        )  # fmt: skip
        count = tl.sum(won.to(tl.int32), axis=0)
        if count > 0:
            row = tl.where(won, _new_rows(won, count, of, origin, SINGLE), row)
            tl.store(rows + where, row, mask=won & (in_stash == 0))
            tl.store(stash_rows + where, row, mask=won & in_stash)
    return awaited(row, m & (row < 0), where, in_stash, rows, stash_rows), won


@triton.jit
def _count_coming(table, won, described, origin):
    """Adds the new ids to the counts of their tables, where these have a budget."""
    left = won
    while tl.max(left.to(tl.int32), axis=0) > 0:  # most lanes have the same table
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
    """Writes a row for each id to ``keys``, from ``start`` on, and where its gradient is; -1 for a skipped id.

    ``places`` are the offsets of bags or, with ROWS_, the positions of the features' first ids. Gradients begin at
    ``begins_at``. WIDE: keys are int64, here and in the kernels that read them. AIMED: the update has flags; OWN: the
    gradients of this part were aimed and checked. EVICT: some table has a budget (LRU_: all such tables evict by
    `Lru`), so rows of known ids are held, and new ids are listed for the kernels of evict.py; ``all_ids`` are the ids
    of all parts.
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
    """Initializes a segment of the rows that `claim` created."""
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
    """The tables of keys, their descriptions, and the row numbers in them."""
    if SINGLE:
        table = 0
        row = key
    else:
        table = last_not_above(bases, tables, jump, key.to(tl.int64), m)
        row = (key - tl.load(bases + table)).to(tl.int32)
    return table, described + table * DESCRIBED, row


@triton.jit
def aimed(grads, marks, word, position, here, d, inside, WEIGHT: tl.constexpr, BYTES: tl.constexpr, UNIT: tl.constexpr):
    """Columns ``d`` of a segment of aimed gradients; ``word`` says where they begin."""
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
    """The number of ids for which every table has room."""
    of = described + tl.arange(0, TABLES) * DESCRIBED  # descriptions beyond the last equal the first
    state, words = longs(origin, of, STATE), longs(origin, of, WORDS)
    rows = tl.load(state + ROOM) - tl.load(state + NEXT) + tl.load(state + FREE) - tl.load(state + TAKEN)
    slots = tl.load(words + BUCKETS) * FULL - tl.load(words + SIZE)
    least = tl.where(tl.load(of + EVICTS) == 2, 0x7FFFFFFF, tl.minimum(rows, slots))  # a full table evicts
    return tl.minimum(tl.min(least, axis=0), 0x7FFFFFFF)


@triton.jit
def close(tally, report, described, origin, number, TABLES: tl.constexpr):
    """Resets the tally for the next update, and reports bad gradients and the remaining room to the host.

    ``number`` is the number of the update; -1 in a captured graph, whose updates the host does not count.
    """
    if tl.program_id(0) == 0:
        last = tl.load(tally + NUMBER)
        last = tl.where(number < 0, last, number)
        tl.debug_barrier()
        tl.store(tally + NUMBER, last)
        tl.store(report + REPORT_ROOM, (room_left(described, origin, TABLES) << 31) | last)  # one word, written at once
        bad = tl.load(tally + BAD)
        if bad > 0:
            total = tl.load(tally + BAD_EVER) + bad
            tl.debug_barrier()
            tl.store(tally + BAD_EVER, total)
            tl.store(report + REPORT_BAD, total)
            tl.store(tally + BAD, bad * 0)
        tl.store(tally + FRESH, bad * 0)


@triton.jit(do_not_specialize=["n", "room", "tables", "jump", "segments", "number"])
def add(
    keys, workspace, grads, marks, bases, described, origin, rates, tally, report, n, room, tables, jump, segments,
    number,
    SINGLE: tl.constexpr, TABLES: tl.constexpr, WIDE: tl.constexpr, AIMED: tl.constexpr, FACTOR: tl.constexpr,
    LAST: tl.constexpr, INDEX: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    WEIGHT: tl.constexpr, BYTES: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A step of SGD: subtracts every gradient from its row at once, in any order."""
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
        close(tally, report, described, origin, number, TABLES)


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

    ``keys`` are sorted, ``order`` has their positions. Partial sums of rows that cross blocks are left in the
    workspace for `step_across`.
    """
    _, key, position, head, carried, ended, alone = runs_of(keys, order, n, BLOCK)
    here = key >= 0
    table, of, row = _home(key, alone, bases, described, tables, jump, SINGLE)
    at = tl.where(alone, row, 0).to(tl.int64) * STRIDE + tl.load(of + ARENA) * 4
    d = tl.arange(0, WIDTH)
    inside = (d < D)[None, :]
    words = origin.to(tl.pointer_type(tl.float32))
    g = _gradients(grads, marks, workspace, room, position, here, d, inside, AIMED, FACTOR, WEIGHT, BYTES, UNIT)
    _fetch_ahead(words + at + STATE_, alone, HELD, LINES)
    if HELD > 0:
        _fetch_ahead(words + at + WEIGHT, alone, D, LINES)
    opened = (workspace + 4 * room).to(tl.pointer_type(tl.float32))
    closed = opened + tl.num_programs(0).to(tl.int64) * WIDTH
    total = sums_of_runs(g, head, carried, ended, opened, closed, d, inside, WIDTH, BLOCK)
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
    keys, workspace, bases, described, origin, control, rates, tally, report, n, room, tables, jump, segments, numbers,
    number,
    SINGLE: tl.constexpr, TABLES: tl.constexpr, WIDE: tl.constexpr, STAMP: tl.constexpr, LAST: tl.constexpr,
    OPT: tl.constexpr, NESTEROV: tl.constexpr, DECOUPLED: tl.constexpr, INDEX: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, WEIGHT: tl.constexpr, STATE_: tl.constexpr, HELD: tl.constexpr,
    LINES: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Steps the rows whose gradients are in several blocks of `step_within`; a program has TILES blocks."""
    tile, key, mine = crossing_runs(keys, n, TILE, TILES)
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
        total = sum_across(key, mine, tile, keys, opened, closed, n, d, inside, WIDTH, TILE, TILES, SPAN)
        rate = tl.load(rates + table * segments + INDEX) + row.to(tl.float32) * 0
        if STAMP:
            stamp(row, table, of, mine, origin, control)
        _step(
            w, total, at, words, mine, mine, inside, d, tile, rate, rate[:, None], numbers, tl.load(control + STEP), 0,
            OPT, NESTEROV, DECOUPLED, False, False, INDEX, D, WEIGHT, STATE_,
        )  # fmt: skip
    if LAST:
        close(tally, report, described, origin, number, TABLES)
