# pyrefly: ignore-errors
"""Eviction policies in kernels: one word per row, which determines the row that leaves first.

A word has 30 bits for the policy (32 in csrc/table/budget/policy.h), one for pinned ids, and one for held rows, which
cannot leave: the current call uses them, or no id has them.

    lru        the number of the last call that wrote the row
    lfu        18 bits: writes; then 12 bits of a coarse clock, so that the older of two equal rows leaves
    epoch_lru  12 bits: the epoch of the last write; then 18 bits of the coarse clock, which restarts with each epoch
    epoch_lfu  12 bits: the epoch of the last write; then 18 bits: writes
    score      the upper bits of the user's float, as an integer of the same order
    slru       29 bits: the number of the last call that wrote the row; 1 bit: whether it was written before that

A table's clocks, limits and counters are words in device memory, so that a captured graph advances them.
"""

import triton
import triton.language as tl

HELD = tl.constexpr(1)
PINNED = tl.constexpr(2)
SHIFT = tl.constexpr(2)
VALUE = tl.constexpr((1 << 30) - 1)
CLOCK_BITS = tl.constexpr(12)
CLOCK = tl.constexpr((1 << 12) - 1)
LOW_BITS = tl.constexpr(18)
LOW = tl.constexpr((1 << 18) - 1)
CALLS = tl.constexpr((1 << 29) - 1)
ONCE = tl.constexpr(4)  # slru: factor on the age of a row that was written once (csrc/table/budget/policy.h)

LRU, LFU, EPOCH_LRU, EPOCH_LFU, SCORE, SLRU = (tl.constexpr(number) for number in range(6))

# Words of a table's budget.
POLICY = tl.constexpr(0)
CALL = tl.constexpr(1)
COARSE = tl.constexpr(2)
COARSE_BEGAN = tl.constexpr(3)  # rows created when the coarse clock last advanced
COARSE_ROWS = tl.constexpr(4)  # rows created between two ticks of the coarse clock
EPOCH = tl.constexpr(5)
EPOCH_BEGAN = tl.constexpr(6)  # seconds
EPOCH_S = tl.constexpr(7)
NOW_S = tl.constexpr(8)  # the latest time of a write
MIN_AGE_S = tl.constexpr(9)
IF_BETTER = tl.constexpr(10)
SCORED = tl.constexpr(11)  # whether SCORE_OF_ALL is for all rows written without a score; else only for new ones
SCORE_OF_ALL = tl.constexpr(12)
PINS = tl.constexpr(13)  # number of pinned ids
SMALL = tl.constexpr(14)  # whether exactly the rows that the policy ranks lowest leave (small.py)
COMING = tl.constexpr(15)  # new ids of the current call
CREATED = tl.constexpr(16)
WRITTEN = tl.constexpr(17)  # occurrences of ids that have a row, including new ones
EVICTED = tl.constexpr(18)
REFUSED = tl.constexpr(19)
AGE_SUM = tl.constexpr(20)
AGE_MIN = tl.constexpr(21)
AGE_MAX = tl.constexpr(22)
TYPICAL = tl.constexpr(23)  # `Lru`: the mean key of the rows evicted by the last call; -1: unknown
LEFT_KEYS = tl.constexpr(24)  # `Lru`: the sum of the keys of rows evicted by this call
LEFT = tl.constexpr(25)  # and their number
SAMPLE_BELOW = tl.constexpr(26)  # ids with a lower hash are sampled
SAMPLED = tl.constexpr(27)  # number of samples; the last ones are in the ring
BUDGET_WORDS = tl.constexpr(28)

RING = tl.constexpr(1 << 15)  # sampled ids, after the words


@triton.jit
def tick(budget, time, m):
    """Advances the clocks of tables at the beginning of a call at ``time`` (0: no time given)."""
    call = tl.load(budget + CALL, mask=m, other=0)
    made = tl.load(budget + CREATED, mask=m, other=0)
    coarse = tl.load(budget + COARSE, mask=m, other=0)
    epoch = tl.load(budget + EPOCH, mask=m, other=0)
    late = made - tl.load(budget + COARSE_BEGAN, mask=m, other=0) > tl.load(budget + COARSE_ROWS, mask=m, other=0)
    began = tl.load(budget + EPOCH_BEGAN, mask=m, other=0)
    length = tl.load(budget + EPOCH_S, mask=m, other=0)
    over = (length > 0) & (time > began) & (time - began >= length)
    next_epoch = over & (began > 0)
    now = tl.load(budget + NOW_S, mask=m, other=0)
    policy = tl.load(budget + POLICY, mask=m, other=0)
    left = tl.load(budget + LEFT, mask=m, other=0)
    typical = tl.load(budget + LEFT_KEYS, mask=m, other=0) // tl.maximum(left, 1)
    tl.debug_barrier()
    tl.store(budget + TYPICAL, typical, mask=m & (left > 0))
    tl.store(budget + LEFT_KEYS, call * 0, mask=m)
    tl.store(budget + LEFT, call * 0, mask=m)
    tl.store(budget + CALL, call + 1, mask=m)
    tl.store(budget + COARSE_BEGAN, made, mask=m & late)
    coarse = tl.where(next_epoch & (policy == EPOCH_LRU), 0, coarse + late.to(tl.int64))
    tl.store(budget + COARSE, coarse, mask=m)
    tl.store(budget + EPOCH, epoch + 1, mask=m & next_epoch)
    tl.store(budget + EPOCH_BEGAN, time, mask=m & over)
    tl.store(budget + NOW_S, tl.maximum(now, time), mask=m)
    tl.store(budget + COMING, call * 0, mask=m)


@triton.jit
def order(word, budget, LRU_: tl.constexpr):
    """Keys of the words of one table, int32: the row with the lowest key leaves first. LRU_: its policy is `Lru`."""
    value = (word >> SHIFT) & VALUE
    policy = tl.load(budget + POLICY)
    call = (tl.load(budget + CALL) & VALUE).to(tl.int32)
    lru = (value - call - 1) & VALUE
    if LRU_:
        key = lru
    else:
        coarse = (tl.load(budget + COARSE) & CLOCK).to(tl.int32)
        epoch = (((tl.load(budget + EPOCH) + 1) << LOW_BITS) & VALUE).to(tl.int32)
        lfu = (value & (VALUE - CLOCK)) | ((value - coarse - 1) & CLOCK)
        other = tl.where(policy == SCORE, value, (value - epoch) & VALUE)
        age = tl.minimum((call - (value >> 1)) & CALLS, VALUE // ONCE)
        other = tl.where(policy == SLRU, VALUE - tl.where((value & 1) != 0, age, age * ONCE), other)
        key = tl.where(policy == LRU, lru, tl.where(policy == LFU, lfu, other))
    return key


@triton.jit
def written(word, budget, given, GIVEN: tl.constexpr):
    """The words of one table's rows after a write; ``given`` are the codes of scores (`score_code`)."""
    value = (word >> SHIFT) & VALUE
    policy = tl.load(budget + POLICY)
    call = (tl.load(budget + CALL) & VALUE).to(tl.int32)
    coarse = tl.load(budget + COARSE)
    epoch = (tl.load(budget + EPOCH) & CLOCK).to(tl.int32) << LOW_BITS
    lfu = (tl.minimum((value >> CLOCK_BITS) + 1, LOW) << CLOCK_BITS) | (coarse & CLOCK).to(tl.int32)
    epoch_lru = epoch | tl.minimum(coarse, LOW).to(tl.int32)
    epoch_lfu = epoch | tl.minimum((value & LOW) + 1, LOW)
    if GIVEN:
        score = given
    else:
        every = tl.load(budget + SCORED) != 0
        score = tl.where(every | (value == 0), tl.load(budget + SCORE_OF_ALL).to(tl.int32), value)
    other = tl.where(policy == EPOCH_LRU, epoch_lru, tl.where(policy == EPOCH_LFU, epoch_lfu, score))
    other = tl.where(policy == SLRU, ((call & CALLS) << 1) | (value != 0).to(tl.int32), other)
    after = tl.where(policy == LRU, call, tl.where(policy == LFU, lfu, other))
    return (after << SHIFT) | (word & PINNED)


@triton.jit
def score_code(score):
    """30-bit integers in the order of the floats."""
    bits = score.to(tl.int32, bitcast=True)
    code = tl.where(bits < 0, ~bits, bits | -2147483648)
    return (code >> SHIFT) & VALUE
