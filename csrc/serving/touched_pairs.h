// The set of (id, table) pairs that training has changed since the last sync round.
#pragma once
#include <cstdint>
#include <mutex>
#include <vector>

namespace shoal {

// Safe for concurrent insert and steal. Memory grows with the content and is given back by steal.
class TouchedPairs {
 public:
  explicit TouchedPairs(int64_t capacity) : capacity_(capacity) {}

  // Adds (ids[i], table) one after another. An insert that finds more than `capacity` pairs present, even an insert of
  // a pair that is there, empties the set first; returns how many pairs were thrown away.
  int64_t insert(const int64_t* ids, int64_t n, int32_t table);

  // Moves all pairs out, in no particular order.
  void steal(std::vector<int64_t>& ids, std::vector<int32_t>& tables);

  int64_t size() const;
  int64_t capacity() const { return capacity_; }

 private:
  void grow();
  bool place(int64_t id, int32_t table);

  const int64_t capacity_;
  mutable std::mutex mutex_;
  int64_t size_ = 0;
  std::vector<int64_t> ids_;     // slots: a power of two, at most half full
  std::vector<int32_t> tables_;  // -1 = empty slot
};

}  // namespace shoal
