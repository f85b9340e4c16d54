#include "data/feature.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace shoal::SHOAL_ISA {
namespace {

// log(1 + x) of x >= 0 to float's precision, without branches. 1 + x is m * 2^e with m in [sqrt(1/2), sqrt(2)); with
// s = (m - 1) / (m + 1) the logarithm of m is 2 * (s + s^3 / 3 + s^5 / 5 + ...).
inline float log1p_of(float x) {
  const double sum = 1.0 + x;
  const auto bits = std::bit_cast<int64_t>(sum);
  const int64_t above = bits - std::bit_cast<int64_t>(0.70710678118654752);
  const int64_t exponent = above >> 52;
  const double m = std::bit_cast<double>(bits - (exponent << 52));
  const double s = (m - 1) / (m + 1), q = s * s;
  double series = 1.0 / 15;
  for (int k = 13; k >= 1; k -= 2) series = series * q + 1.0 / k;
  const double all = 2 * s * series + 0.69314718055994531 * static_cast<double>(static_cast<int32_t>(exponent));
  const double tiny = x - 0.5 * static_cast<double>(x) * x;  // where the sum would lose digits
  return static_cast<float>(x < 1e-4f ? tiny : all);
}

}  // namespace

void apply_number_rows(const NumberRows& rows, int64_t n, float* values) {
  const float *low = rows.low.data(), *high = rows.high.data(), *log = rows.log.data(), *mean = rows.mean.data(),
              *scale = rows.scale.data();
  for (int64_t i = 0; i < n; ++i) {
    float value = std::min(std::max(values[i], low[i]), high[i]);
    const float root = std::copysign(log1p_of(std::fabs(value)), value);
    value = log[i] != 0 ? root : value;
    values[i] = (value - mean[i]) * scale[i];
  }
}

}  // namespace shoal::SHOAL_ISA
