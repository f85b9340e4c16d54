#include "nn/net/gemm.h"

#include <algorithm>
#include <cstring>

namespace shoal::SHOAL_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16, kRows = 8;
#elif defined(__AVX2__)
constexpr int kWidth = 8, kRows = 6;
#else
constexpr int kWidth = 4, kRows = 4;
#endif
constexpr int kPanel = 2 * kWidth;

typedef float Vec __attribute__((vector_size(4 * kWidth)));

inline Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

// R rows by one panel.
template <int R>
inline void tile(const float* a, int64_t lda, int64_t k, const float* panel, const float* plus, int64_t ldp,
                 int64_t columns, float* out, int64_t ldo) {
  Vec left[R], right[R];
  for (int r = 0; r < R; ++r) left[r] = right[r] = Vec{};
  for (int64_t i = 0; i < k; ++i, panel += kPanel) {
    const Vec x = load(panel), y = load(panel + kWidth);
    for (int r = 0; r < R; ++r) {
      const float f = a[r * lda + i];
      left[r] += x * f;
      right[r] += y * f;
    }
  }
  if (columns == kPanel) {
    for (int r = 0; r < R; ++r) {
      if (plus) {
        left[r] += load(plus + r * ldp);
        right[r] += load(plus + r * ldp + kWidth);
      }
      store(out + r * ldo, left[r]);
      store(out + r * ldo + kWidth, right[r]);
    }
    return;
  }
  for (int r = 0; r < R; ++r) {
    float both[kPanel];
    store(both, left[r]);
    store(both + kWidth, right[r]);
    for (int64_t c = 0; c < columns; ++c) out[r * ldo + c] = plus ? both[c] + plus[r * ldp + c] : both[c];
  }
}

template <int R>
void tiles(const Product& p, int64_t row, int64_t k, const float* panel, int64_t column, int64_t columns) {
  tile<R>(p.a + row * p.lda, p.lda, k, panel, p.plus ? p.plus + row * p.ldp + column : nullptr, p.ldp, columns,
          p.out + row * p.ldo + column, p.ldo);
}

}  // namespace

int64_t panel_width() { return kPanel; }

void multiply_panels(const Product& p, int64_t k, int64_t n, const float* panels) {
  for (int64_t column = 0; column < n; column += kPanel, panels += k * kPanel) {
    const int64_t columns = std::min<int64_t>(kPanel, n - column);
    int64_t row = 0;
    for (; row + kRows <= p.m; row += kRows) tiles<kRows>(p, row, k, panels, column, columns);
    switch (p.m - row) {
      case 7:
        tiles<7>(p, row, k, panels, column, columns);
        break;
      case 6:
        tiles<6>(p, row, k, panels, column, columns);
        break;
      case 5:
        tiles<5>(p, row, k, panels, column, columns);
        break;
      case 4:
        tiles<4>(p, row, k, panels, column, columns);
        break;
      case 3:
        tiles<3>(p, row, k, panels, column, columns);
        break;
      case 2:
        tiles<2>(p, row, k, panels, column, columns);
        break;
      case 1:
        tiles<1>(p, row, k, panels, column, columns);
        break;
      default:
        break;
    }
  }
}

void multiply_columns(const Product& p, int64_t k, int64_t n, const float* columns) {
  for (int64_t row = 0; row < p.m; ++row) {
    const float* a = p.a + row * p.lda;
    for (int64_t c = 0; c < n; ++c) {
      const float* column = columns + c * k;
      Vec sums[2] = {};
      int64_t i = 0;
      for (; i + 2 * kWidth <= k; i += 2 * kWidth) {
        sums[0] += load(a + i) * load(column + i);
        sums[1] += load(a + i + kWidth) * load(column + i + kWidth);
      }
      sums[0] += sums[1];
      float total = 0;
      for (int w = 0; w < kWidth; ++w) total += sums[0][w];
      for (; i < k; ++i) total += a[i] * column[i];
      p.out[row * p.ldo + c] = p.plus ? total + p.plus[row * p.ldp + c] : total;
    }
  }
}

}  // namespace shoal::SHOAL_ISA
