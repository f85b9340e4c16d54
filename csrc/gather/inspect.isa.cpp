#include "gather/inspect.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "gather/codec.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace shoal::SHOAL_ISA {
namespace {

// Rising indices have no duplicates: this is the usual case, and needs no memory traffic.
bool strictly_rising(const uint16_t* v, int64_t k) {
  unsigned falls = 0;
  for (int64_t i = 1; i < k; ++i) falls |= static_cast<unsigned>(v[i] <= v[i - 1]);
  return falls == 0;
}

}  // namespace

int check_chunks(const uint8_t* indices, int codec, int64_t first, int64_t last, int64_t k, int64_t totalk,
                 uint32_t* stamps, uint16_t* scratch) {
  int found = 0;
  for (int64_t c = first; c < last; ++c) {
    const uint32_t stamp = static_cast<uint32_t>(c) + 1;
    if (codec == 0) {
      unpack12(indices + c * (k / 2 * 3), k, scratch);
      if (strictly_rising(scratch, k)) {
        found |= scratch[k - 1] >= totalk;
        continue;
      }
      for (int64_t i = 0; i < k; ++i) {
        if (scratch[i] >= totalk) {
          found |= 1;
          continue;
        }
        if (stamps[scratch[i]] == stamp) found |= 2;
        stamps[scratch[i]] = stamp;
      }
    } else {
      for (int64_t i = 0; i < k; ++i) {
        int32_t index;
        std::memcpy(&index, indices + (c * k + i) * 4, 4);
        if (index < 0 || index >= totalk) {
          found |= 1;
          continue;
        }
        if (stamps[index] == stamp) found |= 2;
        stamps[index] = stamp;
      }
    }
  }
  return found;
}

void sum_block(const float* values, int64_t n, double* squares, double* sum) {
  double s[16] = {}, q[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int j = 0; j < 16; ++j) {
      double v = values[i + j];
      double vv = v * v;  // exact: 24 + 24 bits fit, so contraction cannot change a bit
      q[j] += vv;
      s[j] += v;
    }
  }
  for (; i < n; ++i) {
    double v = values[i];
    q[0] += v * v;
    s[0] += v;
  }
  for (int j = 1; j < 16; ++j) {
    q[0] += q[j];
    s[0] += s[j];
  }
  *squares = q[0];
  *sum = s[0];
}

void count_values(const uint8_t* q, int64_t n, [[maybe_unused]] int bins, uint32_t* counts) {
  int64_t i = 0;
#if defined(__AVX2__)
  if (bins <= 16) {  // one comparison per bin, without a counter in memory that the next value must wait for
    const int64_t whole = n / 64 * 64;
    int64_t found = 0;
    for (int b = 0; b < bins; ++b) {
      int64_t count = 0;
#if defined(__AVX512BW__)
      const __m512i bin = _mm512_set1_epi8(static_cast<char>(b));
      for (int64_t j = 0; j < whole; j += 64)
        count += std::popcount(static_cast<uint64_t>(_mm512_cmpeq_epi8_mask(_mm512_loadu_si512(q + j), bin)));
#else
      const __m256i bin = _mm256_set1_epi8(static_cast<char>(b));
      for (int64_t j = 0; j < whole; j += 32) {
        __m256i same = _mm256_cmpeq_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + j)), bin);
        count += std::popcount(static_cast<uint32_t>(_mm256_movemask_epi8(same)));
      }
#endif
      counts[b] += static_cast<uint32_t>(count);
      found += count;
    }
    counts[255] += static_cast<uint32_t>(whole - found);
    i = whole;
  }
#endif
  for (; i < n; ++i) ++counts[q[i]];
}

uint32_t max_abs_bits(const float* values, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) most = std::max(most, std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu);
  return most;
}

}  // namespace shoal::SHOAL_ISA
