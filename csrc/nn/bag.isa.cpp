#include "nn/bag.h"

#include <algorithm>

namespace shoal::SHOAL_ISA {
namespace {

// out[0..W) = scale * the sum of n rows; W is known, so the sums stay in registers.
template <int W, bool kWeighted>
inline void sum_columns(const float* rows, const float* weights, int64_t n, int64_t dim, float scale, float* out) {
  float sum[W] = {};
  for (int64_t i = 0; i < n; ++i, rows += dim) {
    const float w = kWeighted ? weights[i] : 1.0f;
    for (int c = 0; c < W; ++c) sum[c] += kWeighted ? w * rows[c] : rows[c];
  }
  for (int c = 0; c < W; ++c) out[c] = sum[c] * scale;
}

template <bool kWeighted>
inline void sum_rows(const float* rows, const float* weights, int64_t n, int64_t dim, float scale, float* out) {
  int64_t c = 0;
  for (; c + 64 <= dim; c += 64) sum_columns<64, kWeighted>(rows + c, weights, n, dim, scale, out + c);
  if (dim & 32) sum_columns<32, kWeighted>(rows + c, weights, n, dim, scale, out + c), c += 32;
  if (dim & 16) sum_columns<16, kWeighted>(rows + c, weights, n, dim, scale, out + c), c += 16;
  if (dim & 8) sum_columns<8, kWeighted>(rows + c, weights, n, dim, scale, out + c), c += 8;
  if (dim & 4) sum_columns<4, kWeighted>(rows + c, weights, n, dim, scale, out + c), c += 4;
  if (dim & 2) sum_columns<2, kWeighted>(rows + c, weights, n, dim, scale, out + c), c += 2;
  if (dim & 1) sum_columns<1, kWeighted>(rows + c, weights, n, dim, scale, out + c);
}

inline void copy_scaled(const float* from, int64_t n, float scale, float* to) {
  for (int64_t c = 0; c < n; ++c) to[c] = scale * from[c];
}

inline float dot(const float* a, const float* b, int64_t n) {
  float sum[16] = {};
  int64_t c = 0;
  for (; c + 16 <= n; c += 16)
    for (int k = 0; k < 16; ++k) sum[k] += a[c + k] * b[c + k];
  float total = 0;
  for (; c < n; ++c) total += a[c] * b[c];
  for (int k = 0; k < 16; ++k) total += sum[k];
  return total;
}

}  // namespace

void pool_bags(const Bags& bags, int64_t begin, int64_t end, const float* rows, float* out) {
  const int64_t dim = bags.dim;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t first = bags.offsets[b], n = bags.offsets[b + 1] - first;
    const float* from = rows + first * dim;
    const float* weights = bags.weights ? bags.weights + first : nullptr;
    float* to = out + b * bags.width();
    if (bags.pool == Pool::firstn) {
      const int64_t kept = std::min(n, bags.length);
      for (int64_t i = 0; i < kept; ++i) copy_scaled(from + i * dim, dim, weights ? weights[i] : 1.0f, to + i * dim);
      std::fill(to + kept * dim, to + bags.length * dim, 0.0f);
      continue;
    }
    const float scale = bags.pool == Pool::mean && n ? 1.0f / static_cast<float>(n) : 1.0f;
    if (weights) {
      sum_rows<true>(from, weights, n, dim, scale, to);
    } else {
      sum_rows<false>(from, weights, n, dim, scale, to);
    }
  }
}

void pool_bags_gradient(const Bags& bags, int64_t begin, int64_t end, const float* grad, const float* rows,
                        float* grad_rows, float* grad_weights) {
  const int64_t dim = bags.dim;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t first = bags.offsets[b], n = bags.offsets[b + 1] - first;
    const int64_t kept = bags.pool == Pool::firstn ? std::min(n, bags.length) : n;
    const int64_t step = bags.pool == Pool::firstn ? dim : 0;  // from one row's gradient to the next one's
    const float scale = bags.pool == Pool::mean ? 1.0f / static_cast<float>(std::max<int64_t>(n, 1)) : 1.0f;
    const float* from = grad + b * bags.width();
    for (int64_t i = 0; i < kept; ++i, from += step) {
      const int64_t row = first + i;
      if (grad_rows) copy_scaled(from, dim, scale * (bags.weights ? bags.weights[row] : 1.0f), grad_rows + row * dim);
      if (grad_weights) grad_weights[row] = scale * dot(from, rows + row * dim, dim);
    }
    if (grad_rows) std::fill(grad_rows + (first + kept) * dim, grad_rows + (first + n) * dim, 0.0f);
    if (grad_weights) std::fill(grad_weights + first + kept, grad_weights + first + n, 0.0f);
  }
}

void add_to(const float* from, int64_t n, float* to) {
  for (int64_t c = 0; c < n; ++c) to[c] += from[c];
}

}  // namespace shoal::SHOAL_ISA
