// Products of rows with a constant matrix, which is packed once and used by every batch.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "core/isa.h"

namespace shoal {

// A matrix [k, n] in panels of columns, as this CPU's kernels read it; a narrow one column by column.
struct PackedMatrix {
  static PackedMatrix empty(int64_t k, int64_t n);
  // Element (i, j) is values[i * row + j * column].
  void pack(const float* values, int64_t row, int64_t column);
  int64_t k = 0, n = 0, width = 1;
  bool narrow = false;
  std::unique_ptr<float[], decltype(&std::free)> panels{nullptr, &std::free};
};

// out[i, j] = sum of a[i, :] * matrix[:, j] + plus[i * ldp + j], or without `plus` if null (ldp 0: one row for all).
struct Product {
  const float* a;
  int64_t lda, m;
  const float* plus;
  int64_t ldp;
  float* out;
  int64_t ldo;
};
void multiply(const Product& product, const PackedMatrix& matrix);

constexpr int64_t kNarrow = 4;  // columns that are not worth a panel

SHOAL_PER_ISA(int64_t panel_width();
              void multiply_panels(const Product& product, int64_t k, int64_t n, const float* panels);
              void multiply_columns(const Product& product, int64_t k, int64_t n, const float* columns);)

}  // namespace shoal
