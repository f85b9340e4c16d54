// Distinct keys of each row of a ragged tensor, and a flat buffer with a value for each occurrence of a key.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "ops/id_index.h"

namespace shoal::ops {

class UniqueKeys {
 public:
  UniqueKeys(const int64_t* keys, const int64_t* splits, int64_t rows, std::vector<int64_t> dims);
  int64_t size() const { return size_; }      // distinct keys of all rows
  int64_t floats() const { return floats_; }  // length of the flat buffer
  // ids [size], id_splits [rows + 1], offset_splits [size + 1], offsets [keys]
  void finish(int64_t* ids, int64_t* id_splits, int64_t* offset_splits, int64_t* offsets) const;

 private:
  const int64_t* splits_;
  int64_t rows_, size_ = 0, floats_ = 0;
  std::vector<int64_t> dims_;
  std::unique_ptr<uint32_t[]> rank_;
  std::vector<Distinct> distinct_;
};

// Elements of a ragged `pos` that name unique keys, with the offsets of each key.
struct OffsetMap {
  const int64_t* pos;
  const int64_t* pos_splits;
  const int64_t* dims;
  int64_t rows;
  const int64_t* splits;  // [keys + 1]
  const int64_t* offsets;
  int64_t keys, offset_count;
};
// Copies each element's vector to all its offsets. `disjoint` says that offsets do not overlap.
void fill_with_offset_map(const OffsetMap& map, const float* value, int64_t value_size, float* buffer, int64_t floats,
                          bool disjoint);
// Sums the slices at each element's offsets.
void fill_with_offset_map_gradient(const OffsetMap& map, const float* grad, int64_t floats, float* out,
                                   int64_t out_size);

}  // namespace shoal::ops
