#include "table/table.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "core/hash.h"
#include "core/thread_pool.h"
#include "table/codec.h"
#include "table/index.h"
#include "table/memory.h"

namespace shoal {
namespace {

constexpr int64_t kReadChunk = 8192;        // ids between two chances for a writer
constexpr int64_t kWriteChunk = 2048;       // ids between two chances for a reader
constexpr int64_t kStreamBytes = 16 << 20;  // results larger than this do not stay in any cache
constexpr uint64_t kAllStripes = ~uint64_t{0};

uint64_t hash_of(int64_t id) { return index_hash(static_cast<uint64_t>(id)); }

// Stripes have different shares of the ids, from one to two in equal ratios: so at any time some of them grow, and
// never all at once.
struct Stripes {
  static constexpr int kCells = 1 << Index::kStripeBits;
  uint8_t of_cell[kCells];
  int first_cell[Table::kStripes];
  Stripes() {
    double total = 0, sum = 0;
    for (int s = 0; s < Table::kStripes; ++s) total += std::exp2(s / double{Table::kStripes});
    for (int s = 0, cell = 0; s < Table::kStripes; ++s) {
      sum += std::exp2(s / double{Table::kStripes});
      first_cell[s] = cell;
      for (; cell < std::lround(kCells * sum / total); ++cell) of_cell[cell] = static_cast<uint8_t>(s);
    }
  }
  // How many of `ids` a stripe has.
  int64_t share(size_t stripe, int64_t ids) const {
    const int end = stripe + 1 < Table::kStripes ? first_cell[stripe + 1] : kCells;
    return ids / kCells * (end - first_cell[stripe]);
  }
  // The part, of `parts`, that owns the stripe of a cell.
  int part(int cell, int parts) const { return first_cell[of_cell[cell]] * parts / kCells; }
};
const Stripes kStripesOfCells;

int stripe_of(uint64_t hash) { return kStripesOfCells.of_cell[hash >> (64 - Index::kStripeBits)]; }

// Every cache line of the range, whatever it is aligned to.
void prefetch(const void* address, int32_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  for (uintptr_t line = begin & ~uintptr_t{63}; line < begin + static_cast<uintptr_t>(bytes); line += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(line));
}

// Runs start(i), peek(i), find(i) and finish(i) for every i in [0, n), each in order, kAhead apart: the memory that one
// stage asks for is on its way while the others work. If find throws, what it has found so far is finished first.
constexpr int kAhead = 12;
constexpr int kRing = 64;  // what a stage leaves for later ones, by i % kRing
template <class Start, class Peek, class Find, class Finish>
void pipeline(int64_t n, Start start, Peek peek, Find find, Finish finish) {
  int64_t peeked = 0, found = 0, finished = 0;
  try {
    for (int64_t i = 0; finished < n; ++i) {
      if (i >= 3 * kAhead) finish(finished++);
      if (i >= 2 * kAhead && found < n) {
        find(found);
        ++found;
      }
      if (i >= kAhead && peeked < n) peek(peeked++);
      if (i < n) start(i);
    }
  } catch (...) {
    while (finished < found) finish(finished++);
    throw;
  }
}

// The stripes that a chunk of ids needs: those of its ids if it is short, else all that it may be in.
uint64_t stripes_of(const int64_t* ids, const uint32_t* positions, int64_t n, uint64_t possible) {
  if (n >= 256) return possible;
  uint64_t stripes = 0;
  for (int64_t i = 0; i < n; ++i) stripes |= uint64_t{1} << stripe_of(hash_of(ids[positions ? positions[i] : i]));
  return stripes;
}

}  // namespace

bool Expiry::stale(int64_t id, uint32_t time, int64_t now) const {
  uint32_t days = days_of_slot.empty() ? default_days : days_of_slot[static_cast<uint64_t>(id) >> 48 & 0x7FFF];
  return now - static_cast<int64_t>(time) >= static_cast<int64_t>(days) * 86400;
}

struct Table::Stripe {
  Stripe(BlockArena* blocks, uint32_t full_buckets) : index(blocks, full_buckets) {}
  Index index;
  std::vector<uint32_t> spare;                        // rows of removed ids
  uint32_t next_row = 0, rows_left = 0;               // fresh rows reserved for this stripe
  std::vector<std::pair<uint32_t, int64_t>> removed;  // (epoch, id), while changes are tracked
};

struct Table::Contents {
  Contents(int32_t stride, int64_t expected) : rows(stride), stripes(make_stripes(expected)) {}

  // After this take_row() succeeds once more.
  void reserve_rows(Stripe& stripe) {
    const auto count = static_cast<uint32_t>(std::clamp<int64_t>(stripe.index.size() / 8, 1, 64));
    stripe.next_row = rows.allocate(count);
    stripe.rows_left = count;
  }
  uint32_t take_row(Stripe& stripe) {
    if (stripe.spare.empty()) {
      --stripe.rows_left;
      return stripe.next_row++;
    }
    uint32_t row = stripe.spare.back();
    stripe.spare.pop_back();
    return row;
  }

  RowArena rows;
  BlockArena blocks;
  std::array<Stripe, kStripes> stripes;

 private:
  template <size_t... I>
  std::array<Stripe, kStripes> make_stripes(int64_t expected, std::index_sequence<I...>) {
    return {Stripe(&blocks, Index::fitting_buckets(kStripesOfCells.share(I, expected)))...};
  }
  std::array<Stripe, kStripes> make_stripes(int64_t expected) {
    return make_stripes(expected, std::make_index_sequence<kStripes>{});
  }
};

// The locks of a set of stripes, taken in rising order, so that two holders never wait for each other.
template <bool kExclusive>
class Table::Locks {
 public:
  Locks(const Table& table, uint64_t stripes) : locks_(table.locks_), stripes_(stripes) {
    for (uint64_t s = stripes_; s; s &= s - 1) {
      RwLock& lock = locks_[std::countr_zero(s)];
      kExclusive ? lock.lock() : lock.lock_shared();
    }
  }
  ~Locks() {
    for (uint64_t s = stripes_; s; s &= s - 1) {
      RwLock& lock = locks_[std::countr_zero(s)];
      kExclusive ? lock.unlock() : lock.unlock_shared();
    }
  }
  Locks(const Locks&) = delete;

 private:
  RwLock* locks_;
  uint64_t stripes_;
};

struct Table::Write {
  Kind kind;
  const int64_t* ids;
  int64_t n;
  const float* values = nullptr;
  uint32_t time = 0;
  const uint8_t* drop = nullptr;  // positions to pass over
  const float* rates = nullptr;
  int64_t global_step = 0;
  bool dedup = false;
  const Rows* rows = nullptr;
  int32_t* existed = nullptr;
  float* out = nullptr;
  uint64_t noise = 0;
};

Table::Table(Layout layout, uint64_t seed, int64_t expected)
    : layout_(std::move(layout)),
      seed_(hash_id(seed + 0x9E3779B97F4A7C15ULL)),
      expected_(expected),
      contents_(std::make_unique<Contents>(layout_.stride, expected)),
      scales_(layout_.segments.size()) {
  plain_ = !layout_.serving;
  for (size_t i = 0; i < layout_.segments.size(); ++i) {
    const Segment& s = layout_.segments[i];
    steps_.push_back(step_function(s.opt));
    plain_ &= s.codec == Codec::fp32 || s.codec == Codec::fp16;
    scales_[i] = s.init_scale;
  }
}

Table::~Table() = default;

int Table::stripe_of_id(int64_t id) { return stripe_of(hash_of(id)); }

int64_t Table::size() const {
  int64_t total = 0;
  for (int i = 0; i < kStripes; ++i) {
    Locks<false> lock(*this, uint64_t{1} << i);
    total += contents_->stripes[i].index.size();
  }
  return total;
}

int64_t Table::bytes() const {
  Locks<false> lock(*this, kAllStripes);
  int64_t total = contents_->rows.bytes() + contents_->blocks.bytes() + static_cast<int64_t>(sizeof(Contents));
  for (const Stripe& s : contents_->stripes)
    total += s.index.bytes() + static_cast<int64_t>(s.spare.capacity() * 4 + s.removed.capacity() * 16);
  return total;
}

void Table::raise_max_update_time(int64_t time) {
  int64_t seen = max_update_time_.load();
  while (seen < time && !max_update_time_.compare_exchange_weak(seen, time)) {
  }
}

// --- reading --------------------------------------------------------------------------------------------------------

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
  const Contents& contents = *contents_;
  const int32_t dim = kDim ? kDim : layout_.dim;
  const int32_t bytes = kDim ? kDim * 4 : layout_.serving ? layout_.row_bytes : 4 * layout_.dim;
  uint64_t hashes[kRing];
  const char* rows[kRing];
  auto start = [&](int64_t i) {
    uint64_t hash = hash_of(ids[i]);
    hashes[i % kRing] = hash;
    __builtin_prefetch(contents.stripes[stripe_of(hash)].index.home(hash));
  };
  auto use_row = [&](int64_t i, uint32_t row) {
    rows[i % kRing] = contents.rows.row(row);
    prefetch(rows[i % kRing], bytes);
  };
  auto peek = [&](int64_t i) {
    const uint64_t hash = hashes[i % kRing];
    rows[i % kRing] = nullptr;
    const uint32_t row = contents.stripes[stripe_of(hash)].index.peek(hash, static_cast<uint64_t>(ids[i]));
    if (row != kFreeRow) use_row(i, row);
  };
  auto find = [&](int64_t i) {
    const uint64_t hash = hashes[i % kRing];
    if (!rows[i % kRing]) {
      Slot slot = contents.stripes[stripe_of(hash)].index.find(hash, static_cast<uint64_t>(ids[i]));
      if (slot) use_row(i, slot.row());
    }
    if (found) found[i] = rows[i % kRing] != nullptr;
  };
  auto copy = [&](int64_t i) {
    const char* row = rows[i % kRing];
    float* to = out + i * dim;
    if constexpr (kDim > 0) {
      copy_row<kDim>(to, row, stream);
    } else if (row) {
      read_row(row, to);
    } else {
      std::memset(to, 0, 4 * static_cast<size_t>(dim));
    }
  };
  pipeline(n, start, peek, find, copy);
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
      const int64_t stop = std::min(end, at + kReadChunk);
      Locks<false> lock(*this, stripes_of(ids + at, nullptr, stop - at, kAllStripes));
      for (int64_t i = at; i < stop; ++i) {
        if (i + 16 < stop) {
          uint64_t ahead = hash_of(ids[i + 16]);
          __builtin_prefetch(contents_->stripes[stripe_of(ahead)].index.home(ahead));
        }
        uint64_t hash = hash_of(ids[i]);
        out[i] = static_cast<bool>(contents_->stripes[stripe_of(hash)].index.find(hash, static_cast<uint64_t>(ids[i])));
      }
    }
  });
}

// --- writing --------------------------------------------------------------------------------------------------------

void Table::fresh_row(int64_t id, char* row) const {
  if (layout_.serving) {
    std::vector<float> zeros(static_cast<size_t>(layout_.dim), 0.0f);
    return encode_row(layout_, zeros.data(), row);
  }
  auto* w = reinterpret_cast<float*>(row);
  const uint64_t noise = seed_ ^ hash_id(static_cast<uint64_t>(id));
  for (size_t i = 0; i < layout_.segments.size(); ++i) {
    const Segment& s = layout_.segments[i];
    SHOAL_DISPATCH(init_weights)(s, static_cast<int32_t>(i), noise, w + s.weight);
    init_state(s, row + s.state);
  }
}

void Table::step_row(const Write& write, char* row, const float* grads, uint64_t noise, float* scratch) const {
  auto* w = reinterpret_cast<float*>(row);
  for (size_t i = 0; i < layout_.segments.size(); ++i) {
    const Segment& s = layout_.segments[i];
    const float* g = grads + s.weight;
    if (s.codec == Codec::one_bit) {
      const float scale = scales_[i].load(std::memory_order_relaxed);
      SHOAL_DISPATCH(hash_net_gradient)(w + s.weight, g, s.dim, s.amplitude, scale, scratch);
      g = scratch;
    }
    steps_[i](s, w + s.weight, row + s.state, g, write.rates[i], write.global_step);
    if (s.stochastic_rounding) SHOAL_DISPATCH(round_to_half)(w + s.weight, s.dim, hash_id(noise + i));
  }
}

// Asks for a row before it is needed.
void Table::peek_row(uint64_t hash, int64_t id) const {
  const uint32_t row = contents_->stripes[stripe_of(hash)].index.peek(hash, static_cast<uint64_t>(id));
  if (row != kFreeRow) prefetch(contents_->rows.row(row), layout_.row_bytes);
}

char* Table::find_or_insert(uint64_t hash, int64_t id, uint32_t time, bool* created) {
  Contents& contents = *contents_;
  Stripe& stripe = contents.stripes[stripe_of(hash)];
  if (stripe.rows_left == 0 && stripe.spare.empty()) contents.reserve_rows(stripe);  // may throw; nothing has changed
  Slot slot = stripe.index.find_or_insert(hash, static_cast<uint64_t>(id), created);
  if (*created) slot.row() = contents.take_row(stripe);
  if (slot.time() != time) slot.time() = time;  // a line that did not change need not be written back
  if (uint32_t epoch = epoch_.load(std::memory_order_relaxed)) contents.rows.set_epoch(slot.row(), epoch);
  return contents.rows.row(slot.row());
}

template <Table::Kind kKind>
void Table::write_row(const Write& write, int64_t position, char* row, bool created, float* scratch) const {
  const int32_t dim = layout_.dim;
  const float* value = write.values ? write.values + position * dim : nullptr;
  if constexpr (kKind == Kind::load) {
    std::memcpy(row, write.rows->rows.data() + position * layout_.stride, static_cast<size_t>(layout_.row_bytes));
    return;
  }
  if (layout_.serving) {
    if constexpr (kKind == Kind::assign) encode_row(layout_, value, row);
    if constexpr (kKind == Kind::reinitialize) fresh_row(write.ids[position], row);
    if constexpr (kKind == Kind::assign_add) {
      if (created) return encode_row(layout_, value, row);
      decode_row(layout_, row, scratch);
      SHOAL_DISPATCH(add)(value, dim, scratch);
      encode_row(layout_, scratch, row);
    }
    return;
  }
  if constexpr (kKind == Kind::assign) {
    if (created)
      for (const Segment& s : layout_.segments) init_state(s, row + s.state);
  } else if (created || kKind == Kind::reinitialize) {
    fresh_row(write.ids[position], row);
  }
  auto* w = reinterpret_cast<float*>(row);
  if constexpr (kKind == Kind::assign) std::memcpy(w, value, 4 * static_cast<size_t>(dim));
  if constexpr (kKind == Kind::assign_add) SHOAL_DISPATCH(add)(value, dim, w);
  if constexpr (kKind == Kind::gradients)
    step_row(write, row, value, write.noise ^ hash_id(static_cast<uint64_t>(position)), scratch);
  if constexpr (kKind == Kind::insert) read_row(row, write.out + position * dim);
}

// The positions (all, if null) are handled in order; their ids are in `owned` stripes, which no other part writes to.
template <Table::Kind kKind>
void Table::write_part(const Write& write, const uint32_t* positions, int64_t n, uint64_t owned) {
  const bool erase_zeros = kKind == Kind::assign && layout_.skip_zero;
  std::vector<float> scratch(static_cast<size_t>(layout_.dim));
  uint64_t hashes[kRing];
  char* rows[kRing];  // null: nothing to write
  bool created[kRing];
  for (int64_t chunk = 0; chunk < n; chunk += kWriteChunk) {
    const int64_t size = std::min(n - chunk, kWriteChunk);
    auto position = [&](int64_t i) { return positions ? int64_t{positions[chunk + i]} : chunk + i; };
    auto start = [&](int64_t i) {
      const uint64_t hash = hash_of(write.ids[position(i)]);
      hashes[i % kRing] = hash;
      __builtin_prefetch(contents_->stripes[stripe_of(hash)].index.home(hash), 1);
    };
    auto peek = [&](int64_t i) { peek_row(hashes[i % kRing], write.ids[position(i)]); };
    auto find = [&](int64_t i) {
      const int64_t at = position(i);
      const int64_t id = write.ids[at];
      const uint64_t hash = hashes[i % kRing];
      rows[i % kRing] = nullptr;
      if (write.drop && write.drop[at]) return;
      if (erase_zeros && is_zero(write.values + at * layout_.dim, layout_.dim)) {
        Stripe& stripe = contents_->stripes[stripe_of(hash)];
        if (Slot slot = stripe.index.find(hash, static_cast<uint64_t>(id))) {
          forget(stripe_of(hash), id, slot.row());
          stripe.index.erase(hash, slot);
        }
        return;
      }
      const uint32_t time = kKind == Kind::load ? write.rows->times[at] : write.time;
      rows[i % kRing] = find_or_insert(hash, id, time, &created[i % kRing]);
      prefetch(rows[i % kRing], layout_.row_bytes);
      if (write.values) prefetch(write.values + at * layout_.dim, 4 * layout_.dim);
      if constexpr (kKind == Kind::reinitialize) write.existed[at] = !created[i % kRing];
    };
    auto finish = [&](int64_t i) {
      if (rows[i % kRing]) write_row<kKind>(write, position(i), rows[i % kRing], created[i % kRing], scratch.data());
    };
    Locks<true> lock(*this, stripes_of(positions ? write.ids : write.ids + chunk,
                                       positions ? positions + chunk : nullptr, size, owned));
    pipeline(size, start, peek, find, finish);
  }
}

// Gradients with dedup: those of equal ids are summed in input order and stepped once.
void Table::write_groups(const Write& write, const uint32_t* positions, int64_t n, uint64_t owned) {
  const int32_t dim = layout_.dim;
  // group_of[k] is the group of the k-th position that is not dropped; groups are numbered by first occurrence.
  std::vector<uint32_t> kept, group_of, first, count;
  kept.reserve(static_cast<size_t>(n));
  group_of.reserve(static_cast<size_t>(n));
  size_t mask = std::bit_ceil(static_cast<size_t>(2 * n + 1)) - 1;
  std::vector<uint32_t> table(mask + 1, 0);  // group number + 1
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t position = positions ? positions[i] : static_cast<uint32_t>(i);
    if (write.drop && write.drop[position]) continue;
    const int64_t id = write.ids[position];
    size_t slot = hash_of(id) & mask;
    while (table[slot] && write.ids[first[table[slot] - 1]] != id) slot = (slot + 1) & mask;
    if (!table[slot]) {
      first.push_back(position);
      count.push_back(0);
      table[slot] = static_cast<uint32_t>(first.size());
    }
    kept.push_back(position);
    group_of.push_back(table[slot] - 1);
    ++count[table[slot] - 1];
  }
  const int64_t groups = static_cast<int64_t>(first.size());
  std::vector<uint32_t> start(static_cast<size_t>(groups) + 1, 0);
  for (int64_t g = 0; g < groups; ++g) start[g + 1] = start[g] + count[g];
  std::vector<uint32_t> members(kept.size()), fill(start.begin(), start.end() - 1);
  for (size_t k = 0; k < kept.size(); ++k) members[fill[group_of[k]]++] = kept[k];

  std::vector<float> scratch(static_cast<size_t>(dim)), sum(static_cast<size_t>(dim));
  uint64_t hashes[kRing];
  char* rows[kRing];
  bool created[kRing];
  for (int64_t chunk = 0; chunk < groups; chunk += kWriteChunk) {
    const int64_t size = std::min(groups - chunk, kWriteChunk);
    auto start_group = [&](int64_t i) {
      const uint64_t hash = hash_of(write.ids[first[chunk + i]]);
      hashes[i % kRing] = hash;
      __builtin_prefetch(contents_->stripes[stripe_of(hash)].index.home(hash), 1);
    };
    auto peek = [&](int64_t i) { peek_row(hashes[i % kRing], write.ids[first[chunk + i]]); };
    auto find = [&](int64_t i) {
      const int64_t at = first[chunk + i];
      rows[i % kRing] = find_or_insert(hashes[i % kRing], write.ids[at], write.time, &created[i % kRing]);
      prefetch(rows[i % kRing], layout_.row_bytes);
      prefetch(write.values + at * dim, 4 * dim);
    };
    auto finish = [&](int64_t i) {
      const int64_t g = chunk + i;
      const float* grads = write.values + int64_t{first[g]} * dim;
      if (count[g] > 1) {
        std::memcpy(sum.data(), grads, 4 * static_cast<size_t>(dim));
        for (uint32_t k = start[g] + 1; k < start[g + 1]; ++k)
          SHOAL_DISPATCH(add)(write.values + int64_t{members[k]} * dim, dim, sum.data());
        grads = sum.data();
      }
      if (created[i % kRing]) fresh_row(write.ids[first[g]], rows[i % kRing]);
      step_row(write, rows[i % kRing], grads, write.noise ^ hash_id(first[g]), scratch.data());
    };
    Locks<true> lock(*this, stripes_of(write.ids, first.data() + chunk, size, owned));
    pipeline(size, start_group, peek, find, finish);
  }
}

void Table::write(const Write& write) {
  if (write.n > (int64_t{1} << 31)) throw std::invalid_argument("one call takes at most 2147483648 ids");
  auto part = [&](const uint32_t* positions, int64_t n, uint64_t owned) {
    switch (write.kind) {
      case Kind::assign:
        return write_part<Kind::assign>(write, positions, n, owned);
      case Kind::assign_add:
        return write_part<Kind::assign_add>(write, positions, n, owned);
      case Kind::gradients:
        return write.dedup ? write_groups(write, positions, n, owned)
                           : write_part<Kind::gradients>(write, positions, n, owned);
      case Kind::reinitialize:
        return write_part<Kind::reinitialize>(write, positions, n, owned);
      case Kind::load:
        return write_part<Kind::load>(write, positions, n, owned);
      case Kind::insert:
        return write_part<Kind::insert>(write, positions, n, owned);
    }
  };
  const int threads = num_threads();
  if (threads == 1 || write.n < 4096) return part(nullptr, write.n, kAllStripes);

  // Stable partition of the positions by stripe: blocks of the input count first, then write where they know they may.
  const int parts = std::min(threads, kStripes);
  // Neighbouring stripes with about equal shares of the ids.
  uint8_t part_of_cell[Stripes::kCells];
  std::vector<uint64_t> owned(static_cast<size_t>(parts), 0);
  for (int cell = 0; cell < Stripes::kCells; ++cell) {
    part_of_cell[cell] = static_cast<uint8_t>(kStripesOfCells.part(cell, parts));
    owned[part_of_cell[cell]] |= uint64_t{1} << kStripesOfCells.of_cell[cell];
  }
  auto part_of = [&](int64_t i) { return part_of_cell[hash_of(write.ids[i]) >> (64 - Index::kStripeBits)]; };
  const int64_t blocks = std::min<int64_t>(4 * threads, (write.n + 4095) / 4096);
  std::vector<int64_t> offsets(static_cast<size_t>(blocks * parts));
  auto range = [&](int64_t block) { return write.n / blocks * block + std::min(block, write.n % blocks); };
  parallel_parts(blocks, [&](int64_t block) {
    int64_t* counts = &offsets[block * parts];
    for (int64_t i = range(block); i < range(block + 1); ++i) ++counts[part_of(i)];
  });
  std::vector<int64_t> begins(static_cast<size_t>(parts) + 1, 0);
  for (int p = 0; p < parts; ++p) {
    int64_t at = begins[p];
    for (int64_t block = 0; block < blocks; ++block) at += std::exchange(offsets[block * parts + p], at);
    begins[p + 1] = at;
  }
  std::unique_ptr<uint32_t[]> positions(new uint32_t[static_cast<size_t>(write.n)]);
  parallel_parts(blocks, [&](int64_t block) {
    int64_t* next = &offsets[block * parts];
    for (int64_t i = range(block); i < range(block + 1); ++i) positions[next[part_of(i)]++] = static_cast<uint32_t>(i);
  });
  parallel_parts(parts, [&](int64_t p) { part(positions.get() + begins[p], begins[p + 1] - begins[p], owned[p]); });
}

namespace {

// Numbers the distinct ids among those with wanted[i] by first occurrence; group[i] is the number of ids[i].
struct Groups {
  Groups(const int64_t* ids, int64_t n, const uint8_t* wanted) : group(static_cast<size_t>(n)) {
    const int64_t asked = n - std::count(wanted, wanted + n, 0);
    const size_t mask = std::bit_ceil(static_cast<size_t>(2 * asked + 1)) - 1;
    std::vector<uint32_t> table(mask + 1, 0);  // group number + 1
    for (int64_t i = 0; i < n; ++i) {
      if (!wanted[i]) continue;
      size_t slot = hash_of(ids[i]) & mask;
      while (table[slot] && ids[first[table[slot] - 1]] != ids[i]) slot = (slot + 1) & mask;
      if (!table[slot]) {
        first.push_back(static_cast<uint32_t>(i));
        count.push_back(0);
        table[slot] = static_cast<uint32_t>(first.size());
      }
      group[i] = table[slot] - 1;
      ++count[group[i]];
    }
  }
  std::vector<uint32_t> group, first, count;
};

}  // namespace

// Which positions the filter drops. Empty: none. With dedup an id is asked about once, with its number of occurrences;
// with remember_admitted an id that came in is in for the rest of the call.
std::vector<uint8_t> Table::filtered(const int64_t* ids, int64_t n, bool dedup, bool remember_admitted) {
  if (!filter_ || !filter_->active() || n == 0) return {};
  std::vector<uint8_t> drop(static_cast<size_t>(n));
  contains(ids, n, drop.data());
  for (auto& d : drop) d = !d;
  if (!dedup && !remember_admitted) {
    for (int64_t i = 0; i < n; ++i) drop[i] = drop[i] && filter_->should_be_filtered(ids[i], 1);
    return drop;
  }
  Groups groups(ids, n, drop.data());
  std::vector<uint8_t> out(groups.first.size());  // of each group: is it kept out
  if (dedup) {
    for (size_t g = 0; g < out.size(); ++g) out[g] = filter_->should_be_filtered(ids[groups.first[g]], groups.count[g]);
    for (int64_t i = 0; i < n; ++i) drop[i] = drop[i] && out[groups.group[i]];
    return drop;
  }
  std::fill(out.begin(), out.end(), uint8_t{1});
  for (int64_t i = 0; i < n; ++i) {
    if (!drop[i]) continue;
    uint8_t& kept_out = out[groups.group[i]];
    kept_out = kept_out && filter_->should_be_filtered(ids[i], 1);
    drop[i] = kept_out;
  }
  return drop;
}

std::vector<uint8_t> Table::bad_gradients(const int64_t* ids, int64_t n, const float* grads, BadGradient bad) const {
  if (bad == BadGradient::ignore) return {};
  const int64_t dim = layout_.dim;
  std::atomic<bool> clean{true};
  parallel_for(n, std::max<int64_t>(1, 65536 / dim), [&](int64_t begin, int64_t end) {
    if (!SHOAL_DISPATCH(all_finite)(grads + begin * dim, (end - begin) * dim)) clean = false;
  });
  if (clean) return {};
  std::vector<uint8_t> drop(static_cast<size_t>(n), 0);
  for (int64_t i = 0; i < n; ++i) {
    drop[i] = !SHOAL_DISPATCH(all_finite)(grads + i * dim, dim);
    if (drop[i] && bad == BadGradient::raise) throw NonFiniteGradient{i, ids[i]};
  }
  return drop;
}

void Table::update_scales(int64_t global_step) {
  for (size_t i = 0; i < layout_.segments.size(); ++i) {
    const Segment& s = layout_.segments[i];
    if (s.codec != Codec::one_bit || s.step_size <= 0 || global_step < 0 || global_step % s.step_size != 0) continue;
    double grown = s.init_scale * std::sqrt(1 + 0.005 * static_cast<double>(global_step));
    scales_[i].store(std::min(static_cast<float>(grown), s.max_scale));
  }
}

void Table::assign(const int64_t* ids, int64_t n, const float* values, uint32_t time) {
  raise_max_update_time(time);
  auto drop = filtered(ids, n, false, false);
  write({.kind = Kind::assign,
         .ids = ids,
         .n = n,
         .values = values,
         .time = time,
         .drop = drop.empty() ? nullptr : drop.data()});
}

void Table::assign_add(const int64_t* ids, int64_t n, const float* values, uint32_t time) {
  raise_max_update_time(time);
  auto drop = filtered(ids, n, false, true);
  write({.kind = Kind::assign_add,
         .ids = ids,
         .n = n,
         .values = values,
         .time = time,
         .drop = drop.empty() ? nullptr : drop.data()});
}

int64_t Table::apply_gradients(const int64_t* ids, int64_t n, const float* grads, const float* rates,
                               int64_t global_step, uint32_t time, bool dedup, BadGradient bad) {
  auto skip = bad_gradients(ids, n, grads, bad);
  const int64_t skipped = std::count(skip.begin(), skip.end(), 1);
  raise_max_update_time(time);
  std::vector<int64_t> good;  // a skipped occurrence does not reach the filter
  std::vector<uint8_t> drop;
  if (skipped == 0) {
    drop = filtered(ids, n, dedup, false);
  } else {
    for (int64_t i = 0; i < n; ++i)
      if (!skip[i]) good.push_back(ids[i]);
    auto of_good = filtered(good.data(), static_cast<int64_t>(good.size()), dedup, false);
    drop = std::move(skip);
    if (!of_good.empty())
      for (int64_t i = 0, k = 0; i < n; ++i)
        if (!drop[i]) drop[i] = of_good[k++];
  }
  const int64_t dropped = std::count(drop.begin(), drop.end(), 1);
  if (dropped == n) return skipped;
  update_scales(global_step);
  write({.kind = Kind::gradients,
         .ids = ids,
         .n = n,
         .values = grads,
         .time = time,
         .drop = dropped ? drop.data() : nullptr,
         .rates = rates,
         .global_step = global_step,
         .dedup = dedup,
         .noise = hash_id(seed_ + calls_.fetch_add(1))});
  if (touched_) {
    if (!dropped) {
      touched_->insert(ids, n, touched_number_);
    } else {
      std::vector<int64_t> passed;
      for (int64_t i = 0; i < n; ++i)
        if (!drop[i]) passed.push_back(ids[i]);
      touched_->insert(passed.data(), static_cast<int64_t>(passed.size()), touched_number_);
    }
  }
  return skipped;
}

void Table::reinitialize(const int64_t* ids, int64_t n, uint32_t now, int32_t* existed) {
  write({.kind = Kind::reinitialize, .ids = ids, .n = n, .time = now, .existed = existed});
  if (touched_) touched_->insert(ids, n, touched_number_);
}

void Table::lookup_or_insert(const int64_t* ids, int64_t n, uint32_t time, float* out) {
  std::vector<uint8_t> found(static_cast<size_t>(n));
  lookup(ids, n, out, found.data());
  std::vector<int64_t> missing, where;
  for (int64_t i = 0; i < n; ++i) {
    if (found[i]) continue;
    missing.push_back(ids[i]);
    where.push_back(i);
  }
  if (missing.empty()) return;
  raise_max_update_time(time);
  const int64_t m = static_cast<int64_t>(missing.size());
  auto drop = filtered(missing.data(), m, false, true);
  std::vector<float> rows(static_cast<size_t>(m) * layout_.dim, 0.0f);
  write({.kind = Kind::insert,
         .ids = missing.data(),
         .n = m,
         .time = time,
         .drop = drop.empty() ? nullptr : drop.data(),
         .out = rows.data()});
  for (int64_t i = 0; i < m; ++i)
    std::memcpy(out + where[i] * layout_.dim, &rows[static_cast<size_t>(i) * layout_.dim], 4 * size_t(layout_.dim));
}

// --- removal --------------------------------------------------------------------------------------------------------

void Table::forget(int stripe, int64_t id, uint32_t row) {
  Stripe& s = contents_->stripes[stripe];
  s.spare.push_back(row);
  if (uint32_t epoch = epoch_.load(std::memory_order_relaxed)) s.removed.emplace_back(epoch, id);
}

int64_t Table::evict(const Expiry& expiry, int64_t now) {
  std::atomic<int64_t> total{0};
  parallel_parts(kStripes, [&](int64_t stripe) {
    Locks<true> lock(*this, uint64_t{1} << stripe);
    total += contents_->stripes[stripe].index.erase_if([&](Slot slot) {
      const auto id = static_cast<int64_t>(slot.id());
      if (!expiry.stale(id, slot.time(), now)) return false;
      forget(static_cast<int>(stripe), id, slot.row());
      return true;
    });
  });
  return total;
}

int64_t Table::erase(const int64_t* ids, int64_t n) {
  int64_t erased = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = hash_of(ids[i]);
    const int stripe = stripe_of(hash);
    Locks<true> lock(*this, uint64_t{1} << stripe);
    Index& index = contents_->stripes[stripe].index;
    if (Slot slot = index.find(hash, static_cast<uint64_t>(ids[i]))) {
      forget(stripe, ids[i], slot.row());
      index.erase(hash, slot);
      ++erased;
    }
  }
  return erased;
}

void Table::clear() {
  Table empty(layout_, 0, expected_);
  swap_contents(empty);
}

void Table::swap_contents(Table& other) {
  if (other.layout_.stride != layout_.stride || other.layout_.row_bytes != layout_.row_bytes)
    throw std::invalid_argument("swap_contents needs a table of the same layout");
  Locks<true> lock(*this, kAllStripes);
  std::swap(contents_, other.contents_);
  if (epoch_.load()) {
    contents_->rows.track();
    oldest_epoch_.store(epoch_.fetch_add(1) + 1);
  }
}

// --- copies of rows -------------------------------------------------------------------------------------------------

namespace {

// Rows of the slots, appended in their order.
void copy_rows(const RowArena& arena, const std::vector<uint32_t>& numbers, int32_t stride, int32_t row_bytes,
               std::vector<char>* out) {
  const size_t begin = out->size();
  out->resize(begin + numbers.size() * static_cast<size_t>(stride));
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (i + 16 < numbers.size()) prefetch(arena.row(numbers[i + 16]), row_bytes);
    std::memcpy(out->data() + begin + i * stride, arena.row(numbers[i]), static_cast<size_t>(row_bytes));
  }
}

}  // namespace

void Table::snapshot(int stripe, uint32_t changed_since, Rows* out) const {
  std::vector<uint32_t> numbers;
  Locks<false> lock(*this, uint64_t{1} << stripe);
  const Contents& contents = *contents_;
  contents.stripes[stripe].index.each([&](Slot slot) {
    if (changed_since && contents.rows.epoch(slot.row()) < changed_since) return;
    out->ids.push_back(static_cast<int64_t>(slot.id()));
    out->times.push_back(slot.time());
    numbers.push_back(slot.row());
  });
  copy_rows(contents.rows, numbers, layout_.stride, layout_.row_bytes, &out->rows);
}

int64_t Table::walk(int stripe, int64_t place, int64_t limit, Rows* out) const {
  std::vector<uint32_t> numbers;
  Locks<false> lock(*this, uint64_t{1} << stripe);
  uint64_t next = contents_->stripes[stripe].index.visit(static_cast<uint64_t>(place), limit, [&](Slot slot) {
    out->ids.push_back(static_cast<int64_t>(slot.id()));
    out->times.push_back(slot.time());
    numbers.push_back(slot.row());
  });
  copy_rows(contents_->rows, numbers, layout_.stride, layout_.row_bytes, &out->rows);
  return static_cast<int64_t>(next);
}

void Table::fetch(const int64_t* ids, int64_t n, Rows* out, uint8_t* found) const {
  std::vector<uint32_t> numbers;
  Locks<false> lock(*this, kAllStripes);
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = hash_of(ids[i]);
    Slot slot = contents_->stripes[stripe_of(hash)].index.find(hash, static_cast<uint64_t>(ids[i]));
    found[i] = static_cast<bool>(slot);
    if (!slot) continue;
    out->ids.push_back(ids[i]);
    out->times.push_back(slot.time());
    numbers.push_back(slot.row());
  }
  copy_rows(contents_->rows, numbers, layout_.stride, layout_.row_bytes, &out->rows);
}

void Table::load(const Rows& rows) {
  if (rows.times.size() != rows.ids.size() || rows.rows.size() != rows.ids.size() * static_cast<size_t>(layout_.stride))
    throw std::invalid_argument("load got ids, times and rows of different lengths");
  if (rows.ids.empty()) return;
  raise_max_update_time(*std::max_element(rows.times.begin(), rows.times.end()));
  write({.kind = Kind::load, .ids = rows.ids.data(), .n = rows.size(), .rows = &rows});
}

// --- changes --------------------------------------------------------------------------------------------------------

uint32_t Table::begin_epoch() {
  Locks<true> lock(*this, kAllStripes);
  contents_->rows.track();
  uint32_t epoch = epoch_.load() + 1;
  epoch_.store(epoch);
  uint32_t none = 0;
  oldest_epoch_.compare_exchange_strong(none, epoch);
  return epoch;
}

std::vector<int64_t> Table::removed_since(uint32_t since) const {
  std::vector<int64_t> ids;
  for (int i = 0; i < kStripes; ++i) {
    Locks<false> lock(*this, uint64_t{1} << i);
    const Stripe& stripe = contents_->stripes[i];
    for (auto [epoch, id] : stripe.removed)
      if (epoch >= since && !stripe.index.find(hash_of(id), static_cast<uint64_t>(id))) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

void Table::forget_before(uint32_t epoch) {
  Locks<true> lock(*this, kAllStripes);
  for (Stripe& stripe : contents_->stripes)
    std::erase_if(stripe.removed, [&](const auto& entry) { return entry.first < epoch; });
  if (oldest_epoch_.load() < epoch) oldest_epoch_.store(epoch);
}

std::vector<float> Table::scales() const {
  std::vector<float> out;
  for (const auto& scale : scales_) out.push_back(scale.load());
  return out;
}

void Table::set_scales(const std::vector<float>& scales) {
  if (scales.size() != scales_.size()) throw std::invalid_argument("one scale per segment is needed");
  for (size_t i = 0; i < scales.size(); ++i) scales_[i].store(scales[i]);
}

}  // namespace shoal
