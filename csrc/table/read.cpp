// Reading: rows out of the table, any number of readers at a time.
#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "core/thread_pool.h"
#include "table/codec.h"
#include "table/contents.h"
#include "table/rounds.h"

namespace shoal {
namespace {

constexpr int64_t kReadChunk = 8192;        // ids between two chances for a writer
constexpr int64_t kStreamBytes = 16 << 20;  // results larger than this do not stay in any cache

}  // namespace

char* Table::find_row(uint64_t hash, int64_t id) const {
  Slot slot = contents_->stripes[stripe_of(hash)].index.find(hash, static_cast<uint64_t>(id));
  return slot ? contents_->rows.row(slot.row()) : nullptr;
}

void Table::read_row(const char* row, float* out) const {
  if (layout_.serving) return decode_row(layout_, row, out);
  std::memcpy(out, row, 4 * static_cast<size_t>(layout_.dim));
  if (plain_) return;
  for (size_t i = 0; i < layout_.segments.size(); ++i) {
    const Segment& s = layout_.segments[i];
    if (s.codec == Codec::fixed_r8) SHOAL_DISPATCH(fake_quantize)(out + s.weight, s.dim, s.r);
    if (s.codec == Codec::one_bit)
      SHOAL_DISPATCH(hash_net)(out + s.weight, s.dim, s.amplitude, scales_[i].load(std::memory_order_relaxed));
  }
}

namespace {

// Copies whole rows past the cache when the result is too large to be in it anyway.
template <int kDim>
void copy_row(float* to, const char* row, bool stream) {
#if defined(__SSE2__)
  if (kDim % 4 == 0 && stream) {
    for (int i = 0; i < kDim; i += 4)
      _mm_stream_ps(to + i, row ? _mm_loadu_ps(reinterpret_cast<const float*>(row) + i) : _mm_setzero_ps());
    return;
  }
#endif
  if (row) {
    std::memcpy(to, row, 4 * kDim);
  } else {
    std::memset(to, 0, 4 * kDim);
  }
}

}  // namespace

// kDim > 0: rows are copies of that many floats. kDim = 0: any row.
template <int kDim>
void Table::copy_chunk(const int64_t* ids, int64_t n, float* out, uint8_t* found, bool stream) const {
  const int32_t dim = kDim ? kDim : layout_.dim;
  const int32_t bytes = kDim ? kDim * 4 : layout_.serving ? layout_.row_bytes : 4 * layout_.dim;
  in_rounds(
      *contents_, n, bytes, [&](int64_t i) { return ids[i]; }, [](int64_t, Slot, bool) { return true; },
      [&](int64_t i, uint64_t hash) { return Resolved{find_row(hash, ids[i]), false}; },
      [&](int64_t i, const char* row, bool) {
        float* to = out + i * dim;
        if (found) found[i] = row != nullptr;
        if constexpr (kDim > 0) {
          copy_row<kDim>(to, row, stream);
        } else if (row) {
          read_row(row, to);
        } else {
          std::memset(to, 0, 4 * static_cast<size_t>(dim));
        }
      });
#if defined(__SSE2__)
  if (stream) _mm_sfence();
#endif
}

void Table::find_chunk(const int64_t* ids, int64_t n, float* out, uint8_t* found, bool stream) const {
  Locks<false> lock(*this, stripes_of(ids, nullptr, n, kAllStripes));
  switch (plain_ ? layout_.dim : 0) {
    case 4:
      return copy_chunk<4>(ids, n, out, found, stream);
    case 8:
      return copy_chunk<8>(ids, n, out, found, stream);
    case 16:
      return copy_chunk<16>(ids, n, out, found, stream);
    case 32:
      return copy_chunk<32>(ids, n, out, found, stream);
    case 64:
      return copy_chunk<64>(ids, n, out, found, stream);
    case 128:
      return copy_chunk<128>(ids, n, out, found, stream);
    default:
      return copy_chunk<0>(ids, n, out, found, stream);
  }
}

void Table::lookup(const int64_t* ids, int64_t n, float* out, uint8_t* found) const {
  const int64_t dim = layout_.dim;
  const bool stream = n * dim * 4 > kStreamBytes && reinterpret_cast<uintptr_t>(out) % 16 == 0;
  parallel_for(n, 2048, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kReadChunk)
      find_chunk(ids + at, std::min(kReadChunk, end - at), out + at * dim, found ? found + at : nullptr, stream);
  });
}

void Table::contains(const int64_t* ids, int64_t n, uint8_t* out) const {
  parallel_for(n, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kReadChunk) {
      const int64_t size = std::min(end - at, kReadChunk);
      Locks<false> lock(*this, stripes_of(ids + at, nullptr, size, kAllStripes));
      in_rounds(
          *contents_, size, 0, [&](int64_t i) { return ids[at + i]; }, [](int64_t, Slot, bool) { return true; },
          [&](int64_t i, uint64_t hash) { return Resolved{find_row(hash, ids[at + i]), false}; },
          [&](int64_t i, const char* row, bool) { out[at + i] = row != nullptr; });
    }
  });
}

}  // namespace shoal
