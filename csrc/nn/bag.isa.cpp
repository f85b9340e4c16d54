#include "nn/bag.h"

#include <algorithm>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace shoal::SHOAL_ISA {
namespace {

// Floats of the widest register. GCC 12 keeps wider vectors, and arrays of vectors, in memory.
#if defined(__AVX512F__)
constexpr int kRegister = 16;
#elif defined(__AVX2__)
constexpr int kRegister = 8;
#else
constexpr int kRegister = 4;
#endif

// W columns of a row, in registers.
template <int W>
struct Columns {
  static constexpr int kFirst = W < kRegister ? W : kRegister;
  using Vector [[gnu::vector_size(4 * kFirst)]] = float;
  Vector first;
  Columns<W - kFirst> rest;

  static Columns zeros() { return {Vector{}, Columns<W - kFirst>::zeros()}; }
  static Columns of(const float* from) {
    Columns made;
    std::memcpy(&made.first, from, sizeof first);
    made.rest = Columns<W - kFirst>::of(from + kFirst);
    return made;
  }
  void to(float* out) const {
    std::memcpy(out, &first, sizeof first);
    rest.to(out + kFirst);
  }
  void operator*=(float factor) {
    first *= factor;
    rest *= factor;
  }
  void add(const Columns& other) {
    first += other.first;
    rest.add(other.rest);
  }
  void add(const Columns& other, float factor) {
    first += factor * other.first;
    rest.add(other.rest, factor);
  }
  void raise(const Columns& other) {  // NaN is larger than all others
    first = (other.first > first) | (other.first != other.first) ? other.first : first;
    rest.raise(other.rest);
  }
};
template <>
struct Columns<0> {
  static Columns zeros() { return {}; }
  static Columns of(const float*) { return {}; }
  void to(float*) const {}
  void operator*=(float) {}
  void add(const Columns&) {}
  void add(const Columns&, float) {}
  void raise(const Columns&) {}
};

// Calls some.operator()<W>(c) for columns [c, c + W), up to `dim`. kDim: the dim, or 0 for any.
template <int kDim, class Some>
inline void in_columns(int64_t dim, Some some) {
  if (kDim) return some.template operator()<kDim ? kDim : 1>(0);
  int64_t c = 0;
  for (; c + 64 <= dim; c += 64) some.template operator()<64>(c);
  if (dim & 32) some.template operator()<32>(c), c += 32;
  if (dim & 16) some.template operator()<16>(c), c += 16;
  if (dim & 8) some.template operator()<8>(c), c += 8;
  if (dim & 4) some.template operator()<4>(c), c += 4;
  if (dim & 2) some.template operator()<2>(c), c += 2;
  if (dim & 1) some.template operator()<1>(c);
}

// Columns [c, c + W) of out = scale * (out, unless `fresh`, + the sum of n rows).
template <int W, bool kWeighted>
inline void sum_columns(const float* const* rows, int64_t c, const float* weights, int64_t n, bool fresh, float scale,
                        float* out) {
  auto sum = fresh ? Columns<W>::zeros() : Columns<W>::of(out + c);
  for (int64_t i = 0; i < n; ++i) {
    if (!rows[i]) continue;
    const auto row = Columns<W>::of(rows[i] + c);
    if (kWeighted) {
      sum.add(row, weights[i]);
    } else {
      sum.add(row);
    }
  }
  sum *= scale;
  sum.to(out + c);
}

// Columns [c, c + W) of out = the maximum of out, unless `fresh`, and of the n rows that are not null.
template <int W, bool kWeighted>
inline void max_columns(const float* const* rows, int64_t c, const float* weights, int64_t n, bool fresh, float* out) {
  auto best = fresh ? Columns<W>::zeros() : Columns<W>::of(out + c);
  for (int64_t i = 0; i < n; ++i) {
    if (!rows[i]) continue;
    auto row = Columns<W>::of(rows[i] + c);
    if (kWeighted) row *= weights[i];
    if (fresh) {
      best = row;
    } else {
      best.raise(row);
    }
    fresh = false;
  }
  best.to(out + c);
}

// Which of up to 8 columns of factor * row equal those of best.
template <bool kWeighted>
inline uint8_t equal_bits(const float* row, float factor, const float* best, int64_t columns) {
#if defined(__AVX2__)
  if (columns == 8) {
    __m256 values = _mm256_loadu_ps(row);
    if (kWeighted) values = _mm256_mul_ps(values, _mm256_set1_ps(factor));
    return static_cast<uint8_t>(_mm256_movemask_ps(_mm256_cmp_ps(values, _mm256_loadu_ps(best), _CMP_EQ_OQ)));
  }
#endif
  uint32_t bits = 0;
  for (int64_t c = 0; c < columns; ++c)
    bits |= static_cast<uint32_t>((kWeighted ? row[c] * factor : row[c]) == best[c]) << c;
  return static_cast<uint8_t>(bits);
}

// Marks the columns in which rows equal `best`.
template <bool kWeighted>
inline void mark_rows(const float* const* rows, const float* weights, int64_t n, int64_t dim, const float* best,
                      uint8_t* marks) {
  for (int64_t i = 0; i < n; ++i) {
    uint8_t* to = marks + i * mark_bytes(dim);
    if (!rows[i]) continue;
    for (int64_t c = 0; c < dim; c += 8)
      *to++ =
          equal_bits<kWeighted>(rows[i] + c, kWeighted ? weights[i] : 1.0f, best + c, std::min<int64_t>(8, dim - c));
  }
}

// Removes the marks that rows got before the maximum of their column was raised.
void unmark_rows(const int64_t* raised, int64_t begin, int64_t dim, uint8_t* marks) {
  int64_t bytes = mark_bytes(dim), last = begin;
  for (int64_t c = 0; c < dim; ++c) last = std::max(last, raised[c]);
  for (int64_t i = begin; i < last; ++i)
    for (int64_t c = 0; c < dim; ++c)
      if (i < raised[c]) marks[i * bytes + (c >> 3)] &= static_cast<uint8_t>(~(1 << (c & 7)));
}

// Rows [here, upto) of the bag at the cursor, which are `rows`; `to` is its output.
struct Stretch {
  int64_t begin, here, upto, stop;  // the bag is [begin, stop)
  const float* const* rows;
  float* to;
  bool begins() const { return here == begin; }
  bool ends() const { return upto == stop; }
  int64_t size() const { return upto - here; }
};

template <int kDim, bool kWeighted>
inline void sum_stretch(const Bags& bags, BagCursor& at, const Stretch& some) {
  const bool counts = bags.padded && bags.pool != Pool::sum;
  if (counts)
    for (int64_t i = 0; i < some.size(); ++i) at.kept += some.rows[i] != nullptr;
  const float scale = some.ends() ? pool_scale(bags.pool, counts ? at.kept : some.stop - some.begin) : 1.0f;
  const float* weights = kWeighted ? bags.weights + some.here : nullptr;
  in_columns<kDim>(bags.dim, [&]<int W>(int64_t c) {
    sum_columns<W, kWeighted>(some.rows, c, weights, some.size(), some.begins(), scale, some.to);
  });
}

template <int kDim, bool kWeighted>
inline void max_stretch(const Bags& bags, BagCursor& at, const Stretch& some) {
  const float* weights = kWeighted ? bags.weights + some.here : nullptr;
  const bool fresh = at.kept == 0, whole = some.begins() && some.ends();
  const bool raises = bags.marks && !whole && !fresh;
  for (int64_t i = 0; i < some.size(); ++i) at.kept += some.rows[i] != nullptr;
  if (raises) std::memcpy(at.before, some.to, 4 * static_cast<size_t>(bags.dim));
  in_columns<kDim>(bags.dim, [&]<int W>(int64_t c) {
    max_columns<W, kWeighted>(some.rows, c, weights, some.size(), fresh, some.to);
  });
  if (!bags.marks) return;
  mark_rows<kWeighted>(some.rows, weights, some.size(), bags.dim, some.to,
                       bags.marks + some.here * mark_bytes(bags.dim));
  if (whole) return;
  for (int64_t c = 0; c < bags.dim; ++c) {
    if (some.begins()) at.raised[c] = some.begin;
    if (raises && at.before[c] != some.to[c]) at.raised[c] = some.here;
  }
  if (some.ends()) unmark_rows(at.raised, some.begin, bags.dim, bags.marks);
}

template <bool kWeighted>
inline void first_stretch(const Bags& bags, BagCursor& at, const Stretch& some) {
  const int64_t dim = bags.dim;
  for (int64_t i = 0; i < some.size() && at.kept < bags.length; ++i) {
    if (!some.rows[i]) continue;
    float* to = some.to + dim * at.kept++;
    if (kWeighted) {
      for (int64_t c = 0; c < dim; ++c) to[c] = bags.weights[some.here + i] * some.rows[i][c];
    } else {
      std::memcpy(to, some.rows[i], 4 * static_cast<size_t>(dim));
    }
  }
  if (some.ends()) std::fill_n(some.to + dim * at.kept, dim * (bags.length - at.kept), 0.0f);
}

template <int kDim, bool kWeighted>
void pool_scattered(const Bags& bags, BagCursor& at, int64_t first, int64_t n, const float* const* rows, float* out) {
  const int64_t end = first + n;
  int64_t here = first;
  for (; at.bag < at.end; ++at.bag) {
    const int64_t begin = bags.offsets[at.bag], stop = bags.offsets[at.bag + 1];
    const Stretch some{begin, here, std::min(stop, end), stop, rows + (here - first), out + at.bag * bags.stride};
    if (!some.ends() && some.size() == 0) return;
    if (bags.pool == Pool::max) {
      max_stretch<kDim, kWeighted>(bags, at, some);
    } else if (bags.pool == Pool::firstn) {
      first_stretch<kWeighted>(bags, at, some);
    } else {
      sum_stretch<kDim, kWeighted>(bags, at, some);
    }
    here = some.upto;
    if (!some.ends()) return;
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

}  // namespace shoal::SHOAL_ISA
