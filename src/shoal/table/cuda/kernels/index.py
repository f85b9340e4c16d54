# pyrefly: ignore-errors
"""The index in kernels: finds the rows of ids, and gives rows to ids without one.

An id is in one of two buckets of eight slots (a bucket's ids take 64 bytes, its row numbers 32) or, if both are full,
in the stash, a small open-addressed table. The order of these places is fixed for an id, free slots are taken in that
order, and no slot becomes free while a kernel runs: so equal ids of a batch meet in one slot without a lock. Buckets
are addressed by linear hashing: with ``n`` buckets, ``2**L <= n < 2**(L + 1)``, bucket ``b`` splits into ``b`` and
``b + 2**L``, in place, slot by slot.

Bucket 0 is reserved for the id whose value marks free slots in the other buckets.
"""

import triton
import triton.language as tl

EMPTY = tl.constexpr(-(2**63))
SLOTS = tl.constexpr(8)
FULL = tl.constexpr(6)  # mean number of ids per bucket at which an index grows
FRESH = tl.constexpr(1 << 30)  # flag of a row number that was given out in this call
ROW = tl.constexpr((1 << 30) - 1)

# A storage's state: common words, then `TABLE_WORDS` for each of its tables.
TAKEN = tl.constexpr(0)  # rows given out since the list of free rows was written
FREE = tl.constexpr(1)  # rows in that list
NEXT = tl.constexpr(2)  # first row that was never used when the list was written
ROOM = tl.constexpr(3)  # rows that memory is allocated for
LOST = tl.constexpr(4)  # ids without room, only in a captured graph that has used up its reserve
MOVED = tl.constexpr(5)  # changes whenever rows become free, because earlier row numbers can then belong to other ids
EPOCH = tl.constexpr(6)  # the epoch of rows written now, while changes are tracked
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
    """Keys, first and second buckets, first places in the stash, and the stash's mask."""
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
    """The row of a key in a bucket (-1: none), its slot and the first free slot (8: none)."""
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
def slots_of(keys, base, key, mask):
    """The slot of a key in a bucket, and the first free slot (8: none)."""
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
    WANT: tl.constexpr,  # output, "rows": row numbers; "slots": places of ids; "weights": a copy of the weights
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finds the rows of ids, -1 for an unknown id. Slots of buckets count from 0 up, of the stash from -2 down."""
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
def row_of_rank(rank, m, state, free_rows):
    """The row to give out next after ``rank`` others: freed rows first, then rows that were never used."""
    free_count = tl.load(state + FREE)
    again = m & (rank < free_count)
    reused = tl.load(free_rows + rank, mask=again, other=0).to(tl.int64)
    return tl.where(again, reused, tl.load(state + NEXT) + rank - free_count)


@triton.jit
def _new_rows(won, count, table, words, state, free_rows, MULTI: tl.constexpr):
    """Rows for the ``count`` lanes that won a slot; row 0, which no id has, where there is no room."""
    taken = tl.atomic_add(state + TAKEN, count.to(tl.int64), sem="relaxed")
    rank = taken + tl.cumsum(won.to(tl.int32), axis=0) - 1
    new = row_of_rank(rank, won, state, free_rows)
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
def take_slots(
    key, first, second, home, stash_mask, stash_base, free, free2, todo, where, o, keys, stash_keys, spare,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Puts the keys of lanes ``todo`` into the first free slot in each id's order, unless an equal key is there.

    ``free`` and ``free2`` are the first free slots of the buckets ``first`` and ``second``, 8 for none.

    Returns:
        Which lanes won a slot, whether a slot is in the stash, and the slots (``where`` for lanes not in ``todo``).
    """
    won = todo & (o < 0)
    in_stash = todo & (o < 0)
    step = tl.where(free < 8, free, 8 + free2).to(tl.int64)  # place in the id's order; the stash begins at 16
    while tl.max(todo.to(tl.int32), axis=0) > 0:
        main = step < 16
        place = tl.where(step < 8, first * 8 + step, second * 8 + step - 8)
        stash_at = stash_base + ((home + step - 16) & stash_mask)
        cell = tl.where(main, keys + place, stash_keys + stash_at)
        # An idle lane compares a spare cell, which holds 0, with -1.
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
    return won, in_stash, where


@triton.jit
def awaited(row, wait, where, in_stash, rows, stash_rows):
    """``row``; for lanes that ``wait``, the row that another program, which has won their slot, is about to write."""
    while tl.max(wait.to(tl.int32), axis=0) > 0:
        cell = tl.where(in_stash, stash_rows + where, rows + where)
        seen = tl.atomic_add(cell, 0, mask=wait, sem="relaxed")
        row = tl.where(wait, seen, row)
        wait = wait & (seen < 0)
    return row


@triton.jit
def _stamp(times, epochs, state, row, time, all_, won, STAMP: tl.constexpr, LATER: tl.constexpr, TRACK: tl.constexpr):
    """Sets times (STAMP) and epochs (TRACK) of rows: 0 of none, 1 of all lanes, 2 of lanes that won a slot.

    With LATER, a row keeps a later time. Unused rows have time 0, so it does not matter which of the lanes with the
    same new row won it.
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
    DROP: tl.constexpr,  # skip ids with a 1 in `drop`
    GATE: tl.constexpr,  # do nothing if `gate` is not 0
    GIVEN: tl.constexpr,  # insert ids with the given rows
    STAMP: tl.constexpr,  # set the time: 0 of none, 1 of all ids, 2 of new ids
    LATER: tl.constexpr,  # a row keeps a later time
    TRACK: tl.constexpr,  # set the epoch, as STAMP
    BLOCK: tl.constexpr,
):
    """Finds or creates the rows of ids, -1 for a skipped id; a new row is marked FRESH in the lane that created it.

    Atomics are relaxed, without a fence: each decides about one cell, which never changes again, and other writes are
    for later kernels.
    """
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    id = tl.load(ids + o, mask=m, other=0)
    if GIVEN:  # ids of a stash, including its free slots
        m = m & (id != EMPTY)
    if DROP:
        m = m & (tl.load(drop + o, mask=m, other=1) == 0)
    if GATE:
        m = m & (tl.load(gate) == 0)
    table = tl.load(table_of + o, mask=m, other=0).to(tl.int64) if MULTI else tl.zeros([BLOCK], tl.int64)
    key, first, second, home, stash_mask = _places(id, words, table, salt, MULTI)
    bucket_base = table * (key_stride // 8)
    first += bucket_base
    second += bucket_base
    slot, free = slots_of(keys, first, key, m)
    where = first * 8 + slot
    row = tl.load(rows + where, mask=m & (slot < 8), other=-1)
    todo = m & (slot == 8)
    won = m & (o < 0)
    in_stash = m & (o < 0)
    if tl.max(todo.to(tl.int32), axis=0) > 0:
        slot2, free2 = slots_of(keys, second, key, todo)
        hit2 = todo & (slot2 < 8)
        where = tl.where(hit2, second * 8 + slot2, where)
        row = tl.where(hit2, tl.load(rows + where, mask=hit2, other=-1), row)
        todo = todo & (slot2 == 8)
        won, in_stash, where = take_slots(
            key, first, second, home, stash_mask, table * stash_stride, free, free2, todo, where, o, keys, stash_keys,
            spare, BLOCK,
        )  # fmt: skip
        count = tl.sum(won.to(tl.int32), axis=0)
        if count > 0:
            if GIVEN:
                row = tl.where(won, tl.load(given + o, mask=won, other=-1), row)
            else:
                row = tl.where(won, _new_rows(won, count, table, words, state, free_rows, MULTI), row)
            tl.store(rows + where, row, mask=won & (in_stash == 0))
            tl.store(stash_rows + where, row, mask=won & in_stash)
    row = awaited(row, m & (row < 0), where, in_stash, rows, stash_rows)
    if GIVEN == 0:
        _stamp(times, epochs, state, row, time, m, won, STAMP, LATER, TRACK)
        tl.store(out_rows + o, tl.where(m, tl.where(won, row | FRESH, row), -1), mask=o < n)


@triton.jit(do_not_specialize=["n", "salt", "buckets", "low", "first", "distance"])
def split(keys, rows, n, buckets, low, first, distance, salt, BLOCK: tl.constexpr):
    """Splits ``n`` slots of buckets, from bucket ``first`` on, each into itself and the one ``distance`` buckets later.

    ``buckets`` and ``low`` are the values after the split.
    """
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    at = (first + 1) * 8 + o  # bucket 0 is reserved
    bucket = first + o // 8
    key = tl.load(keys + at, mask=m, other=EMPTY)
    row = tl.load(rows + at, mask=m, other=-1)
    h = hash_id(key ^ salt)
    one = _bucket((h & 0xFFFFFFFF).to(tl.int64), buckets, low) - 1
    two = _bucket((h >> 32).to(tl.int64), buckets, low) - 1
    # An id stays if one of its two buckets is still this one.
    stays = (one == bucket) | (two == bucket)
    moves = (stays == 0) & (key != EMPTY)
    tl.store(keys + at + distance * 8, tl.where(moves, key, EMPTY), mask=m)
    tl.store(rows + at + distance * 8, tl.where(moves, row, -1), mask=m)
    tl.store(keys + at, EMPTY, mask=m & moves)
    tl.store(rows + at, -1, mask=m & moves)


@triton.jit(do_not_specialize=["n"])
def erase(slots, keys, rows, stash_keys, stash_rows, times, out_rows, n, TIMED: tl.constexpr, BLOCK: tl.constexpr):
    """Frees distinct slots that `find` returned, and writes their rows to ``out_rows``; -1 for slot -1.

    With TIMED, it sets the times of these rows to 0, as for unused rows.
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
