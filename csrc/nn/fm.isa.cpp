#include "nn/fm.h"

namespace shoal::SHOAL_ISA {
namespace {

// Columns [c, c + W) of one sample: their sums, and the sum of squares over all of them.
template <int W>
inline void columns(const float* rows, int64_t features, int64_t dim, float* sums, float* squares) {
  float sum[W] = {}, square[W] = {};
  for (int64_t f = 0; f < features; ++f, rows += dim) {
    for (int c = 0; c < W; ++c) {
      sum[c] += rows[c];
      square[c] += rows[c] * rows[c];
    }
  }
  for (int c = 0; c < W; ++c) {
    sums[c] = sum[c];
    squares[c] = square[c];
  }
}

}  // namespace

void fm_part(const float* rows, int64_t begin, int64_t end, int64_t features, int64_t dim, float* sums, float* out) {
  for (int64_t i = begin; i < end; ++i) {
    const float* row = rows + i * features * dim;
    float* sum = sums + i * dim;
    float total = 0;
    for (int64_t c = 0; c < dim;) {
      float squares[16];
      int64_t width = 1;
      if (dim - c >= 16) {
        columns<16>(row + c, features, dim, sum + c, squares), width = 16;
      } else if (dim - c >= 4) {
        columns<4>(row + c, features, dim, sum + c, squares), width = 4;
      } else {
        columns<1>(row + c, features, dim, sum + c, squares);
      }
      for (int64_t k = c == 0; k < width; ++k) total += sum[c + k] * sum[c + k] - squares[k];
      c += width;
    }
    out[i] = (dim > 0 ? sum[0] : 0) + total / 2;
  }
}

void fm_gradient_part(const float* rows, const float* sums, const float* grad, const float* grad_flat, int64_t begin,
                      int64_t end, int64_t features, int64_t dim, float* grad_rows) {
  for (int64_t i = begin; i < end; ++i) {
    const float g = grad[i];
    const float* sum = sums + i * dim;
    for (int64_t f = 0; f < features; ++f) {
      const int64_t at = (i * features + f) * dim;
      const float* row = rows + at;
      float* out = grad_rows + at;
      if (grad_flat != nullptr) {
        const float* flat = grad_flat + at;
        for (int64_t c = 0; c < dim; ++c) out[c] = flat[c] + g * (sum[c] - row[c]);
        if (dim > 0) out[0] = flat[0] + g;
      } else {
        for (int64_t c = 0; c < dim; ++c) out[c] = g * (sum[c] - row[c]);
        if (dim > 0) out[0] = g;
      }
    }
  }
}

}  // namespace shoal::SHOAL_ISA
