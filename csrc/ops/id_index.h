// Finding equal ids: de-duplication in order of first occurrence, and a map from an id to its first place in lists.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace shoal::ops {

// Distinct ids of one array. Ranks count distinct ids in order of first occurrence; one array holds fewer than 2^32 - 1
// of them.
struct Distinct {
  int64_t count = 0;
  std::unique_ptr<int64_t[]> ids;  // [count]
};

// Writes the rank of ids[i] to rank[i] and, unless `first` is null, the position of each distinct id's first occurrence
// to `first`, which has room for n. Large arrays are cut into hash partitions for several threads.
Distinct dedup(const int64_t* ids, int64_t n, uint32_t* rank, int64_t* first, bool parallel);

// One dedup per array. Small arrays run in parallel, large ones one after another on all threads.
struct IdSpan {
  const int64_t* ids;
  int64_t n;
  uint32_t* rank;
  int64_t* first;
};
void dedup_each(const std::vector<IdSpan>& arrays, std::vector<Distinct>& out);

// id -> place of its first occurrence in a list of arrays.
class IdMap {
 public:
  // Arrays are read during construction only.
  IdMap(const std::vector<uintptr_t>& arrays, const std::vector<int64_t>& lengths, bool parallel);
  // Writes place[j] for n ids: list index << kPositionBits | position, or -1 if absent. Runs on the calling thread.
  void find(const int64_t* ids, int64_t n, int64_t* place) const;

  static constexpr int kPositionBits = 40;

 private:
  struct Entry {
    int64_t id;
    int64_t place;  // -1: empty
  };
  struct Region {
    int64_t begin;
    int shift;
    uint64_t mask;
  };
  void build_dense(const std::vector<uintptr_t>& arrays, const std::vector<int64_t>& lengths, bool parallel);
  void build_hashed(const std::vector<uintptr_t>& arrays, const std::vector<int64_t>& lengths, bool parallel);

  // Ids that fill a quarter or more of their range are looked up by subtraction, without a hash.
  bool dense_ = false;
  int64_t low_ = 0;
  uint64_t span_ = 0;
  std::unique_ptr<int64_t[]> by_id_;

  int partition_bits_ = 0;
  std::vector<Region> regions_;
  std::unique_ptr<Entry[]> entries_;
};

}  // namespace shoal::ops
