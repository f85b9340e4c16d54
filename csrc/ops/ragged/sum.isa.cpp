#include "ops/ragged/sum.h"

namespace shoal::SHOAL_ISA {
namespace {

// out[0..W) = sum of n rows; W is known, so the sums stay in registers.
template <int W, bool kSquares, class T>
inline void sum_tile(const T* rows, int64_t n, int64_t d, T* out) {
  T sum[W];
  for (int c = 0; c < W; ++c) sum[c] = 0;
  for (int64_t r = 0; r < n; ++r, rows += d) {
    for (int c = 0; c < W; ++c) sum[c] += kSquares ? rows[c] * rows[c] : rows[c];
  }
  for (int c = 0; c < W; ++c) out[c] = sum[c];
}

template <bool kSquares, class T>
inline void sum_rows(const T* rows, int64_t n, int64_t d, T* out) {
  if (d > 64) {  // read wide rows sequentially; the sums stay in the first-level cache
    T* __restrict sum = out;
    for (int64_t c = 0; c < d; ++c) sum[c] = 0;
    for (int64_t r = 0; r < n; ++r) {
      const T* __restrict row = rows + r * d;
      for (int64_t c = 0; c < d; ++c) sum[c] += kSquares ? row[c] * row[c] : row[c];
    }
    return;
  }
  int64_t c = 0;
  if (d & 64) sum_tile<64, kSquares>(rows + c, n, d, out + c), c += 64;
  if (d & 32) sum_tile<32, kSquares>(rows + c, n, d, out + c), c += 32;
  if (d & 16) sum_tile<16, kSquares>(rows + c, n, d, out + c), c += 16;
  if (d & 8) sum_tile<8, kSquares>(rows + c, n, d, out + c), c += 8;
  if (d & 4) sum_tile<4, kSquares>(rows + c, n, d, out + c), c += 4;
  if (d & 2) sum_tile<2, kSquares>(rows + c, n, d, out + c), c += 2;
  if (d & 1) sum_tile<1, kSquares>(rows + c, n, d, out + c);
}

template <class T>
inline void finish_row(T* out, int64_t count, int64_t d, Reduce how) {
  if (how == Reduce::mean) {
    const T scale = count ? T(1) / static_cast<T>(count) : T(0);
    for (int64_t c = 0; c < d; ++c) out[c] *= scale;
  } else if (how == Reduce::sqrtn) {
    for (int64_t c = 0; c < d; ++c) {
      if constexpr (sizeof(T) == 4) {
        out[c] = __builtin_sqrtf(out[c]);
      } else {
        out[c] = __builtin_sqrt(out[c]);
      }
    }
  }
}

template <class T>
inline void reduce_one(const T* rows, int64_t n, int64_t d, Reduce how, T* out) {
  if (how == Reduce::sqrtn) {
    sum_rows<true>(rows, n, d, out);
  } else {
    sum_rows<false>(rows, n, d, out);
  }
  if (how != Reduce::sum) finish_row(out, n, d, how);
}

template <class T>
inline void segment_sum_any(const T* rows, const int64_t* splits, int64_t begin, int64_t end, int64_t d, T* out) {
  if (d == 1) {
    const T* x = rows + splits[begin];
    for (int64_t b = begin; b < end; ++b) {
      T sum = 0;
      for (const T* stop = rows + splits[b + 1]; x < stop; ++x) sum += *x;
      out[b] = sum;
    }
    return;
  }
  for (int64_t b = begin; b < end; ++b) {
    sum_rows<false>(rows + splits[b] * d, splits[b + 1] - splits[b], d, out + b * d);
  }
}

template <class T>
inline void sorted_reduce_any(const T* rows, const int64_t* index, int64_t stride, int64_t begin, int64_t end,
                              int64_t d, Reduce how, int64_t row_begin, int64_t row_end, T* out) {
  int64_t next = row_begin;
  for (int64_t i = begin; i < end;) {
    const int64_t row = index[i * stride];
    int64_t j = i + 1;
    while (j < end && index[j * stride] == row) ++j;
    for (int64_t k = next * d; k < row * d; ++k) out[k] = 0;
    reduce_one(rows + i * d, j - i, d, how, out + row * d);
    next = row + 1;
    i = j;
  }
  for (int64_t k = next * d; k < row_end * d; ++k) out[k] = 0;
}

template <int W, class T>
inline void add_fixed(const T* row, T* to, int64_t, bool squares) {
  if (squares) {
    for (int c = 0; c < W; ++c) to[c] += row[c] * row[c];
  } else {
    for (int c = 0; c < W; ++c) to[c] += row[c];
  }
}

template <class T>
inline void add_any(const T* row, T* to, int64_t d, bool squares) {
  if (squares) {
    for (int64_t c = 0; c < d; ++c) to[c] += row[c] * row[c];
  } else {
    for (int64_t c = 0; c < d; ++c) to[c] += row[c];
  }
}

// How many rows ahead to prefetch a row that the hardware cannot predict, and how much of it.
template <class T>
struct Ahead {
  explicit Ahead(int64_t width) {
    const int64_t bytes = width * static_cast<int64_t>(sizeof(T));
    rows = bytes >= 1024 ? 2 : bytes <= 64 ? 32 : 2048 / bytes;
    span = bytes < 256 ? bytes : 256;
  }
  void fetch(const T* row) const {
    for (int64_t at = 0; at < span; at += 64) __builtin_prefetch(reinterpret_cast<const char*>(row) + at);
  }
  int64_t rows, span;
};

template <class T, class Add>
inline void scatter_rows_with(Add add, const T* rows, const int64_t* index, int64_t stride, int64_t n, int64_t d,
                              int64_t begin, int64_t end, bool squares, T* out) {
  constexpr int64_t kBlock = 512, kAhead = 8;
  int64_t mine[kBlock];
  const Ahead<T> ahead(d);
  const uint64_t span = static_cast<uint64_t>(end - begin);
  for (int64_t from = 0; from < n; from += kBlock) {
    const int64_t to = from + kBlock < n ? from + kBlock : n;
    // The positions that this part owns, collected without a branch.
    int64_t count = 0;
    for (int64_t i = from; i < to; ++i) {
      mine[count] = i;
      count += static_cast<uint64_t>(index[i * stride] - begin) < span;
    }
    for (int64_t k = 0; k < count; ++k) {
      const int64_t i = mine[k];
      if (k + kAhead < count) {
        __builtin_prefetch(out + index[mine[k + kAhead] * stride] * d, 1);
      }
      if (k + ahead.rows < count) ahead.fetch(rows + mine[k + ahead.rows] * d);
      add(rows + i * d, out + index[i * stride] * d, d, squares);
    }
  }
}

template <class T>
inline void scatter_rows_any(const T* rows, const int64_t* index, int64_t stride, int64_t n, int64_t d, int64_t begin,
                             int64_t end, bool squares, T* out) {
#define SHOAL_WIDTH(w) \
  case w:              \
    return scatter_rows_with(add_fixed<w, T>, rows, index, stride, n, d, begin, end, squares, out);
  switch (d) {
    SHOAL_WIDTH(1)
    SHOAL_WIDTH(2)
    SHOAL_WIDTH(4)
    SHOAL_WIDTH(8)
    SHOAL_WIDTH(16)
    SHOAL_WIDTH(32)
    SHOAL_WIDTH(64)
    default:
      return scatter_rows_with(add_any<T>, rows, index, stride, n, d, begin, end, squares, out);
  }
#undef SHOAL_WIDTH
}

template <class T>
inline void reduce_gradient_any(const T* grad, const int64_t* index, int64_t stride, const T* scale, const T* rows,
                                const T* norm, int64_t begin, int64_t end, int64_t d, Reduce how, T* out) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t at = index[i * stride];
    const T* g = grad + at * d;
    T* to = out + i * d;
    if (how == Reduce::sum) {
      for (int64_t c = 0; c < d; ++c) to[c] = g[c];
    } else if (how == Reduce::mean) {
      const T s = scale[at];
      for (int64_t c = 0; c < d; ++c) to[c] = g[c] * s;
    } else {
      const T *x = rows + i * d, *m = norm + at * d;
      for (int64_t c = 0; c < d; ++c) to[c] = m[c] == 0 ? T(0) : g[c] * x[c] / m[c];
    }
  }
}

// out[c] += scale * g[c]. W > 0: the width is known.
template <int W, class T>
inline void add_scaled(T* out, const T* g, int64_t width, T scale) {
  if constexpr (W > 0 && W < 4) {
    // One element at a time: neighbouring rows may overlap, and a wide load after two narrow stores stalls.
    for (int c = 0; c < W; ++c) {
      out[c] += scale * g[c];
      __asm__ volatile("" ::: "memory");
    }
  } else if constexpr (W > 0) {
    for (int c = 0; c < W; ++c) out[c] += scale * g[c];
  } else {
    for (int64_t c = 0; c < width; ++c) out[c] += scale * g[c];
  }
}

template <int W, class T, class Offset>
inline void scatter_floats_with(const T* grads, const Offset* offsets, int64_t n, int64_t width, T scale, int64_t lo,
                                int64_t hi, bool whole, T* out) {
  constexpr int64_t kBlock = 512, kAhead = 8;
  if constexpr (W > 0) width = W;
  if (whole) {
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) __builtin_prefetch(out + offsets[i + kAhead], 1);
      add_scaled<W>(out + offsets[i], grads + i * width, width, scale);
    }
    return;
  }
  int64_t mine[kBlock];
  const Ahead<T> ahead(width);
  for (int64_t from = 0; from < n; from += kBlock) {
    const int64_t to = from + kBlock < n ? from + kBlock : n;
    // The rows that this part owns, collected without a branch.
    int64_t count = 0;
    for (int64_t i = from; i < to; ++i) {
      mine[count] = i;
      count += (offsets[i] < hi) & (offsets[i] + width > lo);
    }
    for (int64_t k = 0; k < count; ++k) {
      const int64_t i = mine[k], at = offsets[i];
      if (k + kAhead < count) {
        __builtin_prefetch(out + offsets[mine[k + kAhead]], 1);
      }
      if (k + ahead.rows < count) ahead.fetch(grads + mine[k + ahead.rows] * width);
      if (at >= lo && at + width <= hi) {
        add_scaled<W>(out + at, grads + i * width, width, scale);
      } else {
        const int64_t first = at < lo ? lo - at : 0, last = at + width > hi ? hi - at : width;
        add_scaled<0>(out + at + first, grads + i * width + first, last - first, scale);
      }
    }
  }
}

template <class T, class Offset>
inline void scatter_floats_any(const T* grads, const Offset* offsets, int64_t n, int64_t width, T scale, int64_t lo,
                               int64_t hi, bool whole, T* out) {
#define SHOAL_WIDTH(w) \
  case w:              \
    return scatter_floats_with<w>(grads, offsets, n, width, scale, lo, hi, whole, out);
  switch (width) {
    SHOAL_WIDTH(1)
    SHOAL_WIDTH(2)
    SHOAL_WIDTH(3)
    SHOAL_WIDTH(4)
    SHOAL_WIDTH(8)
    SHOAL_WIDTH(16)
    SHOAL_WIDTH(32)
    default:
      return scatter_floats_with<0>(grads, offsets, n, width, scale, lo, hi, whole, out);
  }
#undef SHOAL_WIDTH
}

}  // namespace

#define SHOAL_SUM_KERNELS(T)                                                                                     \
  void segment_sum(const T* rows, const int64_t* splits, int64_t begin, int64_t end, int64_t d, T* out) {        \
    segment_sum_any(rows, splits, begin, end, d, out);                                                           \
  }                                                                                                              \
  void sorted_reduce(const T* rows, const int64_t* index, int64_t stride, int64_t begin, int64_t end, int64_t d, \
                     Reduce how, int64_t row_begin, int64_t row_end, T* out) {                                   \
    sorted_reduce_any(rows, index, stride, begin, end, d, how, row_begin, row_end, out);                         \
  }                                                                                                              \
  void scatter_rows(const T* rows, const int64_t* index, int64_t stride, int64_t n, int64_t d, int64_t begin,    \
                    int64_t end, bool squares, T* out) {                                                         \
    scatter_rows_any(rows, index, stride, n, d, begin, end, squares, out);                                       \
  }                                                                                                              \
  void finish_reduce(T* out, const int64_t* counts, int64_t begin, int64_t end, int64_t d, Reduce how) {         \
    for (int64_t r = begin; r < end; ++r) finish_row(out + r * d, counts ? counts[r] : 0, d, how);               \
  }                                                                                                              \
  void reduce_gradient(const T* grad, const int64_t* index, int64_t stride, const T* scale, const T* rows,       \
                       const T* norm, int64_t begin, int64_t end, int64_t d, Reduce how, T* out) {               \
    reduce_gradient_any(grad, index, stride, scale, rows, norm, begin, end, d, how, out);                        \
  }                                                                                                              \
  void scatter_floats(const T* grads, const int64_t* offsets, int64_t n, int64_t width, T scale, int64_t lo,     \
                      int64_t hi, bool whole, T* out) {                                                          \
    scatter_floats_any(grads, offsets, n, width, scale, lo, hi, whole, out);                                     \
  }                                                                                                              \
  void scatter_floats(const T* grads, const int32_t* offsets, int64_t n, int64_t width, T scale, int64_t lo,     \
                      int64_t hi, bool whole, T* out) {                                                          \
    scatter_floats_any(grads, offsets, n, width, scale, lo, hi, whole, out);                                     \
  }

SHOAL_SUM_KERNELS(float)
SHOAL_SUM_KERNELS(double)

}  // namespace shoal::SHOAL_ISA
