// Where the records of a key are: a map from 64 bits of the key's hash to one or several locations.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace shoal::join {

// A record's side, whether the impression was emitted, its segment and the byte in it.
struct Location {
  uint64_t bits = 0;

  static constexpr uint64_t kActive = (uint64_t{1} << 22) - 1;  // the segment number of records in memory
  static constexpr uint64_t kOffset = (uint64_t{1} << 40) - 1;
  static Location of(bool action, uint64_t segment, uint64_t offset) {
    return {static_cast<uint64_t>(action) << 63 | (segment & kActive) << 40 | (offset & kOffset)};
  }
  bool action() const { return bits >> 63; }
  bool emitted() const { return bits >> 62 & 1; }
  Location plain() const { return {bits & ~(uint64_t{1} << 62)}; }
  Location with_emitted() const { return {bits | uint64_t{1} << 62}; }
  uint64_t segment() const { return bits >> 40 & kActive; }
  uint64_t offset() const { return bits & kOffset; }
  bool operator==(const Location&) const = default;
};

// Open addressing in 1,024 parts, so that only a thousandth is resized at a time.
class KeyIndex {
 public:
  struct Entry {
    uint64_t hash;  // 0: empty
    Location at;
  };

  void insert(uint64_t hash, Location at);
  // Calls `visit(Location)` for every location of a hash, in no particular order. `visit` must not change the index.
  template <class Visit>
  void find(uint64_t hash, Visit&& visit) const {
    hash += hash == 0;
    const Part& part = parts_[hash >> 54];
    for (size_t i = part.home(hash); part.size > 0 && part.entries[i].hash != 0;
         i = i + 1 < part.capacity ? i + 1 : 0) {
      if (part.entries[i].hash == hash) visit(part.entries[i].at);
    }
  }
  // The entry of a location, whether it was emitted or not; null if there is none. Valid until the next change.
  Location* find(uint64_t hash, Location at);
  bool erase(uint64_t hash, Location at);
  // Erases every entry for which `drop(Location)` is true. Slow: it reads the complete index.
  template <class Drop>
  void erase_if(Drop&& drop) {
    std::vector<Entry> doomed;
    for (const Part& part : parts_) {
      for (size_t i = 0; i < part.capacity; ++i) {
        if (part.entries[i].hash != 0 && drop(part.entries[i].at)) doomed.push_back(part.entries[i]);
      }
    }
    for (const Entry& entry : doomed) erase(entry.hash, entry.at);
  }
  void prefetch(uint64_t hash) const {
    const Part& part = parts_[hash >> 54];
    if (part.capacity > 0) __builtin_prefetch(&part.entries[part.home(hash)]);
  }
  int64_t size() const { return size_; }
  int64_t bytes() const { return bytes_; }

 private:
  struct Part {
    std::unique_ptr<Entry[]> entries;
    size_t capacity = 0, size = 0;
    size_t home(uint64_t hash) const {
      return static_cast<size_t>((static_cast<unsigned __int128>(hash << 10) * capacity) >> 64);
    }
  };
  static constexpr size_t kParts = 1024;

  Entry* locate(uint64_t hash, Location at);
  void resize(Part& part, size_t capacity);

  std::vector<Part> parts_{kParts};
  int64_t size_ = 0, bytes_ = kParts * sizeof(Part);
};

}  // namespace shoal::join
