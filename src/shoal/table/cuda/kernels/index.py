# pyrefly: ignore-errors
"""The index in kernels: which row an id has, and a row for an id that has none.

An id may be in one of two buckets of eight slots (a bucket's ids are one line of 64 bytes, its row numbers half a
line), or, when both are full, in the stash, a small open-addressed table. The order of these places is fixed for an id,
free slots are taken in that order and nothing becomes free while a kernel runs: so equal ids of one batch meet in one
slot without any lock. Buckets are addressed by linear hashing: with ``n`` buckets, ``2**L <= n < 2**(L + 1)``, bucket
``b`` splits into ``b`` and ``b + 2**L``, in place, slot by slot.

Bucket 0 is apart: it holds the one id that marks free slots elsewhere.
"""

import triton
import triton.language as tl

EMPTY = tl.constexpr(-(2**63))
SLOTS = tl.constexpr(8)
FULL = tl.constexpr(6)  # ids for each bucket, on average, from which on an index grows
FRESH = tl.constexpr(1 << 30)  # set in a row number that was given out in this call
ROW = tl.constexpr((1 << 30) - 1)

# A group's state: common words, then `TABLE_WORDS` for each of its tables.
TAKEN = tl.constexpr(0)  # rows given out since the list of free rows was made
FREE = tl.constexpr(1)  # rows in that list
NEXT = tl.constexpr(2)  # first row that was never used, when the list was made
ROOM = tl.constexpr(3)  # rows there is memory for
LOST = tl.constexpr(4)  # ids that found no room: only a captured graph that outran its reserve makes any
MOVED = tl.constexpr(5)  # another number whenever rows became free since: row numbers from before may be others' now
EPOCH = tl.constexpr(6)  # what rows that are written now carry, while changes are tracked
COMMON_WORDS = tl.constexpr(8)
BUCKETS = tl.constexpr(0)
LOW_MASK = tl.constexpr(1)
STASH_MASK = tl.constexpr(2)
SIZE = tl.constexpr(3)
TABLE_WORDS = tl.constexpr(4)


@triton.jit
def hash_id(x):
    """The hash of csrc/core/hash.h."""
    x = x.to(tl.uint64)
    x ^= x >> 32
    x *= 0xD6E8FEB86659FD93
    x ^= x >> 32
    x *= 0xD6E8FEB86659FD93
    x ^= x >> 32
    return x


@triton.jit
def _bucket(h, buckets, low):
    b = h & (low * 2 + 1)
    return tl.where(b >= buckets, h & low, b) + 1


@triton.jit
def _places(ids, words, table, salt, MULTI: tl.constexpr):
    """Key, first and second bucket, first place in the stash, and the stash's mask."""
    h = hash_id(ids ^ salt)
    if MULTI:
        words += table * TABLE_WORDS
    buckets = tl.load(words + BUCKETS)
    low = tl.load(words + LOW_MASK)
    stash = tl.load(words + STASH_MASK)
    apart = ids == EMPTY
    first = tl.where(apart, 0, _bucket((h & 0xFFFFFFFF).to(tl.int64), buckets, low))
    second = tl.where(apart, 0, _bucket((h >> 32).to(tl.int64), buckets, low))
    home = (hash_id(h + 0x9E3779B97F4A7C15) >> 1).to(tl.int64) & stash
    return tl.where(apart, 0, ids), first, second, home, stash


@triton.jit
def _probe(keys, rows, base, key, mask):
    """Row (-1: none), slot of the hit and of the first free slot (8: none) in a bucket."""
    lane = tl.arange(0, 8)[None, :]
    at = base[:, None] * 8 + lane
    held = tl.load(keys + at, mask=mask[:, None], other=EMPTY)
    held_rows = tl.load(rows + at, mask=mask[:, None], other=-1)
    hit = held == key[:, None]
    row = tl.max(tl.where(hit, held_rows, -1), axis=1)
    slot = tl.min(tl.where(hit, lane, 8), axis=1)
    free = tl.min(tl.where(held == EMPTY, lane, 8), axis=1)
    return row, slot, free


@triton.jit
def _slots(keys, base, key, mask):
    """Slot of the hit and of the first free slot (8: none) in a bucket."""
    lane = tl.arange(0, 8)[None, :]
    held = tl.load(keys + base[:, None] * 8 + lane, mask=mask[:, None], other=EMPTY)
    slot = tl.min(tl.where(held == key[:, None], lane, 8), axis=1)
    free = tl.min(tl.where(held == EMPTY, lane, 8), axis=1)
    return slot, free


@triton.jit(do_not_specialize=["n", "salt", "key_stride", "stash_stride"])
def find(
    ids,
    table_of,
    keys,
    rows,
    stash_keys,
    stash_rows,
    words,
    arena,
    out_rows,
    out,
    n,
    salt,
    key_stride,
    stash_stride,
    MULTI: tl.constexpr,
    WANT: tl.constexpr,  # "rows": row numbers; "slots": where ids are; "weights": a copy of the weights
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of ids, -1 for an unknown id. Slots: of the buckets from 0 on, of the stash -2, -3, ..., -1 for none."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    id = tl.load(ids + o, mask=m, other=0)
    table = tl.load(table_of + o, mask=m, other=0).to(tl.int64) if MULTI else tl.zeros([BLOCK], tl.int64)
    key, first, second, home, stash_mask = _places(id, words, table, salt, MULTI)
    bucket_base = table * (key_stride // 8)
    row, slot, free = _probe(keys, rows, bucket_base + first, key, m)
    where = (bucket_base + first) * 8 + slot
    todo = m & (slot == 8)
    if tl.max(todo.to(tl.int32), axis=0) > 0:
        row2, slot2, free2 = _probe(keys, rows, bucket_base + second, key, todo)
        row = tl.where(todo, row2, row)
        where = tl.where(todo, (bucket_base + second) * 8 + slot2, where)
        todo = todo & (slot2 == 8)
        where = tl.where(todo, -1, where)
        todo = todo & (free == 8) & (free2 == 8)
        at = home
        while tl.max(todo.to(tl.int32), axis=0) > 0:
            place = table * stash_stride + at
            held = tl.load(stash_keys + place, mask=todo, other=EMPTY)
            same = todo & (held == key)
            row = tl.where(same, tl.load(stash_rows + place, mask=same, other=-1), row)
            where = tl.where(same, -2 - place, where)
            todo = todo & (held != key) & (held != EMPTY)
            at = (at + 1) & stash_mask
    if WANT == "rows":
        tl.store(out_rows + o, row, mask=m)
    elif WANT == "slots":
        tl.store(out_rows + o, where, mask=m)
    else:
        d = tl.arange(0, WIDTH)
        inside = m[:, None] & (d < D)[None, :]
        known = inside & (row >= 0)[:, None]
        w = tl.load(arena + row.to(tl.int64)[:, None] * STRIDE + d[None, :], mask=known, other=0.0)
        tl.store(out + o[:, None] * D + d[None, :], w, mask=inside)


@triton.jit
def _new_rows(won, count, table, words, state, free_rows, MULTI: tl.constexpr):
    """Rows for the ``count`` lanes that have won a slot, freed ones first; row 0, nobody's, where no room is."""
    taken = tl.atomic_add(state + TAKEN, count.to(tl.int64), sem="relaxed")
    rank = taken + tl.cumsum(won.to(tl.int32), axis=0) - 1
    free_count = tl.load(state + FREE)
    again = won & (rank < free_count)
    reused = tl.load(free_rows + rank, mask=again, other=0).to(tl.int64)
    new = tl.where(again, reused, tl.load(state + NEXT) + rank - free_count)
    lost = won & (new >= tl.load(state + ROOM))
    lost_count = tl.sum(lost.to(tl.int32), axis=0)
    if lost_count > 0:
        tl.atomic_add(state + LOST, lost_count.to(tl.int64), sem="relaxed")
    if MULTI:
        tl.atomic_add(words + table * TABLE_WORDS + SIZE, 1, mask=won, sem="relaxed")
    else:
        tl.atomic_add(words + SIZE, count.to(tl.int64), sem="relaxed")
    return tl.where(lost, 0, new).to(tl.int32)


@triton.jit
def _awaited(row, wait, where, in_stash, rows, stash_rows):
    """``row``, and for lanes that wait the one that another lane, which has their slot, is about to write there."""
    while tl.max(wait.to(tl.int32), axis=0) > 0:
        cell = tl.where(in_stash, stash_rows + where, rows + where)
        seen = tl.atomic_add(cell, 0, mask=wait, sem="relaxed")
        row = tl.where(wait, seen, row)
        wait = wait & (seen < 0)
    return row


@triton.jit
def _stamp(times, epochs, state, row, time, all_, won, STAMP: tl.constexpr, LATER: tl.constexpr, TRACK: tl.constexpr):
    """Time and epoch of rows: 0 leaves them, 1 sets those of all lanes, 2 those of lanes that have won.

    With LATER a row that has a later time keeps it. Nobody's rows have 0, so it does not matter who of the lanes with a
    new row has won it.
    """
    if STAMP > 0:
        stamps = row * 0 + time
        if LATER:
            last = tl.load(times + row, mask=all_, other=0)
            stamps = tl.where(last.to(tl.uint32) > stamps.to(tl.uint32), last, stamps)
        tl.store(times + row, stamps, mask=all_ if STAMP == 1 else won)
    if TRACK > 0:
        tl.store(epochs + row, tl.load(state + EPOCH).to(tl.int32), mask=all_ if TRACK == 1 else won)


@triton.jit(do_not_specialize=["n", "salt", "time", "key_stride", "stash_stride"])
def insert(
    ids,
    table_of,
    drop,
    gate,
    given,
    keys,
    rows,
    stash_keys,
    stash_rows,
    words,
    state,
    free_rows,
    times,
    epochs,
    spare,
    out_rows,
    n,
    salt,
    time,
    key_stride,
    stash_stride,
    MULTI: tl.constexpr,
    DROP: tl.constexpr,  # ids with a 1 in `drop` are passed over
    GATE: tl.constexpr,  # nothing happens when `gate` is not 0
    GIVEN: tl.constexpr,  # ids bring their rows, which the index holds from now on
    STAMP: tl.constexpr,  # time: 0 untouched, 1 of all ids, 2 of new ones
    LATER: tl.constexpr,  # a row that has a later time keeps it
    TRACK: tl.constexpr,  # epoch: the same
    BLOCK: tl.constexpr,
):
    """Rows of ids, -1 for one that is passed over; an id without a row gets one, marked FRESH where it was won.

    Atomics are relaxed, which costs no fence: each decides about one cell, whose content never changes again, and what
    is written beside it is for later kernels.
    """
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    id = tl.load(ids + o, mask=m, other=0)
    if GIVEN:  # the image of a stash: free slots are to be passed over
        m = m & (id != EMPTY)
    if DROP:
        m = m & (tl.load(drop + o, mask=m, other=1) == 0)
    if GATE:
        m = m & (tl.load(gate) == 0)
    table = tl.load(table_of + o, mask=m, other=0).to(tl.int64) if MULTI else tl.zeros([BLOCK], tl.int64)
    key, first, second, home, stash_mask = _places(id, words, table, salt, MULTI)
    bucket_base = table * (key_stride // 8)
    slot, free = _slots(keys, bucket_base + first, key, m)
    where = (bucket_base + first) * 8 + slot
    row = tl.load(rows + where, mask=m & (slot < 8), other=-1)  # not looked at before it is needed
    todo = m & (slot == 8)
    won = m & (o < 0)
    in_stash = m & (o < 0)
    if tl.max(todo.to(tl.int32), axis=0) > 0:
        slot2, free2 = _slots(keys, bucket_base + second, key, todo)
        hit2 = todo & (slot2 < 8)
        where = tl.where(hit2, (bucket_base + second) * 8 + slot2, where)
        row = tl.where(hit2, tl.load(rows + where, mask=hit2, other=-1), row)
        todo = todo & (slot2 == 8)
        step = tl.where(free < 8, free, 8 + free2).to(tl.int64)  # place in the id's order; 16 and on: the stash
        while tl.max(todo.to(tl.int32), axis=0) > 0:
            main = step < 16
            place = tl.where(
                step < 8,
                (bucket_base + first) * 8 + step,
                (bucket_base + second) * 8 + step - 8,
            )
            stash_at = table * stash_stride + ((home + step - 16) & stash_mask)
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
            if GIVEN:
                row = tl.where(won, tl.load(given + o, mask=won, other=-1), row)
            else:
                row = tl.where(won, _new_rows(won, count, table, words, state, free_rows, MULTI), row)
            tl.store(rows + where, row, mask=won & (in_stash == 0))
            tl.store(stash_rows + where, row, mask=won & in_stash)
    # Ids that another program has put there just now and is about to give a row: it has the slot, so it will.
    row = _awaited(row, m & (row < 0), where, in_stash, rows, stash_rows)
    if GIVEN == 0:
        _stamp(times, epochs, state, row, time, m, won, STAMP, LATER, TRACK)
        tl.store(out_rows + o, tl.where(m, tl.where(won, row | FRESH, row), -1), mask=o < n)


@triton.jit(do_not_specialize=["n", "salt", "buckets", "low", "first", "distance"])
def split(keys, rows, n, buckets, low, first, distance, salt, BLOCK: tl.constexpr):
    """Splits buckets from ``first`` on, ``n`` slots of them, each with the one ``distance`` buckets on.

    ``buckets`` and ``low`` are those that the table has afterwards.
    """
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    at = (first + 1) * 8 + o  # bucket 0 is apart
    bucket = first + o // 8
    key = tl.load(keys + at, mask=m, other=EMPTY)
    row = tl.load(rows + at, mask=m, other=-1)
    h = hash_id(key ^ salt)
    one = _bucket((h & 0xFFFFFFFF).to(tl.int64), buckets, low) - 1
    two = _bucket((h >> 32).to(tl.int64), buckets, low) - 1
    # An id that was here stays if one of its two buckets is still this one.
    stays = (one == bucket) | (two == bucket)
    moves = (stays == 0) & (key != EMPTY)
    tl.store(keys + at + distance * 8, tl.where(moves, key, EMPTY), mask=m)
    tl.store(rows + at + distance * 8, tl.where(moves, row, -1), mask=m)
    tl.store(keys + at, EMPTY, mask=m & moves)
    tl.store(rows + at, -1, mask=m & moves)


@triton.jit(do_not_specialize=["n"])
def erase(slots, keys, rows, stash_keys, stash_rows, times, out_rows, n, TIMED: tl.constexpr, BLOCK: tl.constexpr):
    """Frees slots that `find` gave, each once; ``out_rows`` gets the row of one that was freed, -1 otherwise.

    With TIMED the time of such a row is 0 from now on, as that of a row that was never used.
    """
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + o, mask=o < n, other=-1)
    main = slot >= 0
    stash = slot < -1
    row = tl.load(rows + slot, mask=main, other=-1)
    row = tl.where(stash, tl.load(stash_rows + (-2 - slot), mask=stash, other=-1), row)
    tl.debug_barrier()  # all threads have read
    tl.store(keys + slot, EMPTY, mask=main)
    tl.store(rows + slot, -1, mask=main)
    tl.store(stash_keys + (-2 - slot), EMPTY, mask=stash)
    tl.store(stash_rows + (-2 - slot), -1, mask=stash)
    if TIMED:
        tl.store(times + row, 0, mask=row >= 0)
    tl.store(out_rows + o, row, mask=o < n)
