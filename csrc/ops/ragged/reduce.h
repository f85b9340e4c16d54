// Reductions of rows that share an index or a row-split segment, and their derivatives.
#pragma once
#include <cstdint>
#include <vector>

#include "ops/ragged/sum.h"

namespace shoal::ops {

// out[b] = reduction of the rows i with index[i * stride] == b, for b in [0, rows); zero for an empty group.
template <class T>
void reduce_by_index(const T* values, const int64_t* index, int64_t stride, int64_t n, int64_t d, int64_t rows,
                     Reduce how, T* out);
// out[i] = the gradient of values[i]; only sqrtn reads `values` and `norm` (the forward's result).
template <class T>
void reduce_by_index_gradient(const T* grad, const int64_t* index, int64_t stride, int64_t n, int64_t d, int64_t rows,
                              Reduce how, const T* values, const T* norm, T* out);

// Sums the rows of each segment, for several tables with the same number of segments. The columns of table t are cut
// into slices[t] and written to the next ones of `outs`, each [segments, slice].
struct SplitTable {
  uintptr_t rows;    // [n, d]
  uintptr_t splits;  // int64 [segments + 1]
  int64_t n, d;
  std::vector<int64_t> slices;
};
template <class T>
void reduce_and_split(const std::vector<SplitTable>& tables, int64_t segments, const std::vector<uintptr_t>& outs);
// The derivative: row r of segment b gets row b of the slices' upstream gradients `ins`, side by side.
template <class T>
void reduce_and_split_gradient(const std::vector<SplitTable>& tables, int64_t segments,
                               const std::vector<uintptr_t>& ins);
// out[b, t] = values[splits[b] + t] for t < min(length, limit), zero beyond; and its derivative.
template <class T>
void first_n(const T* values, const int64_t* splits, int64_t rows, int64_t n, int64_t d, int64_t limit, T* out);
template <class T>
void first_n_gradient(const T* grad, const int64_t* splits, int64_t rows, int64_t n, int64_t d, int64_t limit, T* out);

}  // namespace shoal::ops
