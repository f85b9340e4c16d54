#include "table/read.h"

#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "core/hash.h"
#include "table/index.h"

namespace shoal::SHOAL_ISA {
namespace {

// The row number of an id in a bucket, 0 if it is not there; without a branch that depends on its lane.
inline uint32_t number_in(const Bucket& bucket, int64_t id) {
#if defined(__AVX512VL__)
  const __m256i ids = _mm256_load_si256(reinterpret_cast<const __m256i*>(bucket.id));
  const __m128i rows = _mm_load_si128(reinterpret_cast<const __m128i*>(bucket.row));
  const __mmask8 lanes =
      _mm256_mask_cmpeq_epi64_mask(_mm_cmpge_epu32_mask(rows, _mm_set1_epi32(kFirstRow)), ids, _mm256_set1_epi64x(id));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_maskz_compress_epi32(lanes, rows)));
#elif defined(__AVX2__)
  const __m256i ids = _mm256_load_si256(reinterpret_cast<const __m256i*>(bucket.id));
  const __m128i rows = _mm_load_si128(reinterpret_cast<const __m128i*>(bucket.row));
  const __m128i used = _mm_cmpeq_epi32(_mm_max_epu32(rows, _mm_set1_epi32(kFirstRow)), rows);
  const int lanes = _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(ids, _mm256_set1_epi64x(id)))) &
                    _mm_movemask_ps(_mm_castsi128_ps(used));
  return bucket.row[__builtin_ctz(static_cast<unsigned>(lanes) | 8)] & (lanes ? ~uint32_t{0} : 0);
#else
  uint32_t number = 0;
  for (int lane = 0; lane < 4; ++lane) {
    const bool here = (bucket.id[lane] == static_cast<uint64_t>(id)) & (bucket.row[lane] >= kFirstRow);
    number |= here ? bucket.row[lane] : 0;
  }
  return number;
#endif
}

inline const Index& index_of(const Homes& homes, uint64_t hash) {
  const size_t stripe = homes.stripe_of_cell[hash >> (64 - Index::kStripeBits)];
  return *reinterpret_cast<const Index*>(homes.first_index + stripe * homes.stride);
}

// Prefetches into the second-level cache, which can have more requests pending: it saves a third of a lookup's time.
inline void ask_for(const void* address) { __builtin_prefetch(address, 0, 2); }

inline void ask_for_row(const char* row, int32_t bytes, bool one_line) {
  if (one_line) return ask_for(row);
  const auto begin = reinterpret_cast<uintptr_t>(row);
  for (uintptr_t line = begin & ~uintptr_t{63}; line < begin + static_cast<uintptr_t>(bytes); line += 64)
    ask_for(reinterpret_cast<const void*>(line));
}

constexpr int kBehind = 3;  // buckets to prefetch when the home is full; almost no probe reads more

// kDim: the rows' dim, or 0 for any.
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

void start_round(const Homes& homes, const int64_t* ids, int64_t n, Round& round) {
  for (int64_t i = 0; i < n; ++i) round.hash[i] = hash_id(static_cast<uint64_t>(ids[i]) ^ kIndexSalt);
  for (int64_t i = 0; i < n; ++i) {
    round.home[i] = index_of(homes, round.hash[i]).home(round.hash[i]);
    ask_for(round.home[i]);
  }
}

void probe_round(const Homes& homes, const RowPlaces& given, const int64_t* ids, int64_t n, int32_t row_bytes,
                 Round& round) {
  const RowPlaces rows = given;
  int64_t opens = 0;
  const bool one_line = rows.in_one_line(row_bytes);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t number = number_in(*round.home[i], ids[i]);
    round.row[i] = rows.row(number);
    round.open[opens] = static_cast<uint8_t>(i);
    opens += number == 0;
    ask_for_row(round.row[i], row_bytes, one_line);
  }
  round.opens = 0;
  for (int64_t k = 0; k < opens; ++k) {
    const uint8_t i = round.open[k];
    const bool ends = has_free(*round.home[i]);
    Bucket* behind = index_of(homes, round.hash[i]).behind(round.hash[i], round.home[i]);
    round.row[i] = nullptr;
    round.home[i] = ends ? round.home[i] : behind;  // not null: prefetching address 0 would walk the page table
    for (int more = 0; more < kBehind; ++more) ask_for(round.home[i] + more);
    round.open[round.opens] = i;
    round.opens += !ends;
  }
  round.unknown = opens - round.opens;
}

void resolve_round(const Homes& homes, const RowPlaces& rows, const int64_t* ids, int32_t row_bytes, Round& round) {
  const bool one_line = rows.in_one_line(row_bytes);
  for (int64_t k = 0; k < round.opens; ++k) {
    const uint8_t i = round.open[k];
    const uint64_t hash = round.hash[i];
    uint32_t number = 0;
    for (const Bucket* bucket = round.home[i];; bucket = index_of(homes, hash).behind(hash, bucket))
      if ((number = number_in(*bucket, ids[i])) || has_free(*bucket)) break;
    round.unknown += number == 0;
    if (!number) continue;
    round.row[i] = rows.row(number);
    ask_for_row(round.row[i], row_bytes, one_line);
  }
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
