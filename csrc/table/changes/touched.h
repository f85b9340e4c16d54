// Ids that were trained since they were last stolen, for the serving replicas to be told of.
#pragma once
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/at_fork.h"

namespace shoal {

// Insert-only until stolen. When it already holds MORE than `capacity` keys at an insertion it is emptied first and the
// keys thrown away are counted. Keys are (id, table number); a lone set uses table 0. Thread-safe, allocates lazily.
class TouchedKeys {
 public:
  explicit TouchedKeys(int64_t capacity);  // throws std::invalid_argument below 0

  int64_t insert(const int64_t* ids, int64_t n, int32_t table = 0);  // returns how many keys were dropped
  // Everything, in no particular order, and the set is empty afterwards.
  void steal(std::vector<int64_t>* ids, std::vector<int32_t>* tables);
  int64_t size() const;
  int64_t capacity() const { return capacity_; }
  int64_t dropped() const;  // keys lost since the beginning

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
  size_t usual_ = 64;  // slots that were filled when it was last stolen
  int64_t dropped_ = 0;
};

}  // namespace shoal
