# pyrefly: ignore-errors
"""Lookups that make rows, in three kernels: `seek` lists the ids that are missing, `claim` gives them rows, `begin`
writes these.

Nothing changes in the index while `seek` reads it, so ids that it finds have their rows, and the few that are missing
are dense in the list: no lane of the other two is idle. An entry of the list is the position of an id; above its 32
bits the place in the id's order that was the first free one, later the id's row, marked FRESH where it was won.
"""

import triton
import triton.language as tl

from shoal.table.cuda.index_kernels import (
    CLAIMED,
    DONE,
    EMPTY,
    EPOCH,
    FRESH,
    LISTED,
    ROW,
    awaited,
    new_rows,
    places_of,
    probe,
    stamp,
)
from shoal.table.cuda.row_kernels import first_weights, start_rows

POSITION = tl.constexpr(0xFFFFFFFF)
FURTHEST = tl.constexpr(1 << 20)  # an id is sought from here on if its first free place is further


@triton.jit(do_not_specialize=["n", "salt", "time", "key_stride", "stash_stride"])
def seek(
    ids, table_of, drop, gate, keys, rows, stash_keys, stash_rows, words, state, times, epochs, arena, listed, out_rows,
    out, n, salt, time, key_stride, stash_stride,
    MULTI: tl.constexpr,
    DROP: tl.constexpr,  # ids with a 1 in `drop` are passed over
    GATE: tl.constexpr,  # nothing happens when `gate` is not 0
    STAMP: tl.constexpr,  # whether known rows get the time
    TRACK: tl.constexpr,  # whether they get the epoch
    WEIGHTS: tl.constexpr,  # copies of the weights to `out` instead of row numbers to `out_rows`
    D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of ids or their weights, -1 or zeros for one that is passed over; ids without a row are listed."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    m = inside
    id = tl.load(ids + o, mask=m, other=0)
    if DROP:
        m = m & (tl.load(drop + o, mask=m, other=1) == 0)
    if GATE:
        m = m & (tl.load(gate) == 0)
    table = tl.load(table_of + o, mask=m, other=0).to(tl.int64) if MULTI else tl.zeros([BLOCK], tl.int64)
    key, first, second, home, stash_mask = places_of(id, words, table, salt, MULTI)
    bucket_base = table * (key_stride // 8)
    row, slot, free = probe(keys, rows, bucket_base + first, key, m)
    missing = m & (slot == 8)
    if tl.max(missing.to(tl.int32), axis=0) > 0:
        row2, slot2, free2 = probe(keys, rows, bucket_base + second, key, missing)
        row = tl.where(missing, row2, row)
        missing = missing & (slot2 == 8)
        step = tl.where(free < 8, free, 8 + free2).to(tl.int64)
        todo = missing & (step == 16)
        at = home
        while tl.max(todo.to(tl.int32), axis=0) > 0:
            place = table * stash_stride + at
            held = tl.load(stash_keys + place, mask=todo, other=EMPTY)
            same = todo & (held == key)
            row = tl.where(same, tl.load(stash_rows + place, mask=same, other=-1), row)
            missing = missing & (same == 0)
            todo = todo & (held != key) & (held != EMPTY)
            step = tl.where(todo, step + 1, step)
            at = (at + 1) & stash_mask
        count = tl.sum(missing.to(tl.int32), axis=0)
        if count > 0:
            begin = tl.atomic_add(state + LISTED, count.to(tl.int64), sem="relaxed")
            place = begin + tl.cumsum(missing.to(tl.int32), axis=0) - 1
            tl.store(listed + place, o + (tl.minimum(step, FURTHEST) << 32), mask=missing)
    known = m & (missing == 0)
    if STAMP:
        tl.store(times + row, time, mask=known)
    if TRACK:
        tl.store(epochs + row, tl.load(state + EPOCH).to(tl.int32), mask=known)
    if WEIGHTS:
        d = tl.arange(0, WIDTH)
        w = tl.load(
            arena + row.to(tl.int64)[:, None] * STRIDE + d[None, :], mask=known[:, None] & (d < D)[None, :], other=0.0
        )
        tl.store(out + o[:, None] * D + d[None, :], w, mask=(inside & (missing == 0))[:, None] & (d < D)[None, :])
    else:
        tl.store(out_rows + o, tl.where(known, row, -1), mask=inside & (missing == 0))


@triton.jit
def _swap(cell, key, todo, spare, INLINE: tl.constexpr):
    """Puts the key where the cell is free, for lanes that are to; what was there (for others: EMPTY, or nothing)."""
    wanted = tl.full(key.shape, EMPTY, tl.int64)
    if INLINE:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $4, 0; mov.b64 $0, $2;"
            " @p atom.global.relaxed.gpu.cas.b64 $0, [$1], $2, $3; }",
            "=&l,l,l,l,r",
            [cell.to(tl.int64), wanted, key, todo.to(tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    # Triton's own has no mask: a lane with nothing to do compares a spare cell, which holds 0, with -1.
    return tl.atomic_cas(tl.where(todo, cell, spare), tl.where(todo, wanted, -1), key, sem="relaxed")


@triton.jit(do_not_specialize=["salt", "time", "key_stride", "stash_stride"])
def claim(
    ids, table_of, keys, rows, stash_keys, stash_rows, words, state, free_rows, times, epochs, spare, listed, out_rows,
    salt, time, key_stride, stash_stride,
    MULTI: tl.constexpr,
    STAMP: tl.constexpr,  # time: 0 untouched, 1 of all ids, 2 of new ones
    TRACK: tl.constexpr,  # epoch: the same
    OUT: tl.constexpr,  # row numbers to `out_rows`, too
    INLINE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A row for every id of the list. One-dimensional throughout: `_swap` must find each element in one thread."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    count = tl.load(state + LISTED)
    if (count == 0) & (begin == 0):
        tl.store(state + CLAIMED, count)
    if begin < count:
        k = begin + tl.arange(0, BLOCK)
        here = k < count
        entry = tl.load(listed + k, mask=here, other=0)
        o = entry & POSITION
        step = entry >> 32
        id = tl.load(ids + o, mask=here, other=0)
        table = tl.load(table_of + o, mask=here, other=0).to(tl.int64) if MULTI else tl.zeros([BLOCK], tl.int64)
        key, first, second, home, stash_mask = places_of(id, words, table, salt, MULTI)
        bucket_base = table * (key_stride // 8)
        todo = here
        won = here & (k < 0)
        in_stash = won
        where = k * 0
        while tl.max(todo.to(tl.int32), axis=0) > 0:
            main = step < 16
            place = tl.where(step < 8, (bucket_base + first) * 8 + step, (bucket_base + second) * 8 + step - 8)
            stash_at = table * stash_stride + ((home + step - 16) & stash_mask)
            cell = tl.where(main, keys + place, stash_keys + stash_at)
            old = _swap(cell, key, todo, spare + (k & 65535), INLINE)
            mine = todo & (old == EMPTY)
            done = mine | (todo & (old == key))
            won = won | mine
            in_stash = tl.where(done, main == 0, in_stash)
            where = tl.where(done, tl.where(main, place, stash_at), where)
            todo = todo & (done == 0)
            step += 1
        row = tl.full([BLOCK], -1, tl.int32)
        new_count = tl.sum(won.to(tl.int32), axis=0)
        if new_count > 0:
            row = tl.where(won, new_rows(won, new_count, table, words, state, free_rows, MULTI), row)
            tl.store(rows + where, row, mask=won & (in_stash == 0))
            tl.store(stash_rows + where, row, mask=won & in_stash)
        # Ids that came twice: another lane has the slot, so it will give it a row.
        row = awaited(row, here & (row < 0), where, in_stash, rows, stash_rows)
        stamp(times, epochs, state, row, time, here, won, STAMP, TRACK)
        code = tl.where(won, row | FRESH, row)
        tl.store(listed + k, o + (code.to(tl.int64) << 32), mask=here)
        if OUT:
            tl.store(out_rows + o, code, mask=here)
        # Every program with something to do has read the count before it says so: the last one may change it.
        if tl.atomic_add(state + DONE, 1, sem="relaxed") == (count + BLOCK - 1) // BLOCK - 1:
            tl.store(state + CLAIMED, count)
            tl.store(state + LISTED, count * 0)
            tl.store(state + DONE, count * 0)


@triton.jit(do_not_specialize=["seed"])
def begin(
    listed, ids, state, arena, out_rows, out, seed, low, high, last, accumulator, beta1, beta2,
    INIT: tl.constexpr, INDEX: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    WEIGHT: tl.constexpr, STATE: tl.constexpr, VECTORS: tl.constexpr, TAIL: tl.constexpr, DIM: tl.constexpr,
    OUT: tl.constexpr, CLEAN: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """`row_kernels.fresh` for a list. OUT writes the weights of all its ids: a new id has the same wherever it comes.

    CLEAN takes the marks in ``out_rows`` away. A program looks at SPAN ids.
    """
    count = tl.load(state + CLAIMED)
    start = tl.program_id(0).to(tl.int64) * SPAN
    for at_ in range(0, SPAN, BLOCK):
        if start + at_ < count:
            k = start + at_ + tl.arange(0, BLOCK)
            here = k < count
            entry = tl.load(listed + k, mask=here, other=0)
            o = entry & POSITION
            code = (entry >> 32).to(tl.int32)
            won = here & ((code & FRESH) != 0)
            at = (code & ROW).to(tl.int64) * STRIDE
            d = tl.arange(0, WIDTH)
            id = tl.load(ids + o, mask=here, other=0)
            w = first_weights(id, d, seed, low, high, last, INIT, INDEX)
            if OUT:
                tl.store(out + o[:, None] * DIM + WEIGHT + d[None, :], w, mask=here[:, None] & (d < D)[None, :])
            start_rows(arena, at, w, won, d, accumulator, beta1, beta2, D, WIDTH, WEIGHT, STATE, VECTORS, TAIL, BLOCK)
            if CLEAN:
                tl.store(out_rows + o, code & ROW, mask=won)
