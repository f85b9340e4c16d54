#include "train/crc32.h"

#include <array>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shoal {
namespace {

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ (c & 1 ? 0xedb88320u : 0);
    table[i] = c;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kTable = make_table();

uint32_t by_table(const uint8_t* p, int64_t n, uint32_t state) {
  for (int64_t i = 0; i < n; ++i) state = kTable[(state ^ p[i]) & 255] ^ (state >> 8);
  return state;
}

#if defined(__x86_64__)
// Folding as in Intel's paper on CRC with PCLMULQDQ: the constants are x^k mod P, bit-reflected, for the distance k
// that a fold moves by (4 * 128, 128 and 64 bits), then P and its inverse for the last reduction.
__attribute__((target("pclmul,sse4.1"))) inline __m128i fold(__m128i x, __m128i k, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(x, k, 0x00);
  const __m128i high = _mm_clmulepi64_si128(x, k, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

__attribute__((target("pclmul,sse4.1"))) inline __m128i load(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

// n is a multiple of 16 and at least 64.
__attribute__((target("pclmul,sse4.1"))) uint32_t by_folding(const uint8_t* p, int64_t n, uint32_t state) {
  const __m128i by512 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i by128 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  __m128i x[4];
  for (int i = 0; i < 4; ++i) x[i] = load(p + 16 * i);
  x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  for (p += 64, n -= 64; n >= 64; p += 64, n -= 64)
    for (int i = 0; i < 4; ++i) x[i] = fold(x[i], by512, load(p + 16 * i));
  __m128i y = fold(fold(fold(x[0], by128, x[1]), by128, x[2]), by128, x[3]);
  for (; n >= 16; p += 16, n -= 16) y = fold(y, by128, load(p));

  const __m128i low32 = _mm_setr_epi32(~0, 0, ~0, 0);
  y = _mm_xor_si128(_mm_srli_si128(y, 8), _mm_clmulepi64_si128(y, by128, 0x10));  // 128 bits to 96
  const __m128i by64 = _mm_set_epi64x(0, 0x0163cd6124);
  y = _mm_xor_si128(_mm_srli_si128(y, 4), _mm_clmulepi64_si128(_mm_and_si128(y, low32), by64, 0x00));  // to 64
  const __m128i poly = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  __m128i t = _mm_clmulepi64_si128(_mm_and_si128(y, low32), poly, 0x10);
  t = _mm_clmulepi64_si128(_mm_and_si128(t, low32), poly, 0x00);
  return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(y, t), 1));
}
#endif

}  // namespace

uint32_t crc32(const uint8_t* data, int64_t n, uint32_t crc) {
  uint32_t state = ~crc;
#if defined(__x86_64__)
  static const bool folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (folds && n >= 64) {
    const int64_t whole = n & ~int64_t{15};
    state = by_folding(data, whole, state);
    data += whole;
    n -= whole;
  }
#endif
  return ~by_table(data, n, state);
}

}  // namespace shoal
