#include "ops/shard/reorder.h"

#include <algorithm>
#include <limits>

#include "ops/common.h"
#include "ops/shard/shard.h"

namespace shoal::ops {

int64_t reorder_by_indices(const int64_t* keys, int64_t n, const int64_t* shard_ids, int64_t shards, int64_t* order,
                           int32_t* shard_sizes) {
  parallel_for(n, 1 << 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (outside(shard_ids[i], shards)) fail_range("reorder_by_indices: a shard id", shard_ids[i], i, shards);
    }
  });
  auto rank = scratch<uint32_t>(n);
  auto first = scratch<int64_t>(n);
  const int64_t count = dedup(keys, n, rank.get(), first.get(), true).count;
  std::vector<int64_t> next(shards + 1, 0);
  for (int64_t u = 0; u < count; ++u) ++next[shard_ids[first[u]]];
  int64_t total = 0;
  for (int64_t s = 0; s < shards; ++s) {
    if (next[s] > std::numeric_limits<int32_t>::max())
      fail("reorder_by_indices: a shard must have at most 2^31 - 1 ids, got " + std::to_string(next[s]));
    shard_sizes[s] = static_cast<int32_t>(next[s]);
    total += next[s];
    next[s] = total;  // one past the shard's last place, since it is filled from the back
  }
  for (int64_t u = 0; u < count; ++u) order[--next[shard_ids[first[u]]]] = first[u];
  return count;
}

FusedReorder::FusedReorder(std::vector<uintptr_t> inputs, std::vector<int64_t> lengths, int64_t shards, int64_t empty,
                           std::vector<int64_t> dims)
    : shards_(shards), dims_(std::move(dims)), lengths_(std::move(lengths)) {
  const int64_t tables = static_cast<int64_t>(inputs.size());
  starts_.resize(tables + 1, 0);
  for (int64_t m = 0; m < tables; ++m) starts_[m + 1] = starts_[m] + lengths_[m];
  rank_ = scratch<uint32_t>(starts_[tables]);
  std::vector<IdSpan> arrays(tables);
  for (int64_t m = 0; m < tables; ++m) {
    arrays[m] = {reinterpret_cast<const int64_t*>(inputs[m]), lengths_[m], rank_.get() + starts_[m], nullptr};
  }
  dedup_each(arrays, distinct_);

  counts_ = scratch<int64_t>(tables * shards);
  place_.resize(tables);
  shard_.resize(tables);
  const FloorMod shard_of(shards - empty);
  each_of(tables, starts_[tables], [&](int64_t m) {
    int64_t* count = counts_.get() + m * shards;
    std::fill_n(count, shards, 0);
    const Distinct& distinct = distinct_[m];
    place_[m] = scratch<uint32_t>(distinct.count);
    shard_[m] = scratch<uint32_t>(distinct.count);
    for (int64_t u = 0; u < distinct.count; ++u) {
      const int64_t s = shard_of(distinct.ids[u]) + empty;
      shard_[m][u] = static_cast<uint32_t>(s);
      place_[m][u] = static_cast<uint32_t>(count[s]++);
    }
  });
  int64_t width = 0;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  for (int64_t m = 0; m < tables; ++m) {
    size_ += distinct_[m].count;
    if (lengths_[m] > kMost || size_ > kMost)
      fail("fused_reorder_by_indices: there must be at most 2^31 - 1 ids, got " +
           std::to_string(std::max(lengths_[m], size_)));
    if (dims_[m] > 0 && distinct_[m].count > (kMost - width) / dims_[m]) {
      fail(
          "fused_reorder_by_indices: the embeddings must have at most 2^31 - 1 floats in all; spread the tables over "
          "more calls");
    }
    width += distinct_[m].count * dims_[m];
  }
}

void FusedReorder::finish(int64_t* output, int32_t* shard_sizes, int32_t* slot_sizes, int32_t* offsets) {
  const int64_t tables = static_cast<int64_t>(lengths_.size());
  auto id_base = scratch<int64_t>(tables * shards_);
  auto float_base = scratch<int64_t>(tables * shards_);
  int64_t ids = 0, floats = 0;
  for (int64_t s = 0; s < shards_; ++s) {
    const int64_t before = ids;
    for (int64_t m = 0; m < tables; ++m) {
      const int64_t count = counts_[m * shards_ + s];
      slot_sizes[s * tables + m] = static_cast<int32_t>(count);
      id_base[m * shards_ + s] = ids;
      float_base[m * shards_ + s] = floats;
      ids += count;
      floats += count * dims_[m];
    }
    shard_sizes[s] = static_cast<int32_t>(ids - before);
  }
  each_of(tables, starts_[tables], [&](int64_t m) {
    const Distinct& distinct = distinct_[m];
    const int64_t *ids_at = id_base.get() + m * shards_, *floats_at = float_base.get() + m * shards_;
    uint32_t* offset_of = place_[m].get();  // the float offset replaces the rank in the list
    for (int64_t u = 0; u < distinct.count; ++u) {
      const uint32_t s = shard_[m][u], place = offset_of[u];
      output[ids_at[s] + place] = distinct.ids[u];
      offset_of[u] = static_cast<uint32_t>(floats_at[s] + place * dims_[m]);
    }
    const uint32_t* rank = rank_.get() + starts_[m];
    int32_t* out = offsets + starts_[m];
    for (int64_t i = 0; i < lengths_[m]; ++i) out[i] = static_cast<int32_t>(offset_of[rank[i]]);
  });
}

}  // namespace shoal::ops
