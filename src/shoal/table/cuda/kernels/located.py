# pyrefly: ignore-errors
"""Reads of several tables in one launch: the places of ids, and their rows.

Each table has a description in device memory: where its index and its rows begin, in units of 16 bytes from ``origin``,
an arbitrary pointer. Units instead of addresses tell the compiler the alignment of reads.
"""

import triton
import triton.language as tl

from shoal.table.cuda.kernels.index import EMPTY, EPOCH, MOVED, ROOM, _places
from shoal.table.cuda.kernels.rows import first_weights

# Words of a description.
KEYS = tl.constexpr(0)
ROWS = tl.constexpr(1)
STASH_KEYS = tl.constexpr(2)
STASH_ROWS = tl.constexpr(3)
WORDS = tl.constexpr(4)
STATE = tl.constexpr(5)
FREE_ROWS = tl.constexpr(6)
ARENA = tl.constexpr(7)
TIMES = tl.constexpr(8)
EPOCHS = tl.constexpr(9)
SKIPPED = tl.constexpr(10)
SALT = tl.constexpr(11)
SEED = tl.constexpr(12)
TIMED = tl.constexpr(13)
TRACKED = tl.constexpr(14)
BASE = tl.constexpr(15)  # number of the table's first row among the rows of all tables
EVICTS = tl.constexpr(16)  # 0: no budget; 1: it has a budget; 2: and has allocated all of it
SCORES = tl.constexpr(17)
BUDGET = tl.constexpr(18)
PINNED_IDS = tl.constexpr(19)
DESCRIBED = tl.constexpr(20)

TABLES_AT = tl.constexpr(8)  # in a group's control block: for each table a time, and whether it comes from the clock

UNKNOWN = tl.constexpr(-1)
PADDING = tl.constexpr(-2)  # the place of a padding id


@triton.jit
def longs(origin, of, FIELD: tl.constexpr):
    """A table's array of int64 words, by its FIELD in the description."""
    return origin + tl.load(of + FIELD) * 2


@triton.jit
def ints(origin, of, FIELD: tl.constexpr):
    """A table's array of int32 words, by its FIELD in the description."""
    return origin.to(tl.pointer_type(tl.int32)) + tl.load(of + FIELD) * 4


@triton.jit
def column(x, SINGLE: tl.constexpr):
    """A value per lane as ``[B, 1]``; a scalar (SINGLE) unchanged."""
    if SINGLE:
        return x
    else:  # noqa: RET505 - code after a return is compiled, too
        return x[:, None]


@triton.jit
def last_not_above(ordered, count, jump, value, m):
    """The place of the last of ``count`` sorted numbers that is <= ``value``; 0 if none is.

    ``jump`` is the largest power of two below ``count``.
    """
    at = value * 0
    while jump > 0:
        further = at + jump
        inside = m & (further < count)
        held = tl.load(ordered + further, mask=inside, other=0)
        at = tl.where(inside & (held <= value), further, at)
        jump = jump >> 1
    return at


@triton.jit
def feature_at(o, offsets, features, each, FEATURES: tl.constexpr):
    """The features of ids; every feature has ``each`` bags."""
    f = tl.arange(0, FEATURES)
    inside = f < features - 1
    ends = tl.load(offsets + (f + 1).to(tl.int64) * each, mask=inside, other=0)
    above = (o[:, None] >= ends[None, :]) & inside[None, :]
    return tl.sum(above.to(tl.int32), axis=1)


@triton.jit
def locate(id, of, m, origin, SINGLE: tl.constexpr):
    """Rows of ids, `UNKNOWN` for an id without one; ``of`` points to the description of its table."""
    keys = column(longs(origin, of, KEYS), SINGLE)
    rows = column(ints(origin, of, ROWS), SINGLE)
    key, first, second, home, stash_mask = _places(id, longs(origin, of, WORDS), 0, tl.load(of + SALT), False)
    lane = tl.arange(0, 8)[None, :]
    at = first[:, None] * 8 + lane
    held = tl.load(keys + at, mask=m[:, None], other=EMPTY)
    held_rows = tl.load(rows + at, mask=m[:, None], other=-1)
    row = tl.max(tl.where(held == key[:, None], held_rows, -1), axis=1)
    full = tl.min((held != EMPTY).to(tl.int32), axis=1) != 0
    todo = m & (row < 0)
    if tl.max(todo.to(tl.int32), axis=0) > 0:
        at = second[:, None] * 8 + lane
        held = tl.load(keys + at, mask=todo[:, None], other=EMPTY)
        held_rows = tl.load(rows + at, mask=todo[:, None], other=-1)
        row2 = tl.max(tl.where(held == key[:, None], held_rows, -1), axis=1)
        row = tl.where(todo, row2, row)
        todo = todo & (row2 < 0) & full & (tl.min((held != EMPTY).to(tl.int32), axis=1) != 0)
        stash_keys = longs(origin, of, STASH_KEYS)
        stash_rows = ints(origin, of, STASH_ROWS)
        place = home
        while tl.max(todo.to(tl.int32), axis=0) > 0:
            one = tl.load(stash_keys + place, mask=todo, other=EMPTY)
            same = todo & (one == key)
            row = tl.where(same, tl.load(stash_rows + place, mask=same, other=-1), row)
            todo = todo & (one != key) & (one != EMPTY)
            place = (place + 1) & stash_mask
    return tl.where(m, row, -1)


@triton.jit
def still(row, id_at, versions, table, of, m, origin, SINGLE: tl.constexpr):
    """The current rows of ids; searches again for ids that were unknown, or if rows became free since.

    Also searches again if the table does not have that many rows: if the counts of features do not match the offsets, a
    row number can come from another table.
    """
    state = longs(origin, of, STATE)
    moved = tl.load(versions + table) != tl.load(state + MOVED)
    look = m & ((row == UNKNOWN) | ((row >= 0) & moved) | (row >= tl.load(state + ROOM)))
    if tl.max(look.to(tl.int32), axis=0) > 0:
        id = tl.load(id_at, mask=look, other=0)
        row = tl.where(look, locate(id, of, look, origin, SINGLE), row)
    return row


@triton.jit
def stamp(row, table, of, m, origin, control):
    """Writes the time of the update and the epoch to rows; a row keeps a later time if the time is the clock's."""
    timed = m & (tl.load(of + TIMED) != 0)
    if tl.max(timed.to(tl.int32), axis=0) > 0:
        at = ints(origin, of, TIMES) + row
        last = tl.load(at, mask=timed, other=0)
        time = (tl.load(control + TABLES_AT + table * 2) + row.to(tl.int64) * 0).to(tl.int32)
        later = tl.load(control + TABLES_AT + table * 2 + 1) != 0
        keep = later & (last.to(tl.uint32, bitcast=True) > time.to(tl.uint32, bitcast=True))
        tl.store(at, time, mask=timed & (keep == 0) & (last != time))
    tracked = m & (tl.load(of + TRACKED) != 0)
    if tl.max(tracked.to(tl.int32), axis=0) > 0:
        epoch = tl.load(longs(origin, of, STATE) + EPOCH)
        tl.store(ints(origin, of, EPOCHS) + row, (epoch + row.to(tl.int64) * 0).to(tl.int32), mask=tracked)


@triton.jit(do_not_specialize=["n", "only", "features", "jump", "each", "padding"])
def find(
    ids, begins, tables, described, origin, where, versions, n, only, features, jump, each, padding,
    SINGLE: tl.constexpr, BORDERS: tl.constexpr, PAD: tl.constexpr, TABLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds ids; those of feature ``f`` begin at ``begins[f]``. SINGLE: all are in the table ``only``.

    BORDERS: if above 0, ``begins`` are the offsets of bags, ``each`` per feature, of at most BORDERS features.
    """
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    id = tl.load(ids + o, mask=m, other=0)
    if SINGLE:
        of = described + only * DESCRIBED
    else:
        if BORDERS > 0:
            feature = feature_at(o, begins, features, each, BORDERS)
        else:
            feature = last_not_above(begins, features, jump, o, m)
        of = described + tl.load(tables + feature, mask=m, other=0) * DESCRIBED
    wanted = m
    if PAD:
        wanted = m & (id != padding)
    row = locate(id, of, wanted, origin, SINGLE)
    if PAD:
        row = tl.where(m & (id == padding), PADDING, row)
    tl.store(where + o, row, mask=m)
    if tl.program_id(0) == 0:
        t = tl.arange(0, TABLES)  # a power of two: descriptions beyond the last equal the first
        now = tl.load(longs(origin, described + t * DESCRIBED, STATE) + MOVED)
        tl.store(versions + t, now)


@triton.jit(do_not_specialize=["n", "only", "features", "jump"])
def read(
    ids, begins, tables, described, origin, where, versions, out, n, only, features, jump, low, high, last,
    SINGLE: tl.constexpr, INITIAL: tl.constexpr, INIT: tl.constexpr, INDEX: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, WEIGHT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies a segment of the found rows to ``out [n, DIM]``; INITIAL: an unknown id has its initial values."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    row = tl.load(where + o, mask=m, other=PADDING)
    table = o * 0 + only
    if SINGLE:
        of = described + only * DESCRIBED
        row = still(row, ids + o, versions, only, of, m, origin, True)
    else:
        table = tl.load(tables + last_not_above(begins, features, jump, o, m), mask=m, other=0)
        of = described + table * DESCRIBED
        row = still(row, ids + o, versions, table, of, m, origin, False)
    d = tl.arange(0, WIDTH)
    inside = m[:, None] & (d < D)[None, :]
    at = row.to(tl.int64) * STRIDE + tl.load(of + ARENA) * 4
    words = origin.to(tl.pointer_type(tl.float32))
    w = tl.load(words + at[:, None] + WEIGHT + d[None, :], mask=inside & (row >= 0)[:, None], other=0.0)
    if INITIAL:
        new = m & (row == UNKNOWN)
        if tl.max(new.to(tl.int32), axis=0) > 0:
            id = tl.load(ids + o, mask=new, other=0)
            first = first_weights(id, d, tl.load(of + SEED), low, high, last, INIT, INDEX)
            w = tl.where(new[:, None], first, w)
    tl.store(out + o[:, None] * DIM + WEIGHT + d[None, :], w, mask=inside)
