#include "ops/ragged/ragged.h"

#include <algorithm>

#include "ops/common.h"

namespace shoal::ops {

void check_row_ends(const int64_t* splits, int64_t rows, int64_t length) {
  if (rows < 0) fail("row_splits must have at least one element, got none");
  if (splits[0] != 0) fail("row_splits must start at 0, got " + std::to_string(splits[0]));
  if (splits[rows] != length) {
    fail("row_splits must end at the number of values, " + std::to_string(length) + ", got " +
         std::to_string(splits[rows]));
  }
}

void check_rising(const int64_t* splits, int64_t begin, int64_t end, int64_t length) {
  bool rising = splits[begin] >= 0 && splits[end] <= length;
  for (int64_t r = begin; r < end; ++r) rising &= splits[r + 1] >= splits[r];
  if (rising) return;
  for (int64_t r = begin; r < end; ++r) {
    if (splits[r + 1] < splits[r] || splits[r + 1] > length) {
      fail("row_splits must never fall, but entry " + std::to_string(r + 1) + " is " + std::to_string(splits[r + 1]) +
           " after " + std::to_string(splits[r]));
    }
  }
  fail("row_splits must never fall, but entry " + std::to_string(begin) + " is " + std::to_string(splits[begin]));
}

void check_row_splits(const int64_t* splits, int64_t rows, int64_t length) {
  check_row_ends(splits, rows, length);
  parallel_for(rows, 1 << 16, [&](int64_t begin, int64_t end) { check_rising(splits, begin, end, length); });
}

void row_ids(const int64_t* splits, int64_t rows, int64_t length, int64_t* out) {
  check_row_splits(splits, rows, length);
  parallel_for(length, 1 << 16, [&](int64_t begin, int64_t end) {
    int64_t row = std::upper_bound(splits, splits + rows + 1, begin) - splits - 1;
    for (int64_t p = begin; p < end; ++row) {
      int64_t stop = std::min(end, splits[row + 1]);
      std::fill(out + p, out + stop, row);
      p = stop;
    }
  });
}

void normalize_merged_split(const int64_t* row_split, int64_t n, const int64_t* sizes, int64_t k, int64_t* out) {
  if (k < 1) fail("normalize_merged_split: row_split_size must have at least one entry, got none");
  int64_t left = n;
  for (int64_t i = 0; i < k; ++i) {
    if (sizes[i] < 1) {
      fail("normalize_merged_split: a row split must have at least one entry, but row_split_size[" + std::to_string(i) +
           "] is " + std::to_string(sizes[i]));
    }
    if (sizes[i] > left) {
      fail("normalize_merged_split: row_split_size must add up to the " + std::to_string(n) +
           " entries of row_split, got more");
    }
    left -= sizes[i];
  }
  if (left != 0) {
    fail("normalize_merged_split: row_split_size must add up to the " + std::to_string(n) +
         " entries of row_split, got " + std::to_string(n - left));
  }
  int64_t base = 0;
  const int64_t* in = row_split;
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = i > 0; j < sizes[i]; ++j) *out++ = in[j] + base;
    in += sizes[i];
    base += in[-1];
  }
}

}  // namespace shoal::ops
