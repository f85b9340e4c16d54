#include "table/changes/touched.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "core/hash.h"

namespace shoal {

TouchedKeys::TouchedKeys(int64_t capacity) : capacity_(capacity) {
  if (capacity < 0) throw std::invalid_argument("capacity must be >= 0, got " + std::to_string(capacity));
}

size_t TouchedKeys::first_slot(int64_t id, int32_t table) const {
  return hash_id(static_cast<uint64_t>(id) + static_cast<uint64_t>(table) * 0x9e3779b97f4a7c15ULL) &
         (slots_.size() - 1);
}

void TouchedKeys::place(const Key& key) {
  const size_t mask = slots_.size() - 1;
  size_t i = first_slot(key.id, key.table);
  for (; slots_[i].used; i = (i + 1) & mask)
    if (slots_[i].id == key.id && slots_[i].table == key.table) return;
  slots_[i] = key;
  ++size_;
}

void TouchedKeys::grow(size_t slots) {
  std::vector<Key> old(slots, Key{0, 0, false});
  old.swap(slots_);
  size_ = 0;
  for (const Key& key : old)
    if (key.used) place(key);
}

int64_t TouchedKeys::insert(const int64_t* ids, int64_t n, int32_t table) {
  constexpr int64_t kAhead = 16;
  std::lock_guard lock(mutex_);
  int64_t dropped = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (size_ > capacity_) {
      dropped += size_;
      size_ = 0;
      std::fill(slots_.begin(), slots_.end(), Key{0, 0, false});
    }
    if (size_ * 2 >= static_cast<int64_t>(slots_.size())) grow(std::max(usual_, slots_.size() * 2));
    if (i + kAhead < n) __builtin_prefetch(&slots_[first_slot(ids[i + kAhead], table)], 1);
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
    usual_ = std::bit_ceil(std::max<size_t>(64, 2 * static_cast<size_t>(n) + 2));
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
