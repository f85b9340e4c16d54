#include "ops/shard/shard_fids.h"

#include <algorithm>
#include <limits>

#include "ops/common.h"
#include "ops/id_index.h"
#include "ops/ragged/ragged.h"
#include "ops/shard/shard.h"

namespace shoal::ops {

ShardFids::ShardFids(std::vector<FeatureIds> features, int64_t tables, int64_t shards, bool unique)
    : features_(std::move(features)), tables_(tables), shards_(shards) {
  const int64_t count = static_cast<int64_t>(features_.size());
  starts_.resize(count + 1, 0);
  for (int64_t f = 0; f < count; ++f) {
    const FeatureIds& feature = features_[f];
    check_row_splits(feature.splits, feature.rows, feature.splits[feature.rows]);
    starts_[f + 1] = starts_[f] + feature.splits[feature.rows];
    rows_ += feature.rows;
  }
  if (starts_[count] > std::numeric_limits<int32_t>::max() || rows_ >= std::numeric_limits<int32_t>::max()) {
    fail("sharding_sparse_fids: a batch must have fewer than 2^31 ids and rows, got " + std::to_string(starts_[count]) +
         " ids and " + std::to_string(rows_) + " rows; cut it into smaller batches");
  }
  shard_ = scratch<uint32_t>(starts_[count]);
  place_ = scratch<uint32_t>(starts_[count]);
  counts_ = scratch<int64_t>(count * shards);
  const FloorMod shard_of(shards);  // ids are not negative, so this is the unsigned remainder
  each_of(count, starts_[count], [&](int64_t f) {
    const FeatureIds& feature = features_[f];
    const int64_t n = starts_[f + 1] - starts_[f];
    int64_t* counts = counts_.get() + f * shards_;
    std::fill_n(counts, shards_, 0);
    uint32_t *shard = shard_.get() + starts_[f], *place = place_.get() + starts_[f];
    for (int64_t i = 0; i < n; ++i) {
      if (feature.ids[i] < 0) {
        fail("sharding_sparse_fids: a v2 id must be >= 0, got " + std::to_string(feature.ids[i]));
      }
    }
    if (!unique) {
      for (int64_t i = 0; i < n; ++i) {
        shard[i] = static_cast<uint32_t>(shard_of(feature.ids[i]));
        place[i] = static_cast<uint32_t>(counts[shard[i]]++);
      }
      return;
    }
    const Distinct distinct = dedup(feature.ids, n, place, nullptr, false);
    auto shard_by_rank = scratch<uint32_t>(distinct.count), place_by_rank = scratch<uint32_t>(distinct.count);
    for (int64_t u = 0; u < distinct.count; ++u) {
      shard_by_rank[u] = static_cast<uint32_t>(shard_of(distinct.ids[u]));
      place_by_rank[u] = static_cast<uint32_t>(counts[shard_by_rank[u]]++);
    }
    for (int64_t i = 0; i < n; ++i) {
      shard[i] = shard_by_rank[place[i]];
      place[i] = place_by_rank[place[i]];
    }
  });
}

std::vector<int64_t> ShardFids::list_lengths() const {
  std::vector<int64_t> out(tables_ * shards_, 0);
  for (size_t f = 0; f < features_.size(); ++f) {
    for (int64_t p = 0; p < shards_; ++p) out[features_[f].table * shards_ + p] += counts_[f * shards_ + p];
  }
  return out;
}

std::vector<int64_t> ShardFids::list_floats() const {
  std::vector<int64_t> out(tables_ * shards_, 0);
  for (size_t f = 0; f < features_.size(); ++f) {
    for (int64_t p = 0; p < shards_; ++p) {
      int64_t& floats = out[features_[f].table * shards_ + p];
      floats += counts_[f * shards_ + p] * features_[f].width;
      if (floats >= int64_t{1} << 31) {
        fail("sharding_sparse_fids: the embeddings of one list must have at most 2^31 - 1 floats, got " +
             std::to_string(floats) + "; use more shards or a smaller batch");
      }
    }
  }
  return out;
}

void ShardFids::finish(int version, const std::vector<uintptr_t>& lists, const std::vector<uintptr_t>& list_splits,
                       int64_t* fid_offset, int32_t* feature_offset, int64_t* nfl_offset) const {
  const int64_t count = static_cast<int64_t>(features_.size());
  // Per feature: its rank in the table, and for each shard the ids and floats of the table's earlier features.
  std::vector<int64_t> rank(count), in_table(tables_, 0), row_at(count + 1, 0);
  auto id_base = scratch<int64_t>(count * shards_), float_base = scratch<int64_t>(count * shards_);
  std::vector<int64_t> ids(tables_ * shards_, 0), floats(tables_ * shards_, 0);
  for (uintptr_t splits : list_splits) *reinterpret_cast<int64_t*>(splits) = 0;
  for (int64_t f = 0; f < count; ++f) {
    const FeatureIds& feature = features_[f];
    rank[f] = in_table[feature.table]++;
    row_at[f + 1] = row_at[f] + feature.rows;
    nfl_offset[f] = row_at[f] | (feature.shared ? int64_t{1} << 31 : 0);
    for (int64_t p = 0; p < shards_; ++p) {
      const int64_t list = feature.table * shards_ + p, here = counts_[f * shards_ + p];
      id_base[f * shards_ + p] = ids[list];
      float_base[f * shards_ + p] = floats[list];
      ids[list] += here;
      floats[list] += here * feature.width;
      if (!list_splits.empty()) reinterpret_cast<int64_t*>(list_splits[list])[rank[f] + 1] = ids[list];
    }
  }
  nfl_offset[count] = rows_ + 1;
  feature_offset[rows_] = static_cast<int32_t>(starts_[count]);
  std::vector<int64_t> first_block(tables_ + 1, 0);  // version 2 has one block per (table, shard, feature)
  for (int64_t t = 0; t < tables_; ++t)
    first_block[t + 1] = first_block[t] + std::max<int64_t>(in_table[t], 1) * shards_;

  each_of(count, starts_[count], [&](int64_t f) {
    const FeatureIds& feature = features_[f];
    for (int64_t r = 0; r < feature.rows; ++r) {
      feature_offset[row_at[f] + r] = static_cast<int32_t>(starts_[f] + feature.splits[r]);
    }
    for (int64_t i = starts_[f]; i < starts_[f + 1]; ++i) {
      const int64_t p = shard_[i], k = place_[i], list = feature.table * shards_ + p;
      const int64_t at = id_base[f * shards_ + p] + k;
      reinterpret_cast<int64_t*>(lists[list])[at] = feature.ids[i - starts_[f]];
      int64_t index1 = list, index2 = float_base[f * shards_ + p] + k * feature.width;
      if (version == 1) index2 = at;
      if (version == 2) {
        index1 = first_block[feature.table] + p * in_table[feature.table] + rank[f];
        index2 = k;
      }
      fid_offset[i] = index1 << 32 | index2;
    }
  });
}

}  // namespace shoal::ops
