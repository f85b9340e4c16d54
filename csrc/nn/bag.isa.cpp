#include "nn/bag.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace shoal::SHOAL_ISA {
namespace {

// Columns [c, c + W) of out = scale * (what is there, unless `fresh`, + the sum of n rows). The sums are a vector of
// the compiler's: of an array GCC 12 keeps parts in memory.
template <int W, bool kWeighted>
inline void sum_columns(const float* const* rows, int64_t c, const float* weights, int64_t n, bool fresh, float scale,
                        float* out) {
  using Vector [[gnu::vector_size(4 * W)]] = float;
  Vector sum{}, row;
  if (!fresh) std::memcpy(&sum, out + c, sizeof sum);
  for (int64_t i = 0; i < n; ++i) {
    if (!rows[i]) continue;
    std::memcpy(&row, rows[i] + c, sizeof row);
    sum += kWeighted ? weights[i] * row : row;
  }
  sum *= scale;
  std::memcpy(out + c, &sum, sizeof sum);
}

// kDim: the dim, or 0 for any.
template <int kDim, bool kWeighted>
inline void sum_rows(const float* const* rows, const float* weights, int64_t n, int64_t dim, bool fresh, float scale,
                     float* out) {
  if (kDim) return sum_columns<kDim ? kDim : 1, kWeighted>(rows, 0, weights, n, fresh, scale, out);
  int64_t c = 0;
  for (; c + 64 <= dim; c += 64) sum_columns<64, kWeighted>(rows, c, weights, n, fresh, scale, out);
  if (dim & 32) sum_columns<32, kWeighted>(rows, c, weights, n, fresh, scale, out), c += 32;
  if (dim & 16) sum_columns<16, kWeighted>(rows, c, weights, n, fresh, scale, out), c += 16;
  if (dim & 8) sum_columns<8, kWeighted>(rows, c, weights, n, fresh, scale, out), c += 8;
  if (dim & 4) sum_columns<4, kWeighted>(rows, c, weights, n, fresh, scale, out), c += 4;
  if (dim & 2) sum_columns<2, kWeighted>(rows, c, weights, n, fresh, scale, out), c += 2;
  if (dim & 1) sum_columns<1, kWeighted>(rows, c, weights, n, fresh, scale, out);
}

// What the sum of n rows is multiplied by.
inline float scale_of(Pool pool, int64_t n) {
  if (pool == Pool::mean && n > 1) return 1.0f / static_cast<float>(n);
  if (pool == Pool::sqrtn && n > 1) return 1.0f / std::sqrt(static_cast<float>(n));
  return 1.0f;
}

template <int kDim, bool kWeighted>
void pool_scattered(const Bags& bags, BagCursor& at, int64_t first, int64_t n, const float* const* rows, float* out) {
  const int64_t dim = kDim ? kDim : bags.dim, end = first + n;
  const bool counts = bags.padded && bags.pool != Pool::sum;
  int64_t here = first;
  for (; at.bag < at.end; ++at.bag) {
    const int64_t begin = bags.offsets[at.bag], stop = bags.offsets[at.bag + 1];
    const int64_t upto = std::min(stop, end), some = upto - here;
    if (stop > end && some == 0) return;
    if (counts)
      for (int64_t i = here; i < upto; ++i) at.kept += rows[i - first] != nullptr;
    const float scale = stop > end ? 1.0f : scale_of(bags.pool, counts ? at.kept : stop - begin);
    sum_rows<kDim, kWeighted>(rows + (here - first), kWeighted ? bags.weights + here : nullptr, some, dim,
                              here == begin, scale, out + at.bag * bags.stride);
    here = upto;
    if (stop > end) return;
    at.kept = 0;
  }
}

}  // namespace

void pool_some(const Bags& bags, BagCursor& at, int64_t first, int64_t n, const float* const* rows, float* out) {
  auto run = [&]<bool kWeighted>() {
    switch (bags.dim) {
      case 8:
        return pool_scattered<8, kWeighted>(bags, at, first, n, rows, out);
      case 16:
        return pool_scattered<16, kWeighted>(bags, at, first, n, rows, out);
      case 32:
        return pool_scattered<32, kWeighted>(bags, at, first, n, rows, out);
      case 64:
        return pool_scattered<64, kWeighted>(bags, at, first, n, rows, out);
      default:
        return pool_scattered<0, kWeighted>(bags, at, first, n, rows, out);
    }
  };
  bags.weights ? run.template operator()<true>() : run.template operator()<false>();
}

void add_to(const float* from, int64_t n, float* to) {
  for (int64_t c = 0; c < n; ++c) to[c] += from[c];
}

}  // namespace shoal::SHOAL_ISA
