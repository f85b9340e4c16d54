#include "nn/net/gemm.h"

#include <algorithm>
#include <new>

namespace shoal {

PackedMatrix PackedMatrix::empty(int64_t k, int64_t n) {
  PackedMatrix made;
  made.k = k;
  made.n = n;
  made.narrow = n <= kNarrow;
  made.width = made.narrow ? 1 : SHOAL_DISPATCH(panel_width)();
  const int64_t columns = (n + made.width - 1) / made.width * made.width;
  const size_t bytes = (static_cast<size_t>(columns * k) * sizeof(float) + 127) / 64 * 64;
  made.panels.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
  if (!made.panels) throw std::bad_alloc();
  return made;
}

void PackedMatrix::pack(const float* values, int64_t row, int64_t column) {
  float* to = panels.get();
  for (int64_t first = 0; first < n; first += width) {
    const int64_t columns = std::min(width, n - first);
    const float* from = values + first * column;
    for (int64_t i = 0; i < k; ++i, from += row, to += width) {
      for (int64_t c = 0; c < columns; ++c) to[c] = from[c * column];
      for (int64_t c = columns; c < width; ++c) to[c] = 0.0f;
    }
  }
}

void multiply(const Product& product, const PackedMatrix& matrix) {
  if (matrix.narrow) {
    SHOAL_DISPATCH(multiply_columns)(product, matrix.k, matrix.n, matrix.panels.get());
  } else {
    SHOAL_DISPATCH(multiply_panels)(product, matrix.k, matrix.n, matrix.panels.get());
  }
}

}  // namespace shoal
