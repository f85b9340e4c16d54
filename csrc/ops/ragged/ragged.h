// Row splits: checking, expanding to row ids, gluing.
#pragma once
#include <cstdint>

namespace shoal::ops {

// Throws unless splits[0] = 0, splits[rows] = length and nothing falls.
void check_row_splits(const int64_t* splits, int64_t rows, int64_t length);
// Its two halves, for kernels that check a piece when they come to it: the ends, and that entries begin..end rise
// within [0, length].
void check_row_ends(const int64_t* splits, int64_t rows, int64_t length);
void check_rising(const int64_t* splits, int64_t begin, int64_t end, int64_t length);
// out[p] = the row that holds flat position p.
void row_ids(const int64_t* splits, int64_t rows, int64_t length, int64_t* out);
// Row splits of several ragged tensors glued end to end; out has n + 1 - k entries.
void normalize_merged_split(const int64_t* row_split, int64_t n, const int64_t* sizes, int64_t k, int64_t* out);

}  // namespace shoal::ops
