// De-duplicating ids and distributing them to shards.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "ops/id_index.h"

namespace shoal::ops {

// Groups distinct keys by shard, within a shard in reverse order of first occurrence. Writes the positions of the kept
// elements to `order` and their numbers to shard_sizes [shards]; returns how many are kept.
int64_t reorder_by_indices(const int64_t* keys, int64_t n, const int64_t* shard_ids, int64_t shards, int64_t* order,
                           int32_t* shard_sizes);

// The same for several tables: the constructor finds the distinct ids; finish() writes the results.
class FusedReorder {
 public:
  // shard(id) = id floor-mod (shards - empty) + empty, with `empty` 0 or 1.
  FusedReorder(std::vector<uintptr_t> inputs, std::vector<int64_t> lengths, int64_t shards, int64_t empty,
               std::vector<int64_t> dims);
  int64_t size() const { return size_; }
  void finish(int64_t* output, int32_t* shard_sizes, int32_t* slot_sizes, int32_t* offsets);

 private:
  int64_t shards_, size_ = 0;
  std::vector<int64_t> dims_, lengths_, starts_;
  std::unique_ptr<uint32_t[]> rank_;                // per element: rank among its table's distinct ids
  std::vector<Distinct> distinct_;                  // per table
  std::vector<std::unique_ptr<uint32_t[]>> place_;  // per table and distinct id: rank in its (shard, table) list
  std::vector<std::unique_ptr<uint32_t[]>> shard_;  // per table and distinct id
  std::unique_ptr<int64_t[]> counts_;               // [tables, shards]
};

}  // namespace shoal::ops
