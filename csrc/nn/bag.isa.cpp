#include "nn/bag.h"

#include <algorithm>
#include <cmath>

namespace shoal::SHOAL_ISA {
namespace {

// Where the rows of a bag are: one behind the other, or each somewhere else, or (null) nowhere.
struct Dense {
  const float* rows;
  int64_t dim;
  static constexpr bool kAll = true;
  const float* operator[](int64_t i) const { return rows + i * dim; }
};
struct Scattered {
  const float* const* rows;
  static constexpr bool kAll = false;
  const float* operator[](int64_t i) const { return rows[i]; }
};

// Columns [c, c + W) of out = scale * (what is there, unless `fresh`, + the sum of n rows); W is known, so the sums
// stay in registers.
template <int W, bool kWeighted, class Rows>
inline void sum_columns(Rows rows, int64_t c, const float* weights, int64_t n, bool fresh, float scale, float* out) {
  float sum[W];
  for (int k = 0; k < W; ++k) sum[k] = fresh ? 0.0f : out[c + k];
  for (int64_t i = 0; i < n; ++i) {
    const float* row = rows[i];
    if (!Rows::kAll && !row) continue;
    const float w = kWeighted ? weights[i] : 1.0f;
    for (int k = 0; k < W; ++k) sum[k] += kWeighted ? w * row[c + k] : row[c + k];
  }
  for (int k = 0; k < W; ++k) out[c + k] = sum[k] * scale;
}

// kDim: the dim, or 0 for any.
template <int kDim, bool kWeighted, class Rows>
inline void sum_rows(Rows rows, const float* weights, int64_t n, int64_t dim, bool fresh, float scale, float* out) {
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
    sum_rows<kDim, kWeighted>(Scattered{rows + (here - first)}, kWeighted ? bags.weights + here : nullptr, some, dim,
                              here == begin, scale, out + at.bag * bags.step());
    here = upto;
    if (stop > end) return;
    at.kept = 0;
  }
}

// Element by element, the largest of n rows, and the first row that has it.
template <class Use>
inline void each_maximum(const float* rows, const float* weights, int64_t n, int64_t dim, Use use) {
  for (int64_t c = 0; c < dim; ++c) {
    int64_t best = 0;
    float most = n ? (weights ? weights[0] : 1.0f) * rows[c] : 0.0f;
    for (int64_t i = 1; i < n; ++i) {
      const float value = (weights ? weights[i] : 1.0f) * rows[i * dim + c];
      if (value > most || (value != value && most == most)) most = value, best = i;  // NaN wins, as in torch
    }
    use(c, most, best);
  }
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

void pool_bags(const Bags& bags, int64_t begin, int64_t end, const float* rows, float* out) {
  const int64_t dim = bags.dim;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t first = bags.offsets[b], n = bags.offsets[b + 1] - first;
    const float* from = rows + first * dim;
    const float* weights = bags.weights ? bags.weights + first : nullptr;
    float* to = out + b * bags.step();
    if (bags.pool == Pool::firstn) {
      const int64_t kept = std::min(n, bags.length);
      for (int64_t i = 0; i < kept; ++i) copy_scaled(from + i * dim, dim, weights ? weights[i] : 1.0f, to + i * dim);
      std::fill(to + kept * dim, to + bags.length * dim, 0.0f);
      continue;
    }
    if (bags.pool == Pool::max) {
      each_maximum(from, weights, n, dim, [&](int64_t c, float most, int64_t) { to[c] = most; });
      continue;
    }
    const float scale = scale_of(bags.pool, n);
    if (weights) {
      sum_rows<0, true>(Dense{from, dim}, weights, n, dim, true, scale, to);
    } else {
      sum_rows<0, false>(Dense{from, dim}, weights, n, dim, true, scale, to);
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
    const float scale = scale_of(bags.pool, n);
    const float* from = grad + b * bags.step();
    if (bags.pool == Pool::max) {
      if (grad_rows) std::fill(grad_rows + first * dim, grad_rows + (first + n) * dim, 0.0f);
      if (grad_weights) std::fill(grad_weights + first, grad_weights + first + n, 0.0f);
      if (!n) continue;
      const float* weights = bags.weights ? bags.weights + first : nullptr;
      each_maximum(rows + first * dim, weights, n, dim, [&](int64_t c, float, int64_t best) {
        if (grad_rows) grad_rows[(first + best) * dim + c] = from[c] * (weights ? weights[best] : 1.0f);
        if (grad_weights) grad_weights[first + best] += from[c] * rows[(first + best) * dim + c];
      });
      continue;
    }
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
