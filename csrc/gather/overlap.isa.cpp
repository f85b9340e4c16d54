#include "gather/overlap.h"

#include <algorithm>
#include <bit>

#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace shoal::SHOAL_ISA {

void count_bits(const uint64_t* masks, int64_t words, int64_t word, const uint16_t* indices, int64_t k,
                uint32_t* counts) {
#if defined(__AVX512BW__)
  // 64 counters of 8 bits, one masked addition per index; added to `counts` before they can overflow.
  const __m512i one = _mm512_set1_epi8(1);
  for (int64_t begin = 0; begin < k; begin += 255) {
    __m512i bytes = _mm512_setzero_si512();
    const int64_t end = std::min<int64_t>(k, begin + 255);
    for (int64_t i = begin; i < end; ++i) {
      __mmask64 mask = masks[indices[i] * words + word];
      bytes = _mm512_mask_add_epi8(bytes, mask, bytes, one);
    }
    alignas(64) uint8_t lanes[64];
    _mm512_store_si512(lanes, bytes);
    for (int j = 0; j < 64; ++j) counts[j] += lanes[j];
  }
#else
  for (int64_t i = 0; i < k; ++i) {
    for (uint64_t mask = masks[indices[i] * words + word]; mask; mask &= mask - 1) ++counts[std::countr_zero(mask)];
  }
#endif
}

}  // namespace shoal::SHOAL_ISA
