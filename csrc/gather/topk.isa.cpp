#include "gather/topk.h"

#include <algorithm>
#include <bit>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace shoal::SHOAL_ISA {

int64_t collect_above(const uint32_t* keys, int64_t begin, int64_t end, uint32_t threshold, uint64_t* out,
                      int64_t capacity, int64_t* length) {
  int64_t n = *length, i = begin;
#if defined(__AVX512F__)
  const __m512i limit = _mm512_set1_epi32(static_cast<int>(threshold));
  for (; i + 16 <= end && n + 16 <= capacity; i += 16) {
    unsigned hits = _mm512_cmpgt_epu32_mask(_mm512_loadu_si512(keys + i), limit);
    for (; hits; hits &= hits - 1) {
      int64_t at = i + std::countr_zero(hits);
      out[n++] = static_cast<uint64_t>(keys[at]) << 32 | static_cast<uint32_t>(~at);
    }
  }
#elif defined(__AVX2__)
  const __m256i limit =
      _mm256_set1_epi32(static_cast<int>(threshold));  // keys have no sign bit: signed compare is fine
  for (; i + 8 <= end && n + 8 <= capacity; i += 8) {
    __m256i block = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + i));
    unsigned hits = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(block, limit))));
    for (; hits; hits &= hits - 1) {
      int64_t at = i + std::countr_zero(hits);
      out[n++] = static_cast<uint64_t>(keys[at]) << 32 | static_cast<uint32_t>(~at);
    }
  }
#endif
  for (; i < end && n < capacity; ++i) {
    if (keys[i] > threshold) out[n++] = static_cast<uint64_t>(keys[i]) << 32 | static_cast<uint32_t>(~i);
  }
  *length = n;
  return i;
}

uint32_t fold_row(const float* gradient, float* memory, float decay, int64_t n, float* values, uint32_t* keys) {
  uint32_t most = 0;
  if (memory) {
    for (int64_t i = 0; i < n; ++i) memory[i] = values[i] = gradient[i] + decay * memory[i];
  } else {
    std::copy_n(gradient, n, values);
  }
  for (int64_t i = 0; i < n; ++i) {
    keys[i] = std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu;
    most = std::max(most, keys[i]);
  }
  return most;
}

}  // namespace shoal::SHOAL_ISA
