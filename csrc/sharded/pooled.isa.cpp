#include "sharded/pooled.h"

#include <algorithm>
#include <cmath>

namespace shoal::SHOAL_ISA {
namespace {

constexpr int64_t kAhead = 12;  // rows whose cache lines are on their way

// out[0..W) = scale * the sum of the rows; W is known, so the sums stay in registers.
template <int W, bool kWeighted>
inline void sum_columns(const float* flat, const int32_t* at, const float* weights, int64_t n, float scale,
                        float* out) {
  float sum[W] = {};
  for (int64_t i = 0; i < n; ++i) {
    if (at[i] < 0) continue;
    const float* row = flat + at[i];
    const float w = kWeighted ? weights[i] : 1.0f;
    for (int c = 0; c < W; ++c) sum[c] += kWeighted ? w * row[c] : row[c];
  }
  for (int c = 0; c < W; ++c) out[c] = sum[c] * scale;
}

template <bool kWeighted>
inline void sum_rows(const float* flat, const int32_t* at, const float* weights, int64_t n, int64_t dim, float scale,
                     float* out) {
  int64_t c = 0;
  for (; c + 64 <= dim; c += 64) sum_columns<64, kWeighted>(flat + c, at, weights, n, scale, out + c);
  if (dim & 32) sum_columns<32, kWeighted>(flat + c, at, weights, n, scale, out + c), c += 32;
  if (dim & 16) sum_columns<16, kWeighted>(flat + c, at, weights, n, scale, out + c), c += 16;
  if (dim & 8) sum_columns<8, kWeighted>(flat + c, at, weights, n, scale, out + c), c += 8;
  if (dim & 4) sum_columns<4, kWeighted>(flat + c, at, weights, n, scale, out + c), c += 4;
  if (dim & 2) sum_columns<2, kWeighted>(flat + c, at, weights, n, scale, out + c), c += 2;
  if (dim & 1) sum_columns<1, kWeighted>(flat + c, at, weights, n, scale, out + c);
}

inline void add_scaled(const float* from, int64_t n, float scale, float* to) {
  for (int64_t c = 0; c < n; ++c) to[c] += scale * from[c];
}

inline float scale_of(int32_t combiner, const int32_t* at, int64_t n) {
  if (combiner == 0) return 1.0f;
  int64_t kept = 0;
  for (int64_t i = 0; i < n; ++i) kept += at[i] >= 0;
  const float count = static_cast<float>(std::max<int64_t>(1, kept));
  return 1.0f / (combiner == 1 ? count : std::sqrt(count));
}

}  // namespace

void pool_some_at(const BagsAt& bags, int64_t begin, int64_t end, const float* flat, float* out) {
  for (int64_t bag = begin; bag < end; ++bag) {
    const int64_t feature = bag / bags.bags, first = bags.offsets[bag], n = bags.offsets[bag + 1] - first;
    const int32_t* at = bags.at + first;
    for (int64_t i = first + n; i < std::min(bags.ids, first + n + kAhead); ++i) {
      if (bags.at[i] >= 0) __builtin_prefetch(flat + bags.at[i]);
    }
    const float scale = scale_of(bags.combiners[feature], at, n);
    float* to = out + (bag - feature * bags.bags) * bags.width + bags.columns[feature];
    if (bags.weights) {
      sum_rows<true>(flat, at, bags.weights + first, n, bags.dim, scale, to);
    } else {
      sum_rows<false>(flat, at, nullptr, n, bags.dim, scale, to);
    }
  }
}

void add_some_pooled_at(const BagsAt& bags, int64_t low, int64_t high, const float* grad, float* flat) {
  const int64_t all = bags.features * bags.bags;
  for (int64_t bag = 0; bag < all; ++bag) {
    const int64_t feature = bag / bags.bags, first = bags.offsets[bag], n = bags.offsets[bag + 1] - first;
    if (n == 0) continue;
    const int32_t* at = bags.at + first;
    const float scale = scale_of(bags.combiners[feature], at, n);
    const float* from = grad + (bag - feature * bags.bags) * bags.width + bags.columns[feature];
    for (int64_t i = 0; i < n; ++i) {
      if (at[i] < low || at[i] >= high) continue;
      add_scaled(from, bags.dim, bags.weights ? scale * bags.weights[first + i] : scale, flat + at[i]);
    }
  }
}

}  // namespace shoal::SHOAL_ISA
