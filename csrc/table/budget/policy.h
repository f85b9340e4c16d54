// Which rows leave a full table first: every row has 32 bits in its slot of the index, from which its key follows; the
// row with the lowest key leaves. The bits, highest first:
//
//   lru        the number of the call that wrote the row last
//   lfu        20 bits: writes; 12 bits: a coarse clock, so that of rows with equal writes the older leaves
//   epoch_lru  12 bits: the epoch of the last write; 20 bits: the coarse clock, which restarts with an epoch
//   epoch_lfu  12 bits: the epoch of the last write; 20 bits: writes
//   score      a float given by the user, as an integer of the same order
//   slru       31 bits: the number of the call that wrote the row last; 1 bit: whether it was written before that
//
// Clocks wrap around, so keys are relative to now. The coarse clock advances when a thousandth of the rows is new.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

namespace shoal {

enum class Policy : int32_t { lru, lfu, epoch_lru, epoch_lfu, score, slru };

// A float as an integer of the same order; NaN comes last.
inline uint32_t score_code(float score) {
  const auto bits = std::bit_cast<uint32_t>(score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The clocks of a table during one call.
struct Moment {
  Policy policy = Policy::lru;
  uint32_t call = 0, coarse = 0, epoch = 0;
  float score = 0;      // of new rows that are written without a score
  bool scored = false;  // also of rows that exist already

  static constexpr int kClockBits = 12, kLowBits = 20;
  static constexpr uint32_t kClockMask = (1u << kClockBits) - 1, kLowMask = (1u << kLowBits) - 1;
  // Concurrent calls may be ahead of this one by up to this many.
  static constexpr uint32_t kAhead = 1u << 16;
  // slru treats a row written once as this many times as old as one written again.
  static constexpr uint32_t kOnce = 4;

  // A row's bits after another write.
  uint32_t written(uint32_t had, const float* given) const {
    switch (policy) {
      case Policy::lru:
        return call;
      case Policy::lfu: {
        const uint32_t writes = had >> kClockBits;
        return std::min(writes + 1, kLowMask) << kClockBits | (coarse & kClockMask);
      }
      case Policy::epoch_lru:
        return epoch << kLowBits | std::min(coarse, kLowMask);
      case Policy::epoch_lfu:
        return epoch << kLowBits | std::min((had & kLowMask) + 1, kLowMask);
      case Policy::score:
        return given ? score_code(*given) : scored ? score_code(score) : had;
      case Policy::slru:
        return had >> 1 == (call & kCallMask) ? had : call << 1 | 1;
    }
    return had;
  }
  // A row's bits after its first write.
  uint32_t fresh(const float* given) const {
    if (policy == Policy::slru) return call << 1;
    return policy == Policy::score ? score_code(given ? *given : score) : written(0, given);
  }
  // The bits of a loaded row of which only the time of its last write, in seconds, is known.
  uint32_t loaded(uint32_t seconds) const {
    return policy == Policy::lru ? seconds : policy == Policy::slru ? seconds << 1 : fresh(nullptr);
  }
  // A row's bits in a form that does not depend on this table's clocks, for files and other tables. From the lowest: 3
  // bits: the policy + 1; 20 bits: writes (slru: whether there was more than one), or the coarse clock in its epoch; 32
  // bits: the call, the coarse clock, the epoch, or the code of a score. 0: unknown.
  uint64_t lasting(uint32_t has) const {
    uint64_t low = 0, high = has;
    if (policy == Policy::lfu) {
      low = has >> kClockBits;
      high = coarse + 1 - ((coarse + 1 - has) & kClockMask);
    } else if (policy == Policy::epoch_lru || policy == Policy::epoch_lfu) {
      low = has & kLowMask;
      high = epoch + 1 - ((epoch + 1 - (has >> kLowBits)) & kClockMask);
    } else if (policy == Policy::slru) {
      low = has & 1;
      high = call + kAhead - ((call + kAhead - (has >> 1)) & kCallMask);
    }
    return (high & 0xFFFFFFFFu) << 23 | low << 3 | (static_cast<uint64_t>(policy) + 1);
  }
  // The bits of a loaded row with these `lasting` bits; if they are unknown or another policy's, only the time is used.
  uint32_t loaded(uint64_t lasting, uint32_t seconds) const {
    const auto high = static_cast<uint32_t>(lasting >> 23), low = static_cast<uint32_t>(lasting >> 3) & kLowMask;
    if ((lasting & 7) != static_cast<uint64_t>(policy) + 1) return loaded(seconds);
    if (policy == Policy::lfu) return low << kClockBits | (high & kClockMask);
    if (policy == Policy::epoch_lru || policy == Policy::epoch_lfu) return high << kLowBits | low;
    if (policy == Policy::slru) return high << 1 | low;
    return high;
  }
  // The row with the lowest key leaves first.
  uint32_t key(uint32_t has) const {
    switch (policy) {
      case Policy::lru:
        return has - (call + kAhead + 1);
      case Policy::lfu:
        return (has & ~kClockMask) | ((has - coarse - 2) & kClockMask);
      case Policy::epoch_lru:
      case Policy::epoch_lfu:
        return has - ((epoch + 2) << kLowBits);
      case Policy::score:
        return has;
      case Policy::slru:
        return slru_key(has, call);
    }
    return has;
  }
  // key() and just_written() without a branch, for loops over many rows.
  struct Order {
    uint32_t high, low, base, young;
    bool protects, slru = false;
    uint32_t key(uint32_t has) const { return slru ? slru_key(has, base) : (has & high) | ((has - base) & low); }
    bool just_written(uint32_t has) const {
      return slru ? slru_key(has, base) == ~0u : protects & (((has - base) & low) >= young);
    }
  };
  Order order() const {
    switch (policy) {
      case Policy::lru:
        return {0, ~0u, call + kAhead + 1, ~kAhead, true};
      case Policy::lfu:
        return {~kClockMask, kClockMask, coarse + 2, kClockMask - 1, true};
      case Policy::epoch_lru:
        return {0, ~0u, (epoch + 2) << kLowBits, fresh(nullptr) - ((epoch + 2) << kLowBits), true};
      case Policy::epoch_lfu:
        return {0, ~0u, (epoch + 2) << kLowBits, 0, false};
      case Policy::score:
        return {0, ~0u, 0, 0, false};
      case Policy::slru:
        return {0, ~0u, call, 0, true, true};
    }
    return {};
  }
  // Whether a row was just written, perhaps by this call: then it stays.
  bool just_written(uint32_t has) const {
    switch (policy) {
      case Policy::lru:
        return has - call <= kAhead;
      case Policy::lfu:
        return ((has - coarse) & kClockMask) <= 1;
      case Policy::epoch_lru:
        return has >> kLowBits == (epoch & kClockMask) && (has & kLowMask) >= std::min(coarse, kLowMask);
      case Policy::slru:
        return slru_key(has, call) == ~0u;
      default:
        return false;
    }
  }

 private:
  static constexpr uint32_t kCallMask = ~0u >> 1;
  // The key from the calls since the last write; all ones if there were none, or if a later call wrote the row.
  static uint32_t slru_key(uint32_t has, uint32_t call) {
    const uint32_t since = (call + kAhead - (has >> 1)) & kCallMask;
    const uint32_t age = std::min(since - std::min(since, kAhead), ~0u / kOnce);
    return ~(has & 1 ? age : kOnce * age);
  }
};

}  // namespace shoal
