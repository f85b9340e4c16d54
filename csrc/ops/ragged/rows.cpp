#include "ops/ragged/rows.h"

#include <algorithm>

#include "ops/common.h"

namespace shoal::ops {

void gather_rows(const char* src, int64_t src_rows, int64_t row_bytes, const int64_t* index, int64_t n, char* dst,
                 const char* what) {
  advise_huge(dst, n * row_bytes);
  with_row_copy(row_bytes, [&](auto copy) {
    parallel_for(n, rows_per_piece(row_bytes), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        int64_t ahead = index[std::min(i + 8, end - 1)];
        if (!outside(ahead, src_rows)) __builtin_prefetch(src + ahead * row_bytes);
        if (outside(index[i], src_rows)) fail_range(what, index[i], i, src_rows);
        copy(dst + i * row_bytes, src + index[i] * row_bytes);
      }
    });
  });
}

}  // namespace shoal::ops
