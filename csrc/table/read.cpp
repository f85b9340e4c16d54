// Reading: rows out of the table, any number of readers at a time.
#include "table/read.h"

#include <algorithm>
#include <cstring>
#include <vector>

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
constexpr int kRound = 32;                  // ids that go through a stage together
constexpr size_t kLargeScratch = 1 << 20;   // floats that a thread does not keep

// What is known of a round of ids.
struct Round {
  uint64_t hash[kRound];
  Bucket* home[kRound];
  uint32_t number[kRound];
  char* row[kRound];  // null: there is none
  int64_t open;       // ids that were not at home
};

// The stages of finding a round; see rounds.h. With kAsk they ask for the memory that the next stage needs.
template <bool kAsk, class Contents>
struct Stages {
  const Contents& contents;
  const int64_t* ids;
  int32_t row_bytes;

  void start(Round& round, int64_t first, int64_t n) const {
    SHOAL_DISPATCH(hash_ids)(ids + first, n, kIndexSalt, round.hash);
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t hash = round.hash[i];
      round.home[i] = contents.stripes[stripe_of(hash)].index.home(hash);
      if (kAsk) __builtin_prefetch(round.home[i], 0, 2);
    }
  }
  void probe(Round& round, int64_t first, int64_t n) const {
    round.open = SHOAL_DISPATCH(probe_homes)(round.home, ids + first, n, round.number);
    for (int64_t i = 0; i < n; ++i) {
      round.row[i] = contents.rows.row(round.number[i]);
      if (kAsk) prefetch(round.row[i], row_bytes);
    }
    if (!kAsk || !round.open) return;
    for (int64_t i = 0; i < n; ++i)
      if (!round.number[i]) contents.stripes[stripe_of(round.hash[i])].index.ask_beyond(round.hash[i], round.home[i]);
  }
  // Probes on for the few ids that were not at home. Returns whether all are found.
  void resolve(Round& round, int64_t first, int64_t n) const {
    if (!round.open) return;
    round.open = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (round.number[i]) continue;
      const uint64_t hash = round.hash[i];
      const Slot slot = contents.stripes[stripe_of(hash)].index.find(hash, static_cast<uint64_t>(ids[first + i]));
      round.row[i] = slot ? contents.rows.row(slot.row()) : nullptr;
      round.open += !slot;
      if (kAsk && slot) prefetch(round.row[i], row_bytes);
    }
  }
};

// finish(first, n, rows, unknown) for every round, in order; `unknown` of the rows are null. Memory works for four
// rounds at once, or, where all of it is `near`, one round is done after the other.
template <class Contents, class Finish>
void find_rounds(const Contents& contents, const int64_t* ids, int64_t n, int32_t row_bytes, bool near, Finish finish) {
  const int64_t size = std::clamp(16384 / (row_bytes + 1), 4, kRound);
  const int64_t rounds = (n + size - 1) / size;
  auto first = [&](int64_t round) { return round * size; };
  auto count = [&](int64_t round) { return std::min(size, n - round * size); };
  if (near) {
    const Stages<false, Contents> stages{contents, ids, row_bytes};
    Round round;
    for (int64_t r = 0; r < rounds; ++r) {
      stages.start(round, first(r), count(r));
      stages.probe(round, first(r), count(r));
      stages.resolve(round, first(r), count(r));
      finish(first(r), count(r), round.row, round.open);
    }
    return;
  }
  const Stages<true, Contents> stages{contents, ids, row_bytes};
  Round ring[4];
  for (int64_t step = 0; step < rounds + 3; ++step) {
    if (int64_t r = step - 3; r >= 0) finish(first(r), count(r), ring[r % 4].row, ring[r % 4].open);
    if (int64_t r = step - 1; r >= 0 && r < rounds) stages.probe(ring[r % 4], first(r), count(r));
    if (int64_t r = step - 2; r >= 0 && r < rounds) stages.resolve(ring[r % 4], first(r), count(r));
    if (step < rounds) stages.start(ring[step % 4], first(step), count(step));
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
  // A filter decides when an id gets a row: until then it has none.
  if (missing == Missing::initial && (layout_.serving || has_filter())) missing = Missing::zeros;
  thread_local std::vector<float> scratch;  // rows that are not what memory holds
  thread_local std::vector<char> fresh;
  auto place = [&](int64_t i) {
    if (scratch.size() < kRound * dim) scratch.resize(kRound * dim);
    return scratch.data() + static_cast<size_t>(i) * dim;
  };
  for (int64_t at = 0; at < n; at += kReadChunk) {
    const int64_t size = std::min(n - at, kReadChunk);
    Locks<false> lock(*this, ids + at, size);
    find_rounds(*contents_, ids + at, size, bytes, near(),
                [&](int64_t first, int64_t count, char* const* found, int64_t unknown) {
                  const auto* rows = reinterpret_cast<const float* const*>(found);
                  const float* read[kRound];
                  if (!plain_ || padding || (unknown && missing != Missing::none)) {
                    const int64_t* asked = ids + at + first;
                    for (int64_t i = 0; i < count; ++i) {
                      read[i] = rows[i];
                      if (padding && asked[i] == *padding) {
                        read[i] = nullptr;
                      } else if (found[i]) {
                        if (plain_) continue;
                        read_row(found[i], place(i));
                        read[i] = place(i);
                      } else if (missing == Missing::initial) {
                        fresh.resize(static_cast<size_t>(layout_.stride));
                        fresh_row(asked[i], fresh.data());
                        read_row(fresh.data(), place(i));
                        read[i] = place(i);
                      } else if (missing == Missing::zeros) {
                        std::memset(place(i), 0, 4 * dim);
                        read[i] = place(i);
                      }
                    }
                    rows = read;
                  }
                  use(at + first, count, rows);
                });
  }
  if (scratch.size() > kLargeScratch) scratch = {};
}

bool Table::near() const { return false; }

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
      find_rounds(*contents_, ids + at, size, 0, near(), [&](int64_t first, int64_t count, char* const* rows, int64_t) {
        for (int64_t i = 0; i < count; ++i) out[at + first + i] = rows[i] != nullptr;
      });
    }
  });
}

}  // namespace shoal
