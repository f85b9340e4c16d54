#include "table/touched.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/hash.h"

namespace shoal {

TouchedKeys::TouchedKeys(int64_t capacity) : capacity_(capacity) {
  if (capacity < 0) throw std::invalid_argument("capacity must not be negative, got " + std::to_string(capacity));
}

void TouchedKeys::place(const Key& key) {
  const size_t mask = slots_.size() - 1;
  size_t i = hash_id(static_cast<uint64_t>(key.id) + static_cast<uint64_t>(key.table) * 0x9e3779b97f4a7c15ULL) & mask;
  for (; slots_[i].used; i = (i + 1) & mask)
    if (slots_[i].id == key.id && slots_[i].table == key.table) return;
  slots_[i] = key;
  ++size_;
}

void TouchedKeys::grow() {
  std::vector<Key> old(std::max<size_t>(64, slots_.size() * 2), Key{0, 0, false});
  old.swap(slots_);
  size_ = 0;
  for (const Key& key : old)
    if (key.used) place(key);
}

int64_t TouchedKeys::insert(const int64_t* ids, int64_t n, int32_t table) {
  std::lock_guard lock(mutex_);
  int64_t dropped = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (size_ > capacity_) {
      dropped += size_;
      size_ = 0;
      std::fill(slots_.begin(), slots_.end(), Key{0, 0, false});
    }
    if (size_ * 2 >= static_cast<int64_t>(slots_.size())) grow();
    place({ids[i], table, true});
  }
  dropped_ += dropped;
  return dropped;
}

void TouchedKeys::steal(std::vector<int64_t>* ids, std::vector<int32_t>* tables) {
  std::vector<Key> stolen;
  int64_t n;
  {
    std::lock_guard lock(mutex_);
    stolen.swap(slots_);
    n = size_;
    size_ = 0;
  }
  ids->reserve(static_cast<size_t>(n));
  tables->reserve(static_cast<size_t>(n));
  for (const Key& key : stolen) {
    if (!key.used) continue;
    ids->push_back(key.id);
    tables->push_back(key.table);
  }
}

int64_t TouchedKeys::size() const {
  std::lock_guard lock(mutex_);
  return size_;
}

int64_t TouchedKeys::dropped() const {
  std::lock_guard lock(mutex_);
  return dropped_;
}

}  // namespace shoal
