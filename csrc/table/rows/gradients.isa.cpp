#include "table/rows/gradients.h"

#include <algorithm>
#include <cstring>

namespace shoal::SHOAL_ISA {

uint32_t largest_bits(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    largest = std::max(largest, bits & 0x7FFFFFFFu);
  }
  return largest;
}

void scaled(const float* __restrict x, float factor, int64_t n, float* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor;
}

void scaled_marked(const float* __restrict x, float factor, const uint8_t* __restrict marks, int64_t n,
                   float* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = is_marked(marks, i) ? x[i] * factor : 0.0f;
}

}  // namespace shoal::SHOAL_ISA
