#include "serving/touched_pairs.h"

#include <stdexcept>

namespace shoal {
namespace {

uint64_t mix(int64_t id, int32_t table) {
  uint64_t x = static_cast<uint64_t>(id) + 0x9e3779b97f4a7c15ull * (static_cast<uint64_t>(table) + 1);
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
  return x ^ (x >> 32);
}

}  // namespace

bool TouchedPairs::place(int64_t id, int32_t table) {
  const uint64_t mask = ids_.size() - 1;
  for (uint64_t at = mix(id, table) & mask;; at = (at + 1) & mask) {
    if (tables_[at] < 0) {
      ids_[at] = id;
      tables_[at] = table;
      return true;
    }
    if (ids_[at] == id && tables_[at] == table) return false;
  }
}

void TouchedPairs::grow() {
  std::vector<int64_t> ids(ids_.empty() ? 64 : ids_.size() * 2);
  std::vector<int32_t> tables(ids.size(), -1);
  ids.swap(ids_);
  tables.swap(tables_);
  for (size_t i = 0; i < ids.size(); ++i)
    if (tables[i] >= 0) place(ids[i], tables[i]);
}

int64_t TouchedPairs::insert(const int64_t* ids, int64_t n, int32_t table) {
  if (table < 0) throw std::invalid_argument("a table's number is not negative");
  std::lock_guard lock(mutex_);
  int64_t dropped = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (size_ > capacity_) {
      dropped += size_;
      size_ = 0;
      tables_.assign(tables_.size(), -1);
    }
    if (2 * (size_ + 1) > static_cast<int64_t>(ids_.size())) grow();
    size_ += place(ids[i], table);
  }
  return dropped;
}

void TouchedPairs::steal(std::vector<int64_t>& ids, std::vector<int32_t>& tables) {
  std::vector<int64_t> slots;
  std::vector<int32_t> owners;
  int64_t size;
  {
    std::lock_guard lock(mutex_);
    slots.swap(ids_);
    owners.swap(tables_);
    size = size_;
    size_ = 0;
  }
  ids.clear();
  tables.clear();
  ids.reserve(size);
  tables.reserve(size);
  for (size_t i = 0; i < slots.size(); ++i) {
    if (owners[i] < 0) continue;
    ids.push_back(slots[i]);
    tables.push_back(owners[i]);
  }
}

int64_t TouchedPairs::size() const {
  std::lock_guard lock(mutex_);
  return size_;
}

}  // namespace shoal
