// A block of approximate counts: 16-bit cells of a 12-bit signature and a 4-bit saturating count. Not thread-safe.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "core/hash.h"

namespace shoal {

class FilterBlock {
 public:
  static constexpr uint32_t kMaxCount = 15;
  static constexpr int64_t kSpare = 64;  // cells after the last home position

  // int(capacity * fill_rate) home positions. No memory is taken before the first count.
  FilterBlock(int64_t capacity, double fill_rate);

  // The place of an id: the `index` of its cell or of an empty one, -1 if max_step cells hold other ids.
  struct Place {
    int64_t index;
    uint32_t count;  // 0 unless occupied
    bool occupied;
  };
  Place find(int64_t id, int max_step) const;
  // Writes the cell that find() returned; counts a new element if it was empty.
  void store(const Place& place, int64_t id, uint32_t count);

  // Counts `count` more occurrences. Returns the previous count: 0 for a new id, and 15 (and a failure) without room.
  uint32_t add(int64_t id, uint32_t count, int max_step);
  uint32_t get(int64_t id, int max_step) const;  // 0 when never seen, 15 without room
  bool full() const { return elements_ >= capacity_ - 1; }
  void clear();  // gives the memory back

  int64_t capacity() const { return capacity_; }
  double fill_rate() const { return fill_rate_; }
  int64_t total() const { return total_; }
  int64_t cells() const { return total_ + kSpare; }
  int64_t elements() const { return elements_; }
  int64_t failures() const { return failures_; }

  // For files. read() returns zeros for an empty block. set() throws std::invalid_argument for impossible numbers.
  void read(int64_t offset, int64_t n, uint16_t* out) const;
  void set(int64_t total, double fill_rate, int64_t elements, int64_t failures, const uint16_t* cells);

 private:
  struct Free {
    void operator()(uint16_t* p) const { std::free(p); }
  };
  void allocate();
  static uint16_t signature(int64_t id) {
    uint64_t x = static_cast<uint64_t>(id);
    return static_cast<uint16_t>(((x >> 17) | (x << 15)) & 0xFFF);
  }

  int64_t capacity_;
  double fill_rate_;
  int64_t total_;
  int64_t elements_ = 0;
  int64_t failures_ = 0;
  std::unique_ptr<uint16_t[], Free> map_;  // null: all empty
};

}  // namespace shoal
