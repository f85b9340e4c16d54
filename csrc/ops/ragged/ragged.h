// Row splits: checking, expanding to row ids, joining.
#pragma once
#include <cstdint>

namespace shoal::ops {

// Throws std::invalid_argument unless splits[0] = 0, splits[rows] = length, and splits never fall.
void check_row_splits(const int64_t* splits, int64_t rows, int64_t length);
// Its two halves, for kernels that check one piece at a time: the ends, and that entries begin..end never fall and are
// within [0, length].
void check_row_ends(const int64_t* splits, int64_t rows, int64_t length);
void check_rising(const int64_t* splits, int64_t begin, int64_t end, int64_t length);
// out[p] = the row that holds flat position p.
void row_ids(const int64_t* splits, int64_t rows, int64_t length, int64_t* out);
// Joins the row splits of k ragged tensors, which are concatenated in row_split; out has n + 1 - k entries.
void normalize_merged_split(const int64_t* row_split, int64_t n, const int64_t* sizes, int64_t k, int64_t* out);

}  // namespace shoal::ops
