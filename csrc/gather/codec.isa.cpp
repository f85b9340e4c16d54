#include "gather/codec.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "core/half.h"

namespace shoal::SHOAL_ISA {

void unpack12(const uint8_t* packed, int64_t n, uint16_t* out) {
  int64_t i = 0;
#if defined(__AVX2__)
  // 16 values from 24 bytes; the second load reads 16 bytes from byte 12, so 4 more bytes must be readable.
  const __m256i spread = _mm256_setr_epi8(0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11,  //
                                          0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11);
  const __m256i low = _mm256_set1_epi16(0x0fff);
  for (; i + 20 <= n; i += 16, packed += 24) {
    __m256i bytes =
        _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed))),
                                _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + 12)), 1);
    __m256i words = _mm256_shuffle_epi8(bytes, spread);
    __m256i even = _mm256_and_si256(words, low);
    __m256i odd = _mm256_srli_epi16(words, 4);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_blend_epi16(even, odd, 0xaa));
  }
#endif
  for (; i < n; i += 2, packed += 3) {
    out[i] = static_cast<uint16_t>(packed[0] | (packed[1] & 15) << 8);
    out[i + 1] = static_cast<uint16_t>(packed[1] >> 4 | packed[2] << 4);
  }
}

void unpack12_wide(const uint8_t* packed, int64_t n, int64_t* out) {
  uint16_t block[512];
  for (int64_t i = 0; i < n; i += 512) {
    int64_t m = std::min<int64_t>(512, n - i);
    unpack12(packed + i / 2 * 3, m, block);
    for (int64_t j = 0; j < m; ++j) out[i + j] = block[j];
  }
}

bool pack12(const int64_t* indices, int64_t n, uint8_t* out) {
  uint64_t seen = 0;
  for (int64_t i = 0; i < n; i += 2, out += 3) {
    uint64_t a = static_cast<uint64_t>(indices[i]), b = static_cast<uint64_t>(indices[i + 1]);
    seen |= a | b;
    out[0] = static_cast<uint8_t>(a);
    out[1] = static_cast<uint8_t>(a >> 8 | (b & 15) << 4);
    out[2] = static_cast<uint8_t>(b >> 4);
  }
  return seen < 4096;
}

void look_up(const uint8_t* q, int64_t n, const float* table, [[maybe_unused]] int bins, float* out) {
  int64_t i = 0;
#if defined(__AVX512F__)
  // Masked forms, since GCC 12 warns in the headers of the plain ones.
  if (bins <= 32) {
    const __m512 low = _mm512_loadu_ps(table), high = _mm512_loadu_ps(table + 16);
    for (; i + 16 <= n; i += 16) {
      __m512i index = _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(q + i)));
      _mm512_storeu_ps(out + i, _mm512_permutex2var_ps(low, index, high));
    }
  }
#elif defined(__AVX2__)
  if (bins <= 8) {
    const __m256 low = _mm256_loadu_ps(table);
    for (; i + 8 <= n; i += 8) {
      __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q + i)));
      _mm256_storeu_ps(out + i, _mm256_permutevar8x32_ps(low, index));
    }
  }
#endif
  for (; i < n; ++i) out[i] = table[q[i]];
}

void quantize(const float* z, int64_t n, float scale, float offset, int bins, uint8_t* q, double* sums,
              int64_t* counts) {
  const float top = static_cast<float>(bins - 1);
  for (int64_t i = 0; i < n; ++i) {
    float bin = std::nearbyint(z[i] / scale + offset);
    q[i] = static_cast<uint8_t>(static_cast<int32_t>(std::min(std::max(bin, 0.0f), top)));
  }
  for (int64_t i = 0; i < n; ++i) {
    sums[q[i]] += z[i];
    ++counts[q[i]];
  }
}

void widen(const uint8_t* values, int64_t n, int kind, float* out) {
  if (kind == 1) {
    std::memcpy(out, values, static_cast<size_t>(n) * 4);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    uint16_t bits;
    std::memcpy(&bits, values + 2 * i, 2);
    out[i] = kind == 3 ? std::bit_cast<float>(static_cast<uint32_t>(bits) << 16) : from_half(bits);
  }
}

}  // namespace shoal::SHOAL_ISA
