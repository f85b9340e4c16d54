#include "io/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace shoal {

namespace {

constexpr uint32_t kPolynomial = 0x82F63B78u;  // reflected

// slices[k][b]: the CRC of byte b followed by k zero bytes; eight bytes are folded in per step.
constexpr std::array<std::array<uint32_t, 256>, 8> make_slices() {
  std::array<std::array<uint32_t, 256>, 8> slices{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    slices[0][b] = crc;
  }
  for (int k = 1; k < 8; ++k) {
    for (uint32_t b = 0; b < 256; ++b) {
      slices[k][b] = (slices[k - 1][b] >> 8) ^ slices[0][slices[k - 1][b] & 0xFF];
    }
  }
  return slices;
}
constexpr auto kSlices = make_slices();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t crc32c_sse42(uint32_t before, const void* data, size_t n) {
  const char* p = static_cast<const char*>(data);
  uint64_t crc = ~before;
  for (; n >= 8; n -= 8, p += 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    crc = _mm_crc32_u64(crc, word);
  }
  uint32_t low = static_cast<uint32_t>(crc);
  for (; n > 0; --n, ++p) low = _mm_crc32_u8(low, static_cast<uint8_t>(*p));
  return ~low;
}
#endif

}  // namespace

uint32_t crc32c_portable(const void* data, size_t n, uint32_t crc) {
  const uint8_t* p = static_cast<const uint8_t*>(data);
  crc = ~crc;
  for (; n >= 8; n -= 8, p += 8) {
    const uint32_t low = crc ^ (p[0] | p[1] << 8 | p[2] << 16 | static_cast<uint32_t>(p[3]) << 24);
    crc = kSlices[7][low & 0xFF] ^ kSlices[6][(low >> 8) & 0xFF] ^ kSlices[5][(low >> 16) & 0xFF] ^
          kSlices[4][low >> 24] ^ kSlices[3][p[4]] ^ kSlices[2][p[5]] ^ kSlices[1][p[6]] ^ kSlices[0][p[7]];
  }
  for (; n > 0; --n, ++p) crc = (crc >> 8) ^ kSlices[0][(crc ^ *p) & 0xFF];
  return ~crc;
}

uint32_t crc32c(const void* data, size_t n) { return crc32c_extend(0, data, n); }

uint32_t crc32c_extend(uint32_t crc, const void* data, size_t n) {
#if defined(__x86_64__)
  static const bool native = __builtin_cpu_supports("sse4.2");
  if (native) return crc32c_sse42(crc, data, n);
#endif
  return crc32c_portable(data, n, crc);
}

}  // namespace shoal
