// Reading rows of a table, by any number of readers at a time.
#include "table/read.h"

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "core/thread_pool.h"
#include "table/contents.h"
#include "table/rounds.h"
#include "table/rows/codec.h"

namespace shoal {
namespace {

constexpr int64_t kReadChunk = 8192;        // ids after which a writer may take the lock
constexpr int64_t kStreamBytes = 16 << 20;  // results larger than this do not stay in any cache
constexpr size_t kLargeScratch = 1 << 20;   // floats; a thread does not keep a larger scratch

// Calls finish(first, n, rows, unknown) for every round, in order; `unknown` of the rows are null. As in rounds.h, four
// rounds are in progress at a time, to wait for memory less. Without them it was not faster at any size, not even for
// tables that fit the cache.
template <class Contents, class Finish>
void find_rounds(const Contents& contents, const int64_t* ids, int64_t n, int32_t row_bytes, Finish finish) {
  const int64_t size = std::clamp(16384 / (row_bytes + 1), 4, kRound);
  const int64_t rounds = (n + size - 1) / size;
  auto first = [&](int64_t round) { return round * size; };
  auto count = [&](int64_t round) { return std::min(size, n - round * size); };
  const Homes homes{kStripesOfCells.of_cell, reinterpret_cast<const char*>(&contents.stripes[0].index),
                    sizeof(contents.stripes[0])};
  const RowPlaces rows = contents.rows.places();
  if (n >= 256)  // a reader may come from other tables
    for (const auto& stripe : contents.stripes) __builtin_prefetch(&stripe.index);
  Round ring[4];
  for (int64_t step = 0; step < rounds + 3; ++step) {
    if (int64_t r = step - 3; r >= 0) finish(first(r), count(r), ring[r % 4].row, ring[r % 4].unknown);
    if (int64_t r = step - 1; r >= 0 && r < rounds)
      SHOAL_DISPATCH(probe_round)(homes, rows, ids + first(r), count(r), row_bytes, ring[r % 4]);
    if (int64_t r = step - 2; r >= 0 && r < rounds)
      SHOAL_DISPATCH(resolve_round)(homes, rows, ids + first(r), row_bytes, ring[r % 4]);
    if (step < rounds) SHOAL_DISPATCH(start_round)(homes, ids + first(step), count(step), ring[step % 4]);
  }
}

}  // namespace

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

void Table::read(const int64_t* ids, int64_t n, Missing missing, const int64_t* padding, UseRows use) const {
  const size_t dim = static_cast<size_t>(layout_.dim);
  const int32_t bytes = layout_.serving ? layout_.row_bytes : 4 * layout_.dim;
  // A filter decides when an id gets a row: until then it reads as zeros.
  if (missing == Missing::initial && (layout_.serving || has_filter())) missing = Missing::zeros;
  thread_local std::vector<float> scratch;  // rows that are decoded or initialized here
  thread_local std::vector<char> fresh;
  auto place = [&](int64_t i) {
    if (scratch.size() < kRound * dim) scratch.resize(kRound * dim);
    return scratch.data() + static_cast<size_t>(i) * dim;
  };
  for (int64_t at = 0; at < n; at += kReadChunk) {
    const int64_t size = std::min(n - at, kReadChunk);
    Locks<false> lock(*this, ids + at, size);
    find_rounds(*contents_, ids + at, size, bytes,
                [&](int64_t first, int64_t count, char* const* found, int64_t unknown) {
                  const auto* rows = reinterpret_cast<const float* const*>(found);
                  const float* read[kRound];
                  if (!plain_ || padding || (unknown && missing != Missing::none)) {
                    const int64_t* asked = ids + at + first;
                    int64_t made[kRound], makes = 0;  // ids whose initial rows are written
                    float* to[kRound];                // to these places
                    for (int64_t i = 0; i < count; ++i) {
                      read[i] = rows[i];
                      if (padding && asked[i] == *padding) {
                        read[i] = nullptr;
                      } else if (found[i]) {
                        if (plain_) continue;
                        read_row(found[i], place(i));
                        read[i] = place(i);
                      } else if (missing == Missing::initial) {
                        read[i] = place(i);
                        if (plain_) {
                          made[makes] = asked[i];
                          to[makes++] = place(i);
                        } else {
                          fresh.resize(static_cast<size_t>(layout_.stride));
                          fresh_row(asked[i], fresh.data());
                          read_row(fresh.data(), place(i));
                        }
                      } else if (missing == Missing::zeros) {
                        std::memset(place(i), 0, 4 * dim);
                        read[i] = place(i);
                      }
                    }
                    if (makes) fresh_weights(made, makes, to);
                    rows = read;
                  }
                  use(at + first, count, rows);
                });
  }
  if (scratch.size() > kLargeScratch) scratch = {};
}

void Table::lookup(const int64_t* ids, int64_t n, float* out, uint8_t* found) const {
  const int64_t dim = layout_.dim;
  const bool stream = n * dim * 4 > kStreamBytes && reinterpret_cast<uintptr_t>(out) % 16 == 0;
  parallel_for(n, 2048, [&](int64_t begin, int64_t end) {
    read(ids + begin, end - begin, Missing::none, nullptr, [&](int64_t first, int64_t count, const float* const* rows) {
      SHOAL_DISPATCH(copy_rows)(rows, count, dim, stream, out + (begin + first) * dim);
      if (found)
        for (int64_t i = 0; i < count; ++i) found[begin + first + i] = rows[i] != nullptr;
    });
#if defined(__SSE2__)
    if (stream) _mm_sfence();
#endif
  });
}

void Table::contains(const int64_t* ids, int64_t n, uint8_t* out) const {
  parallel_for(n, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kReadChunk) {
      const int64_t size = std::min(end - at, kReadChunk);
      Locks<false> lock(*this, ids + at, size);
      find_rounds(*contents_, ids + at, size, 0, [&](int64_t first, int64_t count, char* const* rows, int64_t) {
        for (int64_t i = 0; i < count; ++i) out[at + first + i] = rows[i] != nullptr;
      });
    }
  });
}

}  // namespace shoal
