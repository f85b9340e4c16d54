// An id that found no room, and the ids of its batch, whose rows must not leave for it.
#pragma once
#include <bit>
#include <cstdint>
#include <vector>

#include "core/hash.h"
#include "table/table.h"

namespace shoal {

struct Table::Newcomer {
  int64_t place;  // in its chunk
  uint64_t hash;
  int64_t id;
  uint32_t key;  // the key that its row would have
  int stripe = 0;
  bool refused = false;
};

// The ids of one part of a write, hashed when the first row must leave.
class Table::Batch {
 public:
  Batch(const int64_t* ids, const uint32_t* positions, int64_t n) : ids_(ids), positions_(positions), n_(n) {}
  bool has(int64_t id) {
    if (slots_.empty()) fill();
    for (size_t at = place(id);; at = (at + 1) & (slots_.size() - 1)) {
      if (!slots_[at]) return false;
      if (ids_[slots_[at] - 1] == id) return true;
    }
  }

 private:
  size_t place(int64_t id) const { return hash_id(static_cast<uint64_t>(id)) & (slots_.size() - 1); }
  void fill() {
    slots_.resize(std::bit_ceil(static_cast<size_t>(2 * n_ + 1)));
    for (int64_t i = 0; i < n_; ++i) {
      const int64_t position = positions_ ? positions_[i] : i;
      size_t at = place(ids_[position]);
      while (slots_[at] && ids_[slots_[at] - 1] != ids_[position]) at = (at + 1) & (slots_.size() - 1);
      slots_[at] = static_cast<uint32_t>(position + 1);
    }
  }

  const int64_t* ids_;
  const uint32_t* positions_;
  int64_t n_;
  std::vector<uint32_t> slots_;  // a position + 1; 0: none
};

}  // namespace shoal
