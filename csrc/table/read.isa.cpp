#include "table/read.h"

#include <bit>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "core/hash.h"
#include "table/index.h"

namespace shoal::SHOAL_ISA {
namespace {

// The row number of an id in a bucket, 0 if it is not there, by no branch that depends on where it is.
inline uint32_t number_in(const Bucket& bucket, int64_t id) {
#if defined(__AVX512VL__)
  const __m256i ids = _mm256_load_si256(reinterpret_cast<const __m256i*>(bucket.id));
  const __m128i rows = _mm_load_si128(reinterpret_cast<const __m128i*>(bucket.row));
  const __mmask8 lanes =
      _mm256_mask_cmpeq_epi64_mask(_mm_cmpge_epu32_mask(rows, _mm_set1_epi32(kFirstRow)), ids, _mm256_set1_epi64x(id));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_maskz_compress_epi32(lanes, rows)));
#else
  uint32_t number = 0;
  for (int lane = 0; lane < 4; ++lane) {
    const bool here = bucket.id[lane] == static_cast<uint64_t>(id) && bucket.row[lane] >= kFirstRow;
    number |= here ? bucket.row[lane] : 0;
  }
  return number;
#endif
}

// kDim: of the rows, or 0 for any.
template <int kDim>
void copy(const float* const* rows, int64_t n, int64_t dim, bool stream, float* out) {
  if (kDim) dim = kDim;
#if defined(__SSE2__)
  if (kDim % 4 == 0 && kDim && stream) {
    for (int64_t i = 0; i < n; ++i, out += dim)
      for (int c = 0; c < kDim; c += 4) _mm_stream_ps(out + c, rows[i] ? _mm_loadu_ps(rows[i] + c) : _mm_setzero_ps());
    return;
  }
#endif
  for (int64_t i = 0; i < n; ++i, out += dim) {
    if (rows[i]) {
      std::memcpy(out, rows[i], sizeof(float) * static_cast<size_t>(dim));
    } else {
      std::memset(out, 0, sizeof(float) * static_cast<size_t>(dim));
    }
  }
}

}  // namespace

void hash_ids(const int64_t* ids, int64_t n, uint64_t salt, uint64_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = hash_id(static_cast<uint64_t>(ids[i]) ^ salt);
}

int64_t probe_homes(const Bucket* const* homes, const int64_t* ids, int64_t n, uint32_t* numbers) {
  int64_t missing = 0;
  for (int64_t i = 0; i < n; ++i) {
    numbers[i] = number_in(*homes[i], ids[i]);
    missing += numbers[i] == 0;
  }
  return missing;
}

void copy_rows(const float* const* rows, int64_t n, int64_t dim, bool stream, float* out) {
  switch (dim) {
    case 4:
      return copy<4>(rows, n, dim, stream, out);
    case 8:
      return copy<8>(rows, n, dim, stream, out);
    case 16:
      return copy<16>(rows, n, dim, stream, out);
    case 32:
      return copy<32>(rows, n, dim, stream, out);
    case 64:
      return copy<64>(rows, n, dim, stream, out);
    case 128:
      return copy<128>(rows, n, dim, stream, out);
    default:
      return copy<0>(rows, n, dim, stream, out);
  }
}

}  // namespace shoal::SHOAL_ISA
