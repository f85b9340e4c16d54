// Finding equal ids: de-duplication in order of first occurrence, and a map from an id to the place it was given at.
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

// rank[i] = the rank of ids[i]; `first`, where given, gets the position of each distinct id's first occurrence and has
// room for n. Large arrays are cut into hash partitions and worked on by several threads; the result is the same.
Distinct dedup(const int64_t* ids, int64_t n, uint32_t* rank, int64_t* first, bool parallel);

// One dedup per array; small arrays run side by side, large ones one after another with all threads.
// done(a, distinct) is called once per array, from any thread.
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
  // place[j] for n ids: list index << kPositionBits | position, or -1 when absent. Prefetches; one caller's thread.
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

  // Ids that fill most of a narrow range are looked up by subtraction alone.
  bool dense_ = false;
  int64_t low_ = 0;
  uint64_t span_ = 0;
  std::unique_ptr<int64_t[]> by_id_;

  int partition_bits_ = 0;
  std::vector<Region> regions_;
  std::unique_ptr<Entry[]> entries_;
};

}  // namespace shoal::ops
