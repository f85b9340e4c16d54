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
// kZeros<n>[k][b]: what a CRC whose byte k is b, and whose other bytes are 0, becomes when 2^n zero bytes follow.
using Zeros = std::array<std::array<uint32_t, 256>, 4>;

constexpr uint32_t after_zeros(const std::array<uint32_t, 32>& of_bit, uint32_t crc) {
  uint32_t out = 0;
  for (int bit = 0; crc; crc >>= 1, ++bit) out ^= crc & 1 ? of_bit[bit] : 0;
  return out;
}

constexpr Zeros make_zeros(int log2_bytes) {
  std::array<uint32_t, 32> of_bit{};  // the CRC is linear, so those of single bits determine it
  for (int bit = 0; bit < 32; ++bit) of_bit[bit] = bit < 8 ? kSlices[0][1u << bit] : 1u << (bit - 8);
  for (int i = 0; i < log2_bytes; ++i) {
    std::array<uint32_t, 32> twice{};
    for (int bit = 0; bit < 32; ++bit) twice[bit] = after_zeros(of_bit, of_bit[bit]);
    of_bit = twice;
  }
  Zeros zeros{};
  for (int k = 0; k < 4; ++k) {
    for (uint32_t b = 0; b < 256; ++b) zeros[k][b] = after_zeros(of_bit, b << 8 * k);
  }
  return zeros;
}
template <int log2_bytes>
constexpr Zeros kZeros = make_zeros(log2_bytes);

template <int log2_bytes>
uint32_t zeros_after(uint64_t crc) {
  const Zeros& zeros = kZeros<log2_bytes>;
  return zeros[0][crc & 0xFF] ^ zeros[1][crc >> 8 & 0xFF] ^ zeros[2][crc >> 16 & 0xFF] ^ zeros[3][crc >> 24];
}

inline uint64_t load(const char* p) {
  uint64_t word;
  std::memcpy(&word, p, 8);
  return word;
}

// Consumes blocks of three lanes of 2^log2_bytes bytes. An instruction waits for the previous one of its lane, so three
// lanes at once take the time of one.
template <int log2_bytes>
__attribute__((target("sse4.2"))) uint64_t three_lanes(uint64_t crc, const char** at, size_t* n) {
  constexpr size_t lane = size_t{1} << log2_bytes;
  const char* p = *at;
  for (; *n >= 3 * lane; *n -= 3 * lane, p += 3 * lane) {
    uint64_t second = 0, third = 0;
    for (size_t i = 0; i < lane; i += 8) {
      crc = _mm_crc32_u64(crc, load(p + i));
      second = _mm_crc32_u64(second, load(p + lane + i));
      third = _mm_crc32_u64(third, load(p + 2 * lane + i));
    }
    crc = zeros_after<log2_bytes>(zeros_after<log2_bytes>(crc) ^ second) ^ third;
  }
  *at = p;
  return crc;
}

__attribute__((target("sse4.2"))) uint32_t crc32c_sse42(uint32_t before, const void* data, size_t n) {
  const char* p = static_cast<const char*>(data);
  uint64_t crc = ~before;
  crc = three_lanes<10>(crc, &p, &n);
  crc = three_lanes<7>(crc, &p, &n);
  for (; n >= 8; n -= 8, p += 8) crc = _mm_crc32_u64(crc, load(p));
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
