// Ids that were trained since the last steal(), to be pushed to serving replicas.
#pragma once
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/at_fork.h"

namespace shoal {

// A set of (id, table number); for a single table the number is 0. If it already holds MORE than `capacity` keys at an
// insertion, it is emptied first and the dropped keys are counted. Thread-safe, allocates lazily.
class TouchedKeys {
 public:
  explicit TouchedKeys(int64_t capacity);  // throws std::invalid_argument below 0

  int64_t insert(const int64_t* ids, int64_t n, int32_t table = 0);  // returns how many keys were dropped
  // Takes all keys out of the set, in no particular order.
  void steal(std::vector<int64_t>* ids, std::vector<int32_t>* tables);
  int64_t size() const;
  int64_t capacity() const { return capacity_; }
  int64_t dropped() const;  // keys dropped since construction

 private:
  struct Key {
    int64_t id;
    int32_t table;
    bool used;
  };
  void grow(size_t slots);
  size_t first_slot(int64_t id, int32_t table) const;
  void place(const Key& key);

  const int64_t capacity_;
  mutable std::mutex mutex_;
  AtFork at_fork_{&mutex_};
  std::vector<Key> slots_;  // open addressing; the size is a power of two, or 0 before the first key
  int64_t size_ = 0;
  size_t usual_ = 64;  // slots for as many keys as the last steal() took
  int64_t dropped_ = 0;
};

}  // namespace shoal
