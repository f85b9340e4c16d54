#include "data/join/index.h"

#include <algorithm>

namespace shoal::join {

void KeyIndex::insert(uint64_t hash, Location at) {
  hash += hash == 0;
  Part& part = parts_[hash >> 54];
  if ((part.size + 1) * 10 > part.capacity * 8) resize(part, std::max<size_t>(8, part.capacity * 5 / 4 + 2));
  size_t i = part.home(hash);
  while (part.entries[i].hash != 0) i = i + 1 < part.capacity ? i + 1 : 0;
  part.entries[i] = {hash, at};
  ++part.size;
  ++size_;
}

KeyIndex::Entry* KeyIndex::locate(uint64_t hash, Location at) {
  const Part& part = parts_[hash >> 54];
  if (part.size == 0) return nullptr;
  for (size_t i = part.home(hash); part.entries[i].hash != 0; i = i + 1 < part.capacity ? i + 1 : 0) {
    if (part.entries[i].hash == hash && part.entries[i].at.plain() == at.plain()) return &part.entries[i];
  }
  return nullptr;
}

Location* KeyIndex::find(uint64_t hash, Location at) {
  Entry* found = locate(hash + (hash == 0), at);
  return found == nullptr ? nullptr : &found->at;
}

bool KeyIndex::erase(uint64_t hash, Location at) {
  hash += hash == 0;
  Entry* found = locate(hash, at);
  if (found == nullptr) return false;
  Part& part = parts_[hash >> 54];
  // Later entries that are not at home move into the hole, so that no probe ends too early.
  size_t hole = static_cast<size_t>(found - part.entries.get());
  for (size_t i = hole + 1 < part.capacity ? hole + 1 : 0; part.entries[i].hash != 0;
       i = i + 1 < part.capacity ? i + 1 : 0) {
    const size_t home = part.home(part.entries[i].hash);
    const size_t from_home = i >= home ? i - home : i + part.capacity - home;
    const size_t from_hole = i >= hole ? i - hole : i + part.capacity - hole;
    if (from_home >= from_hole) {
      part.entries[hole] = part.entries[i];
      hole = i;
    }
  }
  part.entries[hole].hash = 0;
  --part.size;
  --size_;
  if (part.capacity > 64 && part.size * 10 < part.capacity * 3) resize(part, part.capacity / 2);
  return true;
}

void KeyIndex::resize(Part& part, size_t capacity) {
  Part next;
  next.entries = std::make_unique<Entry[]>(capacity);
  next.capacity = capacity;
  next.size = part.size;
  for (size_t from = 0; from < part.capacity; ++from) {
    const Entry& entry = part.entries[from];
    if (entry.hash == 0) continue;
    size_t i = next.home(entry.hash);
    while (next.entries[i].hash != 0) i = i + 1 < capacity ? i + 1 : 0;
    next.entries[i] = entry;
  }
  bytes_ += static_cast<int64_t>(capacity * sizeof(Entry)) - static_cast<int64_t>(part.capacity * sizeof(Entry));
  part = std::move(next);
}

}  // namespace shoal::join
