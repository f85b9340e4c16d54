#include "nn/pooling.h"

#include <algorithm>
#include <cmath>

namespace shoal::SHOAL_ISA {
namespace {

constexpr int64_t kAhead = 12;  // rows whose cache lines are on their way

// Rows of ids by their places in the buffer.
struct Placed {
  const float* flat;
  const int32_t* at;
  const float* operator()(int64_t i) const { return at[i] < 0 ? nullptr : flat + at[i]; }
  Placed from(int64_t column) const { return {flat + column, at}; }
};

// Rows of ids one after another, without padding.
struct InOrder {
  const float* flat;
  int64_t dim;
  const float* operator()(int64_t i) const { return flat + i * dim; }
  InOrder from(int64_t column) const { return {flat + column, dim}; }
};

// Rows of ids one after another, with padding.
struct Padded {
  const float* flat;
  int64_t dim, padding;
  const int64_t* keys;
  const float* operator()(int64_t i) const { return keys[i] == padding ? nullptr : flat + i * dim; }
  Padded from(int64_t column) const { return {flat + column, dim, padding, keys}; }
};

// out[0..W) = scale * the sum of the rows [first, end); W is known, so the sums stay in registers.
template <int W, bool kWeighted, class Rows>
inline void sum_columns(const Rows& rows, const float* weights, int64_t first, int64_t end, float scale, float* out) {
  float sum[W] = {};
  for (int64_t i = first; i < end; ++i) {
    const float* row = rows(i);
    if (!row) continue;
    const float w = kWeighted ? weights[i] : 1.0f;
    for (int c = 0; c < W; ++c) sum[c] += kWeighted ? w * row[c] : row[c];
  }
  for (int c = 0; c < W; ++c) out[c] = sum[c] * scale;
}

template <bool kWeighted, class Rows>
inline void sum_rows(const Rows& rows, const float* weights, int64_t first, int64_t end, int64_t dim, float scale,
                     float* out) {
  int64_t c = 0;
  auto some = [&]<int W>() { sum_columns<W, kWeighted>(rows.from(c), weights, first, end, scale, out + c), c += W; };
  while (c + 64 <= dim) some.template operator()<64>();
  if (dim & 32) some.template operator()<32>();
  if (dim & 16) some.template operator()<16>();
  if (dim & 8) some.template operator()<8>();
  if (dim & 4) some.template operator()<4>();
  if (dim & 2) some.template operator()<2>();
  if (dim & 1) some.template operator()<1>();
}

// The largest value of each column; NaN is larger than all others.
template <class Rows>
inline void max_rows(const Rows& rows, const float* weights, int64_t first, int64_t end, int64_t dim, float* out) {
  bool empty = true;
  for (int64_t i = first; i < end; ++i) {
    const float* row = rows(i);
    if (!row) continue;
    const float w = weights ? weights[i] : 1.0f;
    for (int64_t c = 0; c < dim; ++c) {
      const float value = weights ? w * row[c] : row[c];
      if (empty || value > out[c] || std::isnan(value)) out[c] = value;
    }
    empty = false;
  }
  if (empty) std::fill_n(out, dim, 0.0f);
}

template <class Rows>
inline void first_rows(const Rows& rows, const float* weights, int64_t first, int64_t end, int64_t dim, int64_t length,
                       float* out) {
  int64_t put = 0;
  for (int64_t i = first; i < end && put < length; ++i) {
    const float* row = rows(i);
    if (!row) continue;
    const float w = weights ? weights[i] : 1.0f;
    for (int64_t c = 0; c < dim; ++c) out[put * dim + c] = weights ? w * row[c] : row[c];
    ++put;
  }
  std::fill_n(out + put * dim, (length - put) * dim, 0.0f);
}

inline void add_scaled(const float* from, int64_t n, float scale, float* to) {
  for (int64_t c = 0; c < n; ++c) to[c] += scale * from[c];
}

template <class Rows>
inline float scale_of(Pool combiner, const Rows& rows, int64_t first, int64_t end) {
  if (combiner == Pool::sum) return 1.0f;
  int64_t kept = 0;
  for (int64_t i = first; i < end; ++i) kept += rows(i) != nullptr;
  const float count = static_cast<float>(std::max<int64_t>(1, kept));
  return 1.0f / (combiner == Pool::mean ? count : std::sqrt(count));
}

template <class Rows>
void pool_bags(const BagsAt& bags, const Rows& rows, int64_t begin, int64_t end, float* out) {
  for (int64_t bag = begin; bag < end; ++bag) {
    const int64_t feature = bag / bags.bags, first = bags.offsets[bag], stop = bags.offsets[bag + 1];
    for (int64_t i = stop; i < std::min(bags.ids, stop + kAhead); ++i) __builtin_prefetch(rows(i));
    float* to = out + (bag - feature * bags.bags) * bags.width + bags.columns[feature];
    const Pool pool = bags.combiners[feature];
    if (pool == Pool::max) {
      max_rows(rows, bags.weights, first, stop, bags.dim, to);
    } else if (pool == Pool::firstn) {
      first_rows(rows, bags.weights, first, stop, bags.dim, bags.lengths[feature], to);
    } else if (bags.weights) {
      sum_rows<true>(rows, bags.weights, first, stop, bags.dim, scale_of(pool, rows, first, stop), to);
    } else {
      sum_rows<false>(rows, nullptr, first, stop, bags.dim, scale_of(pool, rows, first, stop), to);
    }
  }
}

}  // namespace

void pool_some_at(const BagsAt& bags, int64_t begin, int64_t end, const float* flat, float* out) {
  if (!bags.in_order) return pool_bags(bags, Placed{flat, bags.at}, begin, end, out);
  if (!bags.padding) return pool_bags(bags, InOrder{flat, bags.dim}, begin, end, out);
  pool_bags(bags, Padded{flat, bags.dim, *bags.padding, bags.keys}, begin, end, out);
}

void add_some_pooled_at(const BagsAt& bags, int64_t low, int64_t high, const float* grad, float* flat) {
  const int64_t all = bags.features * bags.bags;
  const Placed rows{flat, bags.at};
  for (int64_t bag = 0; bag < all; ++bag) {
    const int64_t feature = bag / bags.bags, first = bags.offsets[bag], end = bags.offsets[bag + 1];
    if (first == end) continue;
    const float scale = scale_of(bags.combiners[feature], rows, first, end);
    const float* from = grad + (bag - feature * bags.bags) * bags.width + bags.columns[feature];
    for (int64_t i = first; i < end; ++i) {
      if (bags.at[i] < low || bags.at[i] >= high) continue;
      add_scaled(from, bags.dim, bags.weights ? scale * bags.weights[i] : scale, flat + bags.at[i]);
    }
  }
}

}  // namespace shoal::SHOAL_ISA
