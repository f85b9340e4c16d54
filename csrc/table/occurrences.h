// The distinct ids of a batch in the order of their first occurrences, and the occurrences of each, chained in order.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "table/contents.h"

namespace shoal {

class Occurrences {
 public:
  // position(k) is the place in `ids` of the k-th of n occurrences, which is skipped if drop[position(k)].
  template <class Position>
  void find(const int64_t* ids, int64_t n, const uint8_t* drop, Position position) {
    const size_t mask = std::bit_ceil(static_cast<size_t>(2 * n)) - 1;
    // An entry is a group's number + 1 in the low bits and, above it, as many bits of the hash as fit.
    const int bits = std::bit_width(static_cast<uint64_t>(n));
    const uint32_t low = static_cast<uint32_t>((uint64_t{1} << bits) - 1);
    entries_.assign(mask + 1, 0);
    if (next_.size() < static_cast<size_t>(n)) {
      for (auto* array : {&next_, &first_, &last_}) array->resize(static_cast<size_t>(n));
      ids_.resize(static_cast<size_t>(n));
    }
    size_ = 0;
    for (int64_t k = 0; k < n; ++k) {
      const int64_t at = position(k);
      if (drop && drop[at]) continue;
      const int64_t id = ids[at];
      const uint64_t hash = hash_of(id);
      const auto tag = static_cast<uint32_t>(hash >> 22) & ~low;
      size_t slot = hash & mask;
      uint32_t entry;
      while ((entry = entries_[slot]) && ((entry & ~low) != tag || ids_[(entry & low) - 1] != id))
        slot = (slot + 1) & mask;
      next_[k] = kNone;
      if (entry) {
        const uint32_t group = (entry & low) - 1;
        next_[last_[group]] = static_cast<uint32_t>(k);
        last_[group] = static_cast<uint32_t>(k);
      } else {
        ids_[size_] = id;
        first_[size_] = last_[size_] = static_cast<uint32_t>(k);
        entries_[slot] = tag | static_cast<uint32_t>(++size_);
      }
    }
  }

  static constexpr uint32_t kNone = 0xFFFFFFFFu;
  int64_t size() const { return size_; }
  const int64_t* ids() const { return ids_.data(); }
  uint32_t first(int64_t group) const { return first_[group]; }
  uint32_t next(uint32_t k) const { return next_[k]; }

  // Frees memory that only a much larger batch needs.
  void trim() {
    if (next_.size() > kKept) *this = Occurrences();
  }

 private:
  static constexpr size_t kKept = size_t{1} << 18;
  std::vector<uint32_t> entries_, next_, first_, last_;
  std::vector<int64_t> ids_;
  int64_t size_ = 0;
};

}  // namespace shoal
