// Conversions between float32 and float16, rounded to the nearest. For *.isa.cpp files alone.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace shoal::SHOAL_ISA {

static inline uint16_t to_half(float x) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00 | (magnitude >> 13 & 0x3FF));  // NaN
  if (magnitude >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);                             // to infinity
  if (magnitude < 0x38800000) {  // a subnormal half: let float arithmetic round it
    float shifted;
    const uint32_t half_point = 0x3F000000;  // 0.5f, whose last mantissa bit weighs as much as the smallest half
    float base;
    std::memcpy(&base, &half_point, sizeof base);
    std::memcpy(&shifted, &magnitude, sizeof shifted);
    shifted += base;
    uint32_t out;
    std::memcpy(&out, &shifted, sizeof out);
    return static_cast<uint16_t>(sign | (out - half_point));
  }
  const uint32_t odd = magnitude >> 13 & 1;
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000 + 0xFFF + odd) >> 13));
#endif
}

static inline float from_half(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = uint32_t{h} << 16 & 0x80000000, exponent = h >> 10 & 31, mantissa = h & 0x3FF;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7F800000 | mantissa << 13;
  } else if (exponent) {
    bits = sign | (exponent + 112) << 23 | mantissa << 13;
  } else {
    float x = static_cast<float>(mantissa) * 0x1p-24f;
    std::memcpy(&bits, &x, sizeof bits);
    bits |= sign;
  }
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

}  // namespace shoal::SHOAL_ISA
