# pyrefly: ignore-errors
"""Every row optimizer in one kernel each, fused with the read and write of the row. One launch is one segment.

The formulas, for reading, are in `shoal.table.reference.optimizers`; the order of the kinds is that of
`shoal.table.native.OPTIMIZERS`. Roots and quotients are rounded correctly, as on the CPU.
"""
# ruff: noqa: SIM109 - Triton's compiler takes these comparisons apart, not `in`

import triton
import triton.language as tl

from shoal.table.cuda.index_kernels import FRESH, ROW, hash_id
from shoal.table.cuda.row_kernels import first_weights, uniform

SGD = tl.constexpr(0)
ADAGRAD = tl.constexpr(1)
DYNAMIC_WD = tl.constexpr(2)
ADADELTA = tl.constexpr(3)
ADAM = tl.constexpr(4)
AMSGRAD = tl.constexpr(5)
MOMENTUM = tl.constexpr(6)
MOVING_AVERAGE = tl.constexpr(7)
RMSPROP = tl.constexpr(8)
RMSPROP_V2 = tl.constexpr(9)
FTRL = tl.constexpr(10)
GROUP_FTRL = tl.constexpr(11)
GROUP_ADAGRAD = tl.constexpr(12)
BATCH_SOFTMAX = tl.constexpr(13)
ROWWISE_ADAGRAD = tl.constexpr(14)
ADAMW = tl.constexpr(15)
LAMB = tl.constexpr(16)


@triton.jit
def _squares(x):
    """Sum of squares of each row, as long as it is."""
    y = x.to(tl.float64)
    return tl.sum(y * y, axis=1)


@triton.jit
def step_rows(
    w,
    g,
    base,
    known,
    here,
    inside,
    d,
    lr1,
    lr2,
    numbers,
    step,
    OPT: tl.constexpr,
    NESTEROV: tl.constexpr,
    DECOUPLED: tl.constexpr,
    D: tl.constexpr,
):
    """One step of weights ``[B, W]``; ``base`` points to each row's state, which is changed in place.

    Rows of ``here`` are stepped; of those, ``known`` ones have a state in memory and the others start with a fresh one.
    ``numbers`` are the segment's. Columns beyond the segment have ``inside`` False, and zeros in ``w`` and ``g``.
    """
    _, wd, beta1, beta2, eps, beta, l1, l2, accumulator, _, _ = numbers
    m = here[:, None] & inside
    old = known[:, None] & inside
    state = base[:, None] + d[None, :]
    if OPT == SGD:
        w -= lr2 * g
    elif OPT == ADAGRAD or OPT == DYNAMIC_WD:
        norm = tl.load(state, mask=old, other=accumulator)
        x = g
        if OPT == ADAGRAD or DECOUPLED == 0:
            x = g + wd * w
        norm += x * x
        tl.store(state, norm, mask=m)
        moved = tl.where(norm > 0, tl.div_rn(lr2, tl.sqrt_rn(tl.where(norm > 0, norm, 1.0))) * x, 0.0)
        if OPT == DYNAMIC_WD:
            if DECOUPLED:
                moved += lr2 * wd * w
            word = (base + D).to(tl.pointer_type(tl.int32))
            now = here.to(tl.int64) * 0 + step
            tl.store(word, now.to(tl.int32), mask=here)
            tl.store(word + 1, (now >> 32).to(tl.int32), mask=here)
        w -= moved
    elif OPT == ADADELTA:
        accum = tl.load(state, mask=old, other=0.0)
        update = tl.load(state + D, mask=old, other=0.0)
        x = g + wd * w
        a = accum * beta1 + x * x * (1 - beta1)
        u = tl.div_rn(tl.sqrt_rn(update + eps), tl.sqrt_rn(a + eps)) * x
        w -= u * lr2
        tl.store(state, a, mask=m)
        tl.store(state + D, update * beta1 + u * u * (1 - beta1), mask=m)
    elif OPT == ADAM or OPT == AMSGRAD or OPT == ADAMW:
        momentum = tl.load(state, mask=old, other=0.0)
        v = tl.load(state + D, mask=old, other=0.0)
        powers = base + (3 * D if OPT == AMSGRAD else 2 * D)
        p1 = tl.load(powers, mask=known, other=beta1)
        p2 = tl.load(powers + 1, mask=known, other=beta2)
        rate = tl.div_rn(lr1 * tl.sqrt_rn(1 - p2), 1 - p1)
        x = g
        if OPT != ADAMW:
            x = g + wd * w
        momentum += (x - momentum) * (1 - beta1)
        v += (x * x - v) * (1 - beta2)
        tl.store(state, momentum, mask=m)
        tl.store(state + D, v, mask=m)
        second = v
        if OPT == AMSGRAD:
            second = tl.maximum(tl.load(state + 2 * D, mask=old, other=0.0), v)
            tl.store(state + 2 * D, second, mask=m)
        ahead = momentum
        if NESTEROV:
            ahead = x * (1 - beta1) + beta1 * momentum
        moved = tl.div_rn(rate[:, None] * ahead, tl.sqrt_rn(second) + eps)
        if OPT == ADAMW:
            moved += lr2 * wd * w
        w -= moved
        tl.store(powers, p1 * beta1, mask=here)
        tl.store(powers + 1, p2 * beta2, mask=here)
    elif OPT == LAMB:
        momentum = tl.load(state, mask=old, other=0.0)
        v = tl.load(state + D, mask=old, other=0.0)
        p1 = tl.load(base + 2 * D, mask=known, other=beta1)
        p2 = tl.load(base + 2 * D + 1, mask=known, other=beta2)
        momentum += (g - momentum) * (1 - beta1)
        v += (g * g - v) * (1 - beta2)
        tl.store(state, momentum, mask=m)
        tl.store(state + D, v, mask=m)
        c1 = tl.div_rn(1.0, 1 - p1)
        c2 = tl.div_rn(1.0, 1 - p2)
        u = tl.div_rn(momentum * c1[:, None], tl.sqrt_rn(v * c2[:, None]) + eps) + wd * w
        u = tl.where(inside, u, 0.0)
        weights = _squares(w)
        updates = _squares(u)
        both = (weights > 0) & (updates > 0)
        trust = tl.where(both, tl.sqrt(weights / tl.where(both, updates, 1.0)), 1.0).to(tl.float32)
        w -= lr2 * trust[:, None] * u
        tl.store(base + 2 * D, p1 * beta1, mask=here)
        tl.store(base + 2 * D + 1, p2 * beta2, mask=here)
    elif OPT == MOMENTUM:
        last = tl.load(state, mask=old, other=0.0)
        now = beta1 * last - lr2 * (g + wd * w)
        tl.store(state, now, mask=m)
        if NESTEROV:
            w += (1 + beta1) * now - beta1 * last
        else:
            w += now
    elif OPT == MOVING_AVERAGE:
        w = beta1 * w + (1 - beta1) * g
    elif OPT == RMSPROP or OPT == RMSPROP_V2:
        mu = (tl.zeros_like(w) + beta1).to(tl.float64)
        rate = (tl.zeros_like(w) + lr2).to(tl.float64)
        decay = (tl.zeros_like(w) + wd).to(tl.float64)
        wide = w.to(tl.float64)
        x = g.to(tl.float64) + decay * wide
        kept = mu * tl.load(state, mask=old, other=0.0).to(tl.float64)
        n = kept + (x * x if OPT == RMSPROP_V2 else (1 - mu) * x * x)
        tl.store(state, n.to(tl.float32), mask=m)
        w = (wide - rate / (tl.sqrt(n) + 1.0) * x).to(tl.float32)
    elif OPT == FTRL or OPT == GROUP_FTRL:
        norm = tl.load(state, mask=old, other=accumulator)
        zero = tl.load(state + D, mask=old, other=0.0)
        now = norm + g * g
        root = tl.sqrt_rn(now)
        turned = (tl.zeros_like(w) + lr2) != 0  # the formula divides by it
        sigma = tl.div_rn(root - tl.sqrt_rn(norm), tl.where(turned, lr2, 1.0))
        z = zero + (g - sigma * w)
        tl.store(state, now, mask=m & turned)
        tl.store(state + D, z, mask=m & turned)
        if OPT == FTRL:
            sign = tl.where(z < 0, -l1, l1)
            none = tl.abs(z) <= l1
            shrunk = tl.div_rn(lr2 * (sign - z), tl.where(none, 1.0, root + beta + l2 * lr2))
            stepped = tl.where(none, 0.0, shrunk)
        else:
            z = tl.where(inside, z, 0.0)
            length = tl.sqrt(_squares(z)).to(tl.float32)
            gone = (length < l1) | (length == 0)
            shrink = tl.where(gone, 0.0, tl.div_rn(l1 - length, tl.where(gone, 1.0, length)))[:, None]
            none = (shrink == 0) | (z == 0)
            stepped = tl.where(none, 0.0, tl.div_rn(lr2 * z * shrink, tl.where(none, 1.0, beta + root + l2 * lr2)))
        w = tl.where(turned, stepped, w)
    elif OPT == GROUP_ADAGRAD:
        total = tl.load(base, mask=known, other=accumulator)
        x = g + wd * w
        total += tl.max(tl.where(inside, x * x, 0.0), axis=1)
        tl.store(base, total, mask=here)
        below = beta + tl.sqrt_rn(total)
        turned = (below != 0) & ((tl.zeros_like(below) + lr1) != 0)
        e = tl.div_rn(lr1, tl.where(turned, below, 1.0))
        z = tl.where(inside, x - tl.div_rn(w, tl.where(turned, e, 1.0)[:, None]), 0.0)
        length = tl.sqrt(_squares(z)).to(tl.float32)
        gone = (length < l2) | (length == 0)
        shrink = tl.where(gone, 0.0, tl.div_rn(e * (length - l2), tl.where(gone, 1.0, length)))
        w = tl.where(turned[:, None], -shrink[:, None] * z, w)
    elif OPT == BATCH_SOFTMAX:
        word = base.to(tl.pointer_type(tl.int32))
        low = tl.load(word, mask=known, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
        high = tl.load(word + 1, mask=known, other=0).to(tl.int64)
        last = (high << 32) | low
        now = here.to(tl.int64) * 0 + step
        w = (1 - lr2) * w + lr2 * (now - last).to(tl.float32)[:, None]
        tl.store(word, now.to(tl.int32), mask=here)
        tl.store(word + 1, (now >> 32).to(tl.int32), mask=here)
    elif OPT == ROWWISE_ADAGRAD:
        norm = tl.load(base, mask=known, other=accumulator)
        x = tl.where(inside, g + wd * w, 0.0)
        norm += tl.sum(x * x, axis=1) / D
        tl.store(base, norm, mask=here)
        below = tl.sqrt_rn(norm) + eps
        rate = tl.where(below == 0, 0.0, tl.div_rn(lr1, tl.where(below == 0, 1.0, below)))
        w -= rate[:, None] * x
    return w


@triton.jit
def round_to_half(w, d, noise):
    """Every weight becomes a float16 neighbour, the upper one with the probability of its nearness."""
    x = tl.minimum(tl.maximum(w, -65504.0), 65504.0)
    half = x.to(tl.float16)
    near = half.to(tl.float32)
    bits = half.to(tl.int16, bitcast=True)
    away = tl.abs(x) > tl.abs(near)
    other = tl.where(away, bits + 1, bits - 1).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    low = tl.minimum(near, other)
    high = tl.maximum(near, other)
    exact = near == x
    part = (x - low) / tl.where(exact, 1.0, high - low)
    rounded = tl.where(uniform(noise[:, None], d[None, :]) < part, high, low)
    return tl.where(w != w, w, tl.where(exact, x, rounded))


@triton.jit
def _step(
    w,
    g,
    at,
    arena,
    known,
    here,
    inside,
    d,
    position,
    lr1,
    lr2,
    numbers,
    step,
    noise,
    OPT: tl.constexpr,
    NESTEROV: tl.constexpr,
    DECOUPLED: tl.constexpr,
    ROUND: tl.constexpr,
    ONE_BIT: tl.constexpr,
    INDEX: tl.constexpr,
    D: tl.constexpr,
    WEIGHT: tl.constexpr,
    STATE: tl.constexpr,
):
    """`step_rows` with what stands around it: the hash-net gradient before, stochastic rounding after; stores ``w``."""
    if ONE_BIT:
        amplitude = numbers[9]
        scale = numbers[10]
        t = 1 - 2 / (tl.exp(2 * scale * w) + 1)
        g = g * amplitude * scale * (1 - t * t)
    base = arena + at + STATE
    w = step_rows(w, g, base, known, here, inside, d, lr1, lr2, numbers, step, OPT, NESTEROV, DECOUPLED, D)
    if ROUND:
        own = hash_id(((position * 0 + noise).to(tl.uint64) ^ hash_id(position)) + INDEX)
        w = round_to_half(w, d, own)
    tl.store(arena + at[:, None] + WEIGHT + d[None, :], w, mask=here[:, None] & inside)


@triton.jit
def _rates(numbers, rates, table_of, position, here, MULTI: tl.constexpr):
    """The learning rate, for rows and for weights: one for all, or that of each row's table."""
    lr1 = numbers[0]
    lr2 = numbers[0]
    if MULTI:
        table = tl.load(table_of + position, mask=here, other=0)
        lr1 = tl.load(rates + table, mask=here, other=0.0)
        lr2 = lr1[:, None]
    return lr1, lr2


@triton.jit(do_not_specialize=["n", "seed", "step", "noise"])
def update_distinct(
    rows,
    ids,
    table_of,
    rates,
    grads,
    arena,
    n,
    seed,
    first,
    numbers,
    step,
    noise,
    INIT: tl.constexpr,
    MULTI: tl.constexpr,
    OPT: tl.constexpr,
    NESTEROV: tl.constexpr,
    DECOUPLED: tl.constexpr,
    ROUND: tl.constexpr,
    ONE_BIT: tl.constexpr,
    INDEX: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    WEIGHT: tl.constexpr,
    STATE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A step of rows that are all different; those marked FRESH start from their initializer, ``first``."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(rows + position, mask=position < n, other=-1)
    here = code >= 0
    known = here & ((code & FRESH) == 0)
    at = (code & ROW).to(tl.int64) * STRIDE
    d = tl.arange(0, WIDTH)
    inside = (d < D)[None, :]
    m = here[:, None] & inside
    g = tl.load(grads + position[:, None] * DIM + WEIGHT + d[None, :], mask=m, other=0.0)
    w = tl.load(arena + at[:, None] + WEIGHT + d[None, :], mask=known[:, None] & inside, other=0.0)
    new = here & (known == 0)
    if tl.max(new.to(tl.int32), axis=0) > 0:
        id = tl.load(ids + position, mask=new, other=0)
        w0 = first_weights(id, d, seed, first[0], first[1], first[2], INIT, INDEX)
        w = tl.where(new[:, None] & inside, w0, w)
    lr1, lr2 = _rates(numbers, rates, table_of, position, here, MULTI)
    _step(
        w,
        g,
        at,
        arena,
        known,
        here,
        inside,
        d,
        position,
        lr1,
        lr2,
        numbers,
        step,
        noise,
        OPT,
        NESTEROV,
        DECOUPLED,
        ROUND,
        ONE_BIT,
        INDEX,
        D,
        WEIGHT,
        STATE,
    )


@triton.jit(do_not_specialize=["n", "step", "noise"])
def update_each(
    rows,
    order,
    table_of,
    rates,
    grads,
    arena,
    n,
    numbers,
    step,
    noise,
    MULTI: tl.constexpr,
    OPT: tl.constexpr,
    NESTEROV: tl.constexpr,
    DECOUPLED: tl.constexpr,
    ROUND: tl.constexpr,
    ONE_BIT: tl.constexpr,
    INDEX: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    WEIGHT: tl.constexpr,
    STATE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A step for every occurrence of a row, in input order. ``rows`` are sorted, ``order`` has their positions."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + k, mask=k < n, other=-1)
    before = tl.load(rows + k - 1, mask=(k > 0) & (k < n), other=-1)
    active = (row >= 0) & (before != row)
    at = tl.where(active, row, 0).to(tl.int64) * STRIDE
    d = tl.arange(0, WIDTH)
    inside = (d < D)[None, :]
    while tl.max(active.to(tl.int32), axis=0) > 0:
        m = active[:, None] & inside
        position = tl.load(order + k, mask=active, other=0)
        g = tl.load(grads + position[:, None] * DIM + WEIGHT + d[None, :], mask=m, other=0.0)
        w = tl.load(arena + at[:, None] + WEIGHT + d[None, :], mask=m, other=0.0)
        lr1, lr2 = _rates(numbers, rates, table_of, position, active, MULTI)
        _step(
            w,
            g,
            at,
            arena,
            active,
            active,
            inside,
            d,
            position,
            lr1,
            lr2,
            numbers,
            step,
            noise,
            OPT,
            NESTEROV,
            DECOUPLED,
            ROUND,
            ONE_BIT,
            INDEX,
            D,
            WEIGHT,
            STATE,
        )
        tl.debug_barrier()  # the next step reads what other threads of this program wrote
        k += 1
        active = active & (tl.load(rows + k, mask=active & (k < n), other=-1) == row)


@triton.jit
def _join(head, total, head2, total2):
    return head | head2, tl.where(head2 != 0, total2, total + total2)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["n", "step", "noise"])
def update_summed(
    rows,
    order,
    table_of,
    rates,
    grads,
    arena,
    opened,
    closed,
    n,
    numbers,
    step,
    noise,
    MULTI: tl.constexpr,
    OPT: tl.constexpr,
    NESTEROV: tl.constexpr,
    DECOUPLED: tl.constexpr,
    ROUND: tl.constexpr,
    ONE_BIT: tl.constexpr,
    INDEX: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    WEIGHT: tl.constexpr,
    STATE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums the gradients of equal rows in order and steps each row once, for rows whose gradients lie in one block.

    ``rows`` are sorted, ``order`` has their positions. The sum of a row that goes on in the next block is left in
    ``opened``, what a block adds to a row from the block before in ``closed``; `update_crossing` does the rest.
    """
    tile = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    o = tile * BLOCK + i
    row = tl.load(rows + o, mask=o < n, other=-1)
    before = tl.load(rows + o - 1, mask=(o > 0) & (o < n), other=-1)
    after = tl.load(rows + o + 1, mask=o + 1 < n, other=-1)
    here = row >= 0
    position = tl.load(order + o, mask=here, other=0)
    d = tl.arange(0, WIDTH)
    inside = (d < D)[None, :]
    g = tl.load(grads + position[:, None] * DIM + WEIGHT + d[None, :], mask=here[:, None] & inside, other=0.0)
    head = (before != row).to(tl.int32)
    heads = head[:, None] + tl.zeros([BLOCK, WIDTH], tl.int32)
    _, total = tl.associative_scan((heads, g), 0, _join)
    begun = tl.cumsum(head, axis=0) > 0
    tail = here & (after != row)
    alone = tail & begun
    partial = tile * WIDTH + d[None, :] + tl.zeros([BLOCK, 1], tl.int64)
    tl.store(opened + partial, total, mask=(here & (after == row) & (i == BLOCK - 1))[:, None] & inside)
    tl.store(closed + partial, total, mask=(tail & (begun == 0))[:, None] & inside)
    at = tl.where(alone, row, 0).to(tl.int64) * STRIDE
    w = tl.load(arena + at[:, None] + WEIGHT + d[None, :], mask=alone[:, None] & inside, other=0.0)
    lr1, lr2 = _rates(numbers, rates, table_of, position, alone, MULTI)
    if ROUND:  # the noise follows from where the id came first
        first = tl.associative_scan(tl.where(head != 0, o, 0), 0, _larger)
        position = tl.load(order + first, mask=alone, other=0)
    _step(
        w,
        total,
        at,
        arena,
        alone,
        alone,
        inside,
        d,
        position,
        lr1,
        lr2,
        numbers,
        step,
        noise,
        OPT,
        NESTEROV,
        DECOUPLED,
        ROUND,
        ONE_BIT,
        INDEX,
        D,
        WEIGHT,
        STATE,
    )


@triton.jit(do_not_specialize=["n", "step", "noise"])
def update_crossing(
    rows,
    order,
    table_of,
    rates,
    opened,
    closed,
    arena,
    n,
    numbers,
    step,
    noise,
    MULTI: tl.constexpr,
    OPT: tl.constexpr,
    NESTEROV: tl.constexpr,
    DECOUPLED: tl.constexpr,
    ROUND: tl.constexpr,
    ONE_BIT: tl.constexpr,
    INDEX: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    WEIGHT: tl.constexpr,
    STATE: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Steps the rows whose gradients lie in several blocks of `update_summed`, a program for each such row.

    It takes the sums that SPAN blocks left at once: an id may have been in thousands of them.
    """
    tile = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    begin = tile * TILE
    end = begin + TILE
    row = tl.load(rows + end - 1, mask=end < n, other=-1)
    goes_on = tl.load(rows + end, mask=end < n, other=-1) == row
    before = tl.load(rows + begin - 1, mask=(begin > 0) & (end < n), other=-1)
    mine = (row >= 0) & goes_on & (before != row)
    if tl.max(mine.to(tl.int32), axis=0) > 0:
        d = tl.arange(0, WIDTH)
        inside = (d < D)[None, :]
        the_row = tl.max(row, axis=0)
        j = tl.arange(0, SPAN)
        total = tl.load(opened + tile[:, None] * WIDTH + d[None, :], mask=inside, other=0.0)
        k = tl.program_id(0).to(tl.int64) + 1
        count = SPAN
        while count == SPAN:
            stop = (k + j + 1) * TILE
            further = tl.load(rows + stop, mask=stop < n, other=-1) == the_row  # of sorted rows: some, then none
            count = tl.sum(further.to(tl.int32), axis=0)
            whole = tl.load(opened + (k + j)[:, None] * WIDTH + d[None, :], mask=further[:, None] & inside, other=0.0)
            last = inside & (count < SPAN)
            rest = tl.load(closed + (k + count) * WIDTH + d[None, :], mask=last, other=0.0)
            total += tl.sum(whole, axis=0)[None, :] + rest
            k += SPAN
        position = tl.load(order + end - 1, mask=mine, other=0)
        lr1, lr2 = _rates(numbers, rates, table_of, position, mine, MULTI)
        if ROUND:
            spots = begin[:, None] + tl.arange(0, TILE)[None, :]
            same = tl.load(rows + spots, mask=mine[:, None], other=-1) == row[:, None]
            first = tl.min(tl.where(same, spots, n), axis=1)
            position = tl.load(order + first, mask=mine, other=0)
        at = tl.where(mine, row, 0).to(tl.int64) * STRIDE
        w = tl.load(arena + at[:, None] + WEIGHT + d[None, :], mask=mine[:, None] & inside, other=0.0)
        _step(
            w,
            total,
            at,
            arena,
            mine,
            mine,
            inside,
            d,
            position,
            lr1,
            lr2,
            numbers,
            step,
            noise,
            OPT,
            NESTEROV,
            DECOUPLED,
            ROUND,
            ONE_BIT,
            INDEX,
            D,
            WEIGHT,
            STATE,
        )


@triton.jit(do_not_specialize=["n"])
def check_gradients(
    grads, drop, bad, n, WANT_DROP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Counts rows that hold NaN or infinity in ``bad``; with WANT_DROP marks them in ``drop``."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDTH)
    m = (o < n)[:, None] & (d < D)[None, :]
    g = tl.load(grads + o[:, None] * D + d[None, :], mask=m, other=0.0)
    finite = tl.abs(g) < float("inf")
    wrong = tl.max((finite == 0).to(tl.int32), axis=1)
    if WANT_DROP:
        tl.store(drop + o, wrong.to(tl.uint8), mask=o < n)
    count = tl.sum(wrong, axis=0)
    if count > 0:
        tl.atomic_add(bad, count.to(tl.int64))
