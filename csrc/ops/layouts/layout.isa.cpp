#include "ops/layouts/layout_kernels.h"

namespace shoal::SHOAL_ISA {
namespace {

// W > 0: the width is known and the sums stay in registers; W = 0: any width.
template <int W, class T>
inline void pool_with(const T* const* vectors, const int64_t* row_starts, int64_t rows, int64_t start, int64_t width,
                      bool mean, bool adds, T* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; ++r, out += out_stride) {
    const int64_t begin = row_starts[r], end = row_starts[r + 1];
    if (begin == end) continue;
    const T n = static_cast<T>(end - begin);
    if constexpr (W > 0) {
      T sum[W];
      for (int c = 0; c < W; ++c) sum[c] = 0;
      for (int64_t k = begin; k < end; ++k) {
        const T* x = vectors[k] + start;
        if (mean) {
          for (int c = 0; c < W; ++c) sum[c] += x[c] / n;
        } else {
          for (int c = 0; c < W; ++c) sum[c] += x[c];
        }
      }
      if (adds) {
        for (int c = 0; c < W; ++c) out[c] += sum[c];
      } else {
        for (int c = 0; c < W; ++c) out[c] = sum[c];
      }
    } else {
      for (int64_t k = begin; k < end; ++k) {
        const T* x = vectors[k] + start;
        if (k == begin && !adds) {
          for (int64_t c = 0; c < width; ++c) out[c] = mean ? x[c] / n : x[c];
        } else {
          for (int64_t c = 0; c < width; ++c) out[c] += mean ? x[c] / n : x[c];
        }
      }
    }
  }
}

template <int W, class T>
inline void spread_with(T* const* vectors, const int64_t* row_starts, int64_t rows, int64_t start, int64_t width,
                        bool mean, T scale, const T* grad, int64_t grad_stride) {
  for (int64_t r = 0; r < rows; ++r, grad += grad_stride) {
    const int64_t begin = row_starts[r], end = row_starts[r + 1];
    if (begin == end) continue;
    const T n = mean ? static_cast<T>(end - begin) : T(1);
    if constexpr (W > 0) {
      T g[W];
      for (int c = 0; c < W; ++c) g[c] = grad[c] * scale / n;
      for (int64_t k = begin; k < end; ++k) {
        T* x = vectors[k] + start;
        for (int c = 0; c < W; ++c) x[c] += g[c];
      }
    } else {
      for (int64_t k = begin; k < end; ++k) {
        T* x = vectors[k] + start;
        for (int64_t c = 0; c < width; ++c) x[c] += grad[c] * scale / n;
      }
    }
  }
}

#define SHOAL_WIDTHS(call) \
  switch (width) {         \
    case 1:                \
      return call(1);      \
    case 2:                \
      return call(2);      \
    case 3:                \
      return call(3);      \
    case 4:                \
      return call(4);      \
    case 8:                \
      return call(8);      \
    case 12:               \
      return call(12);     \
    case 16:               \
      return call(16);     \
    case 20:               \
      return call(20);     \
    case 24:               \
      return call(24);     \
    case 32:               \
      return call(32);     \
    case 64:               \
      return call(64);     \
    default:               \
      return call(0);      \
  }

template <class T>
inline void pool_any(const T* const* vectors, const int64_t* row_starts, int64_t rows, int64_t start, int64_t width,
                     bool mean, bool adds, T* out, int64_t out_stride) {
#define SHOAL_POOL(w) pool_with<w>(vectors, row_starts, rows, start, width, mean, adds, out, out_stride)
  SHOAL_WIDTHS(SHOAL_POOL)
#undef SHOAL_POOL
}

template <class T>
inline void spread_any(T* const* vectors, const int64_t* row_starts, int64_t rows, int64_t start, int64_t width,
                       bool mean, T scale, const T* grad, int64_t grad_stride) {
#define SHOAL_SPREAD(w) spread_with<w>(vectors, row_starts, rows, start, width, mean, scale, grad, grad_stride)
  SHOAL_WIDTHS(SHOAL_SPREAD)
#undef SHOAL_SPREAD
}

}  // namespace

#define SHOAL_LAYOUT_KERNELS(T)                                                                                  \
  void pool_rows(const T* const* vectors, const int64_t* row_starts, int64_t rows, int64_t start, int64_t width, \
                 bool mean, bool adds, T* out, int64_t out_stride) {                                             \
    pool_any(vectors, row_starts, rows, start, width, mean, adds, out, out_stride);                              \
  }                                                                                                              \
  void spread_rows(T* const* vectors, const int64_t* row_starts, int64_t rows, int64_t start, int64_t width,     \
                   bool mean, T scale, const T* grad, int64_t grad_stride) {                                     \
    spread_any(vectors, row_starts, rows, start, width, mean, scale, grad, grad_stride);                         \
  }

SHOAL_LAYOUT_KERNELS(float)
SHOAL_LAYOUT_KERNELS(double)

}  // namespace shoal::SHOAL_ISA
