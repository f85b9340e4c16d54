// Sharding a batch's fids, and the offsets that the layout op reads.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace shoal::ops {

// One feature's ids: `rows` rows, or one row that all samples share.
struct FeatureIds {
  const int64_t* ids;
  const int64_t* splits;  // [rows + 1], from 0
  int64_t rows;
  bool shared;
  int64_t table, width;
};

// The constructor distributes the ids of each feature to shards; finish() writes the results. Features are in sorted
// order; their ids must stay alive until finish() has returned.
class ShardFids {
 public:
  ShardFids(std::vector<FeatureIds> features, int64_t tables, int64_t shards, bool unique);

  int64_t fids() const { return starts_.back(); }
  int64_t rows() const { return rows_; }
  std::vector<int64_t> list_lengths() const;  // [tables * shards]
  std::vector<int64_t> list_floats() const;   // [tables * shards]
  // lists: per (table, shard) [list_lengths]; list_splits: per (table, shard) [features of the table + 1];
  // fid_offset [fids], feature_offset [rows + 1], nfl_offset [features + 1].
  void finish(int version, const std::vector<uintptr_t>& lists, const std::vector<uintptr_t>& list_splits,
              int64_t* fid_offset, int32_t* feature_offset, int64_t* nfl_offset) const;

 private:
  std::vector<FeatureIds> features_;
  int64_t tables_, shards_, rows_ = 0;
  std::vector<int64_t> starts_;        // per feature, its first fid
  std::unique_ptr<uint32_t[]> shard_;  // per fid occurrence
  std::unique_ptr<uint32_t[]> place_;  // per fid occurrence: its place in the (feature, shard) list
  std::unique_ptr<int64_t[]> counts_;  // [features, shards]
};

}  // namespace shoal::ops
