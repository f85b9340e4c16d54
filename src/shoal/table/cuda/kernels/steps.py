# pyrefly: ignore-errors
"""The row optimizers' steps in kernels, and stochastic rounding to float16.

`shoal.table.reference.optimizers` has the formulas in readable form; the order of the kinds is that of
`shoal.table.config.native.OPTIMIZERS`. Roots and quotients are rounded correctly, as on the CPU, except Adam's.
"""
# ruff: noqa: SIM109 - Triton's compiler evaluates these comparisons, but not `in`

import triton
import triton.language as tl

from shoal.table.cuda.kernels.rows import uniform

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

NORMAL = tl.constexpr(1.1754944e-38)  # the smallest normal float32


@triton.jit
def _squares(x):
    """The sum of squares of each row, in float64."""
    y = x.to(tl.float64)
    return tl.sum(y * y, axis=1)


@triton.jit
def step_rows(
    w, g, base, known, here, inside, d, lr1, lr2, numbers, step,
    OPT: tl.constexpr, NESTEROV: tl.constexpr, DECOUPLED: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One step on weights ``[B, W]``; ``base`` points to each row's state, which is changed in place.

    Rows in ``here`` are stepped; of those, ``known`` rows have a state in memory and the others start with a fresh one.
    ``numbers`` are the segment's settings. Columns beyond the segment have ``inside`` False and zeros in ``w`` and
    ``g``.

    A number per row is read by all threads that have a part of the row and, after a barrier, written by one of them.
    """
    _, wd, beta1, beta2, eps, beta, l1, l2, accumulator, _, _, corrected = numbers
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
        moved = tl.where(norm > 0, tl.div_rn(lr2, tl.sqrt_rn(tl.where(norm > 0, norm, 1.0)) + eps) * x, 0.0)
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
        tl.debug_barrier()
        correction = tl.sqrt_rn(1 - p2)
        rate = tl.div_rn(lr1 * correction, 1 - p1)
        below = eps * tl.where(corrected > 0, correction, 1.0)
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
        # The fast root and quotient, off by up to two units in the last place. The root flushes subnormals to zero.
        moved = rate[:, None] * ahead / (tl.sqrt(tl.maximum(second, NORMAL)) + below[:, None])
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
        tl.debug_barrier()
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
        added = (tl.zeros_like(w) + eps).to(tl.float64)
        wide = w.to(tl.float64)
        x = g.to(tl.float64) + decay * wide
        kept = mu * tl.load(state, mask=old, other=0.0).to(tl.float64)
        n = kept + (x * x if OPT == RMSPROP_V2 else (1 - mu) * x * x)
        tl.store(state, n.to(tl.float32), mask=m)
        w = (wide - rate / (tl.sqrt(n) + added) * x).to(tl.float32)
    elif OPT == FTRL or OPT == GROUP_FTRL:
        norm = tl.load(state, mask=old, other=accumulator)
        zero = tl.load(state + D, mask=old, other=0.0)
        now = norm + g * g
        root = tl.sqrt_rn(now)
        turned = (tl.zeros_like(w) + lr2) != 0  # the formula divides by the rate
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
        tl.debug_barrier()
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
        tl.debug_barrier()
        last = (high << 32) | low
        now = here.to(tl.int64) * 0 + step
        w = (1 - lr2) * w + lr2 * (now - last).to(tl.float32)[:, None]
        tl.store(word, now.to(tl.int32), mask=here)
        tl.store(word + 1, (now >> 32).to(tl.int32), mask=here)
    elif OPT == ROWWISE_ADAGRAD:
        norm = tl.load(base, mask=known, other=accumulator)
        tl.debug_barrier()
        x = tl.where(inside, g + wd * w, 0.0)
        norm += tl.sum(x * x, axis=1) / D
        tl.store(base, norm, mask=here)
        below = tl.sqrt_rn(norm) + eps
        rate = tl.where(below == 0, 0.0, tl.div_rn(lr1, tl.where(below == 0, 1.0, below)))
        w -= rate[:, None] * x
    return w


@triton.jit
def round_to_half(w, d, noise):
    """Rounds every weight to one of its float16 neighbours at random, such that the expected value is the weight."""
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
