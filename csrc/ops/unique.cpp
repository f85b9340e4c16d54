#include "ops/unique.h"

#include <algorithm>
#include <atomic>

#include "ops/common.h"
#include "ops/ragged/ragged.h"

namespace shoal::ops {

UniqueKeys::UniqueKeys(const int64_t* keys, const int64_t* splits, int64_t rows, std::vector<int64_t> dims)
    : splits_(splits), rows_(rows), dims_(std::move(dims)) {
  rank_ = scratch<uint32_t>(splits[rows]);
  std::vector<IdSpan> arrays(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t n = splits[r + 1] - splits[r];
    arrays[r] = {keys + splits[r], n, rank_.get() + splits[r], nullptr};
    int64_t width;
    if (__builtin_mul_overflow(n, dims_[r], &width) || __builtin_add_overflow(floats_, width, &floats_)) {
      fail("unique_key_with_value_and_offset: all values together must have at most 2^63 - 1 floats, got more");
    }
  }
  dedup_each(arrays, distinct_);
  for (const Distinct& d : distinct_) size_ += d.count;
}

void UniqueKeys::finish(int64_t* ids, int64_t* id_splits, int64_t* offset_splits, int64_t* offsets) const {
  std::vector<int64_t> float_base(rows_);
  id_splits[0] = 0;
  int64_t floats = 0;
  for (int64_t r = 0; r < rows_; ++r) {
    id_splits[r + 1] = id_splits[r] + distinct_[r].count;
    float_base[r] = floats;
    floats += (splits_[r + 1] - splits_[r]) * dims_[r];
  }
  offset_splits[0] = 0;
  // A stable counting sort of each row's elements by rank; offset_splits doubles as the write cursor, one place ahead.
  each_of(rows_, splits_[rows_], [&](int64_t r) {
    const int64_t n = splits_[r + 1] - splits_[r], count = distinct_[r].count;
    const uint32_t* rank = rank_.get() + splits_[r];
    std::copy_n(distinct_[r].ids.get(), count, ids + id_splits[r]);
    auto next = scratch<int64_t>(count);
    std::fill_n(next.get(), count, 0);
    for (int64_t i = 0; i < n; ++i) ++next[rank[i]];
    int64_t total = splits_[r];
    for (int64_t u = 0; u < count; ++u) {
      const int64_t here = next[u];
      next[u] = total;
      total += here;
      offset_splits[id_splits[r] + u + 1] = total;
    }
    for (int64_t i = 0; i < n; ++i) offsets[next[rank[i]]++] = float_base[r] + i * dims_[r];
  });
}

namespace {

// Calls body(q, float offset of q's vector, its width, its position) for all elements of pos.
template <class F>
void each_element(const OffsetMap& map, bool parallel, F&& body) {
  const int64_t n = map.pos_splits[map.rows];
  std::vector<int64_t> value_base(map.rows + 1, 0);
  for (int64_t r = 0; r < map.rows; ++r) {
    value_base[r + 1] = value_base[r] + (map.pos_splits[r + 1] - map.pos_splits[r]) * map.dims[r];
  }
  parallel_for(n, parallel ? 4096 : std::max<int64_t>(n, 1), [&](int64_t begin, int64_t end) {
    int64_t r = std::upper_bound(map.pos_splits, map.pos_splits + map.rows + 1, begin) - map.pos_splits - 1;
    for (int64_t i = begin; i < end; ++r) {
      const int64_t width = map.dims[r];
      for (int64_t stop = std::min(end, map.pos_splits[r + 1]); i < stop; ++i) {
        body(map.pos[i], value_base[r] + (i - map.pos_splits[r]) * width, width, i);
      }
    }
  });
}

// Returns the number of floats of all elements.
int64_t check_map(const OffsetMap& map, const char* op) {
  check_row_splits(map.pos_splits, map.rows, map.pos_splits[map.rows]);
  int64_t floats = 0;
  for (int64_t r = 0; r < map.rows; ++r) {
    if (map.dims[r] < 0) fail(std::string(op) + ": dims must be >= 0, got " + std::to_string(map.dims[r]));
    floats += (map.pos_splits[r + 1] - map.pos_splits[r]) * map.dims[r];
  }
  return floats;
}

void check_element(const OffsetMap& map, const char* op, int64_t q, int64_t at) {
  if (outside(q, map.keys)) fail_range((std::string(op) + ": an element of pos").c_str(), q, at, map.keys);
  if (map.splits[q] < 0 || map.splits[q] > map.splits[q + 1] || map.splits[q + 1] > map.offset_count) {
    fail(std::string(op) + ": the offsets of unique key " + std::to_string(q) + " must be within 0.." +
         std::to_string(map.offset_count) + ", got " + std::to_string(map.splits[q]) + ".." +
         std::to_string(map.splits[q + 1]));
  }
}

void check_offset(const char* op, int64_t offset, int64_t width, int64_t floats) {
  if (offset < 0 || width > floats - offset) {
    fail(std::string(op) + ": offset " + std::to_string(offset) + " + width " + std::to_string(width) +
         " is outside the buffer of " + std::to_string(floats) + " floats");
  }
}

}  // namespace

void fill_with_offset_map(const OffsetMap& map, const float* value, int64_t value_size, float* buffer, int64_t floats,
                          bool disjoint) {
  constexpr const char* op = "fill_with_offset_map";
  if (const int64_t needed = check_map(map, op); needed != value_size) {
    fail(std::string(op) + ": pos and dims ask for " + std::to_string(needed) + " floats, but value has " +
         std::to_string(value_size));
  }
  // Everything is checked before anything is written. If a key occurs twice, elements are written in order, so that the
  // last one wins.
  std::atomic<bool> repeated{!disjoint};
  auto seen = std::make_unique<std::atomic<uint64_t>[]>(static_cast<size_t>(map.keys / 64 + 1));
  each_element(map, true, [&](int64_t q, int64_t, int64_t width, int64_t at) {
    check_element(map, op, q, at);
    for (int64_t k = map.splits[q]; k < map.splits[q + 1]; ++k) check_offset(op, map.offsets[k], width, floats);
    const uint64_t bit = uint64_t{1} << (q & 63);
    if (!disjoint) return;
    if (seen[q >> 6].fetch_or(bit, std::memory_order_relaxed) & bit) repeated.store(true, std::memory_order_relaxed);
  });
  const int64_t n = map.pos_splits[map.rows];
  each_element(map, !repeated.load(), [&](int64_t q, int64_t from, int64_t width, int64_t at) {
    const int64_t ahead = map.splits[map.pos[std::min(at + 8, n - 1)]];
    if (ahead < map.offset_count) __builtin_prefetch(buffer + map.offsets[ahead], 1);
    for (int64_t k = map.splits[q]; k < map.splits[q + 1]; ++k) {
      std::memcpy(buffer + map.offsets[k], value + from, static_cast<size_t>(width) * sizeof(float));
    }
  });
}

void fill_with_offset_map_gradient(const OffsetMap& map, const float* grad, int64_t floats, float* out,
                                   int64_t out_size) {
  constexpr const char* op = "fill_with_offset_map_gradient";
  if (check_map(map, op) != out_size) fail(std::string(op) + ": pos and dims changed during the call");
  each_element(map, true, [&](int64_t q, int64_t to, int64_t width, int64_t at) {
    check_element(map, op, q, at);
    std::fill_n(out + to, width, 0.f);
    for (int64_t k = map.splits[q]; k < map.splits[q + 1]; ++k) {
      check_offset(op, map.offsets[k], width, floats);
      const float* from = grad + map.offsets[k];
      for (int64_t c = 0; c < width; ++c) out[to + c] += from[c];
    }
  });
}

}  // namespace shoal::ops
