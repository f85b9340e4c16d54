#include "ops/id_index.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <limits>
#include <mutex>

#include "core/hash.h"
#include "ops/common.h"

namespace shoal::ops {
namespace {

constexpr int64_t kAhead = 16;              // ids hashed and prefetched together
constexpr int64_t kPartitionIds = 1 << 14;  // ids per hash partition: its table stays in the second-level cache
constexpr int64_t kLarge = 1 << 17;         // ids; arrays of this size or larger are partitioned
constexpr int64_t kPiece = 1 << 16;

int log2_at_least(int64_t n) { return n <= 1 ? 0 : 64 - std::countl_zero(static_cast<uint64_t>(n - 1)); }

// A hash table for one pass over n ids. Slots are tag << 32 | rank + 1, or 0 if empty; at most half are used.
class RankTable {
 public:
  explicit RankTable(int64_t n) : bits_(std::max(4, log2_at_least(n) + 1)) {
    slots_ = std::make_unique<uint64_t[]>(size_t{1} << bits_);
  }
  // Finds the ranks of ids[0..n), writes the distinct ids to `distinct` and returns their number. `hash_shift` drops
  // the hash's top bits, which a partition shares. found(i, rank, is_new) is called in order.
  template <class F>
  int64_t rank_all(const int64_t* ids, int64_t n, int hash_shift, int64_t* distinct, F&& found) {
    const int shift = 64 - bits_;
    const uint64_t mask = (uint64_t{1} << bits_) - 1;
    uint64_t* slots = slots_.get();
    int64_t count = 0;
    uint64_t hash[kAhead];
    for (int64_t i = 0; i < n; i += kAhead) {
      int64_t m = std::min(kAhead, n - i);
      for (int64_t k = 0; k < m; ++k) {
        hash[k] = hash_id(static_cast<uint64_t>(ids[i + k])) << hash_shift;
        __builtin_prefetch(&slots[hash[k] >> shift], 1);
      }
      for (int64_t k = 0; k < m; ++k) {
        const int64_t id = ids[i + k];
        // The tag is the low half: its bits are disjoint from the slot's for tables up to 2^32.
        const uint64_t tag = (hash[k] >> hash_shift) << 32;
        for (uint64_t at = hash[k] >> shift;; at = (at + 1) & mask) {
          uint64_t slot = slots[at];
          if (slot == 0) {
            if (count >= int64_t{0xfffffffe}) fail("a list must have at most 2^32 - 2 distinct ids");
            slots[at] = tag | static_cast<uint64_t>(count + 1);
            distinct[count] = id;
            found(i + k, static_cast<uint32_t>(count), true);
            ++count;
            break;
          }
          if ((slot & 0xffffffff00000000u) == tag) {
            uint32_t r = static_cast<uint32_t>(slot) - 1;
            if (distinct[r] == id) {
              found(i + k, r, false);
              break;
            }
          }
        }
      }
    }
    return count;
  }

 private:
  int bits_;
  std::unique_ptr<uint64_t[]> slots_;
};

Distinct dedup_small(const int64_t* ids, int64_t n, uint32_t* rank, int64_t* first) {
  Distinct out;
  out.ids = scratch<int64_t>(n);
  RankTable table(n);
  out.count = table.rank_all(ids, n, 0, out.ids.get(), [&](int64_t i, uint32_t r, bool is_new) {
    rank[i] = r;
    if (first && is_new) first[r] = i;
  });
  return out;
}

// Elements in partition order, by a stable counting sort of the hash's top bits. get(piece_begin, piece_end, emit) must
// call emit(id, payload) in order.
struct Partitioned {
  int bits;
  std::vector<int64_t> begin;  // [2^bits + 1]
  std::unique_ptr<int64_t[]> ids;
  std::unique_ptr<int64_t[]> payload;
};

template <class Get>
Partitioned partition(int64_t n, Get&& get, bool parallel) {
  Partitioned out;
  out.bits = std::clamp(log2_at_least(n / kPartitionIds), 1, 12);
  const int64_t parts = int64_t{1} << out.bits;
  const int shift = 64 - out.bits;
  const int64_t step = std::max<int64_t>(kPiece, n / 512 + 1), pieces = (n + step - 1) / step;
  auto histogram = scratch<int64_t>(pieces * parts);
  auto run = [&](auto&& body) {
    if (parallel) return parallel_parts(pieces, body);
    for (int64_t piece = 0; piece < pieces; ++piece) body(piece);
  };
  run([&](int64_t piece) {
    int64_t* count = histogram.get() + piece * parts;
    std::fill_n(count, parts, 0);
    get(piece * step, std::min(n, (piece + 1) * step),
        [&](int64_t id, int64_t) { ++count[hash_id(static_cast<uint64_t>(id)) >> shift]; });
  });
  out.begin.resize(parts + 1);
  int64_t total = 0;
  for (int64_t p = 0; p < parts; ++p) {
    out.begin[p] = total;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      int64_t here = histogram[piece * parts + p];
      histogram[piece * parts + p] = total;
      total += here;
    }
  }
  out.begin[parts] = total;
  out.ids = scratch<int64_t>(n);
  out.payload = scratch<int64_t>(n);
  run([&](int64_t piece) {
    int64_t* next = histogram.get() + piece * parts;
    get(piece * step, std::min(n, (piece + 1) * step), [&](int64_t id, int64_t payload) {
      int64_t at = next[hash_id(static_cast<uint64_t>(id)) >> shift]++;
      out.ids[at] = id;
      out.payload[at] = payload;
    });
  });
  return out;
}

Distinct dedup_large(const int64_t* ids, int64_t n, uint32_t* rank, int64_t* first, bool parallel) {
  auto get = [&](int64_t begin, int64_t end, auto&& emit) {
    for (int64_t i = begin; i < end; ++i) emit(ids[i], i);
  };
  Partitioned parts = partition(n, get, parallel);
  const int64_t count = static_cast<int64_t>(parts.begin.size()) - 1;
  auto run = [&](int64_t units, auto&& body) {
    if (parallel) return parallel_parts(units, body);
    for (int64_t u = 0; u < units; ++u) body(u);
  };
  // Ranks within the partition; first occurrences are flagged by position.
  auto is_first = std::make_unique<uint8_t[]>(static_cast<size_t>(n));
  auto local = scratch<uint32_t>(n);    // rank within the partition, in partition order
  auto first_of = scratch<int64_t>(n);  // position of each local rank's first occurrence, in partition order
  run(count, [&](int64_t p) {
    const int64_t begin = parts.begin[p], size = parts.begin[p + 1] - begin;
    if (size == 0) return;
    RankTable table(size);
    auto distinct = scratch<int64_t>(size);
    table.rank_all(parts.ids.get() + begin, size, parts.bits, distinct.get(), [&](int64_t j, uint32_t r, bool is_new) {
      local[begin + j] = r;
      if (is_new) {
        const int64_t i = parts.payload[begin + j];
        first_of[begin + r] = i;
        is_first[i] = 1;
      }
    });
  });
  // Ranks over all: count the flags before each piece.
  const int64_t pieces = (n + kPiece - 1) / kPiece;
  std::vector<int64_t> before(pieces + 1, 0);
  run(pieces, [&](int64_t piece) {
    int64_t sum = 0;
    for (int64_t i = piece * kPiece, end = std::min(n, i + kPiece); i < end; ++i) sum += is_first[i];
    before[piece + 1] = sum;
  });
  for (int64_t piece = 0; piece < pieces; ++piece) before[piece + 1] += before[piece];
  Distinct out;
  out.count = before[pieces];
  if (out.count >= int64_t{0xfffffffe}) fail("a list must have at most 2^32 - 2 distinct ids");
  out.ids = scratch<int64_t>(out.count);
  run(pieces, [&](int64_t piece) {
    int64_t r = before[piece];
    for (int64_t i = piece * kPiece, end = std::min(n, i + kPiece); i < end; ++i) {
      if (!is_first[i]) continue;
      out.ids[r] = ids[i];
      if (first) first[r] = i;
      rank[i] = static_cast<uint32_t>(r++);
    }
  });
  run(count, [&](int64_t p) {
    const int64_t begin = parts.begin[p], end = parts.begin[p + 1];
    for (int64_t j = begin; j < end; ++j) {
      const int64_t i = parts.payload[j], f = first_of[begin + local[j]];
      if (i != f) rank[i] = rank[f];
    }
  });
  return out;
}

}  // namespace

Distinct dedup(const int64_t* ids, int64_t n, uint32_t* rank, int64_t* first, bool parallel) {
  if (n < kLarge) return dedup_small(ids, n, rank, first);
  return dedup_large(ids, n, rank, first, parallel);
}

void dedup_each(const std::vector<IdSpan>& arrays, std::vector<Distinct>& out) {
  out.resize(arrays.size());
  std::vector<int64_t> order;
  const bool many = static_cast<int64_t>(arrays.size()) >= 4 * num_threads();
  for (size_t a = 0; a < arrays.size(); ++a) {
    // With many arrays, each runs on one thread, unless it is so large that it would end last.
    if (arrays[a].n >= (many ? 4 * kLarge : kLarge)) {
      out[a] = dedup(arrays[a].ids, arrays[a].n, arrays[a].rank, arrays[a].first, true);
    } else {
      order.push_back(static_cast<int64_t>(a));
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return arrays[a].n > arrays[b].n; });
  int64_t total = 0;
  for (int64_t a : order) total += arrays[a].n;
  each_of(static_cast<int64_t>(order.size()), total, [&](int64_t k) {
    const IdSpan& array = arrays[order[k]];
    out[order[k]] = dedup_small(array.ids, array.n, array.rank, array.first);
  });
}

IdMap::IdMap(const std::vector<uintptr_t>& arrays, const std::vector<int64_t>& lengths, bool parallel) {
  if (arrays.size() >= size_t{1} << (63 - kPositionBits))
    fail("there must be fewer than 2^23 lists of ids, got " + std::to_string(arrays.size()));
  int64_t total = 0;
  int64_t low = std::numeric_limits<int64_t>::max(), high = std::numeric_limits<int64_t>::min();
  std::mutex mutex;
  for (size_t k = 0; k < arrays.size(); ++k) {
    const auto* ids = reinterpret_cast<const int64_t*>(arrays[k]);
    if (lengths[k] >= int64_t{1} << kPositionBits)
      fail("a list must have fewer than 2^40 ids, got " + std::to_string(lengths[k]));
    total += lengths[k];
    parallel_for(lengths[k], parallel ? 1 << 16 : lengths[k], [&](int64_t begin, int64_t end) {
      int64_t lo = ids[begin], hi = lo;
      for (int64_t i = begin; i < end; ++i) {
        lo = std::min(lo, ids[i]);
        hi = std::max(hi, ids[i]);
      }
      std::lock_guard lock(mutex);
      low = std::min(low, lo);
      high = std::max(high, hi);
    });
  }
  if (total == 0) return;
  low_ = low;
  const uint64_t width = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  dense_ = width < static_cast<uint64_t>(total) * 4;
  if (dense_) {
    span_ = width + 1;
    build_dense(arrays, lengths, parallel);
  } else {
    build_hashed(arrays, lengths, parallel);
  }
}

void IdMap::build_dense(const std::vector<uintptr_t>& arrays, const std::vector<int64_t>& lengths, bool parallel) {
  by_id_ = scratch<int64_t>(static_cast<int64_t>(span_));
  int64_t* by_id = by_id_.get();
  parallel_for(static_cast<int64_t>(span_), parallel ? 1 << 16 : static_cast<int64_t>(span_),
               [&](int64_t begin, int64_t end) { std::fill(by_id + begin, by_id + end, int64_t{-1}); });
  for (size_t k = 0; k < arrays.size(); ++k) {
    const auto* ids = reinterpret_cast<const int64_t*>(arrays[k]);
    const int64_t high = static_cast<int64_t>(k) << kPositionBits;
    parallel_for(lengths[k], parallel ? 1 << 16 : lengths[k], [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        // The smallest place wins, whichever thread comes first; as unsigned, "empty" is the largest.
        std::atomic_ref<int64_t> cell(by_id[static_cast<uint64_t>(ids[i]) - static_cast<uint64_t>(low_)]);
        const int64_t place = high | i;
        int64_t seen = cell.load(std::memory_order_relaxed);
        while (static_cast<uint64_t>(place) < static_cast<uint64_t>(seen) &&
               !cell.compare_exchange_weak(seen, place, std::memory_order_relaxed)) {
        }
      }
    });
  }
}

void IdMap::build_hashed(const std::vector<uintptr_t>& arrays, const std::vector<int64_t>& lengths, bool parallel) {
  std::vector<int64_t> starts(arrays.size() + 1, 0);
  for (size_t k = 0; k < arrays.size(); ++k) starts[k + 1] = starts[k] + lengths[k];
  auto get = [&](int64_t begin, int64_t end, auto&& emit) {
    size_t k = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
    for (int64_t i = begin; i < end; ++k) {
      const auto* ids = reinterpret_cast<const int64_t*>(arrays[k]);
      for (int64_t stop = std::min(end, starts[k + 1]); i < stop; ++i) {
        emit(ids[i - starts[k]], static_cast<int64_t>(k) << kPositionBits | (i - starts[k]));
      }
    }
  };
  Partitioned parts = partition(starts.back(), get, parallel);
  partition_bits_ = parts.bits;
  const int64_t count = static_cast<int64_t>(parts.begin.size()) - 1;
  regions_.resize(count);
  int64_t slots = 0;
  for (int64_t p = 0; p < count; ++p) {
    int bits = std::max(1, log2_at_least(parts.begin[p + 1] - parts.begin[p]) + 1);
    regions_[p] = {slots, 64 - bits, (uint64_t{1} << bits) - 1};
    slots += int64_t{1} << bits;
  }
  entries_ = scratch<Entry>(slots);
  auto build = [&](int64_t p) {
    const Region& region = regions_[p];
    Entry* entries = entries_.get() + region.begin;
    std::fill_n(entries, region.mask + 1, Entry{0, -1});
    for (int64_t j = parts.begin[p]; j < parts.begin[p + 1]; ++j) {
      const int64_t id = parts.ids[j];
      uint64_t at = hash_id(static_cast<uint64_t>(id)) << partition_bits_ >> region.shift;
      while (entries[at].place >= 0 && entries[at].id != id) at = (at + 1) & region.mask;
      if (entries[at].place < 0) entries[at] = {id, parts.payload[j]};
    }
  };
  if (parallel) {
    parallel_parts(count, build);
  } else {
    for (int64_t p = 0; p < count; ++p) build(p);
  }
}

void IdMap::find(const int64_t* ids, int64_t n, int64_t* place) const {
  if (dense_) {
    for (int64_t j = 0; j < n; ++j) {
      if (j + 32 < n) {
        uint64_t ahead = static_cast<uint64_t>(ids[j + 32]) - static_cast<uint64_t>(low_);
        if (ahead < span_) __builtin_prefetch(&by_id_[ahead]);
      }
      uint64_t at = static_cast<uint64_t>(ids[j]) - static_cast<uint64_t>(low_);
      place[j] = at < span_ ? by_id_[at] : -1;
    }
    return;
  }
  if (regions_.empty()) {
    std::fill_n(place, n, int64_t{-1});
    return;
  }
  const int partition_shift = 64 - partition_bits_;
  // The entries of one group of ids are prefetched while those of the group before are read.
  struct Probe {
    const Region* region;
    const Entry* entry;
  };
  Probe probes[2][kAhead];
  auto ask = [&](int64_t begin, Probe* group) {
    for (int64_t k = 0; k < std::min(kAhead, n - begin); ++k) {
      const uint64_t hash = hash_id(static_cast<uint64_t>(ids[begin + k]));
      const Region* region = &regions_[hash >> partition_shift];
      group[k] = {region, entries_.get() + region->begin + (hash << partition_bits_ >> region->shift)};
      __builtin_prefetch(group[k].entry, 0, 2);
    }
  };
  ask(0, probes[0]);
  for (int64_t j = 0, turn = 0; j < n; j += kAhead, turn ^= 1) {
    if (j + kAhead < n) ask(j + kAhead, probes[turn ^ 1]);
    for (int64_t k = 0; k < std::min(kAhead, n - j); ++k) {
      const auto [region, home] = probes[turn][k];
      const Entry *first = entries_.get() + region->begin, *e = home;
      while (e->place >= 0 && e->id != ids[j + k]) e = first + ((e - first + 1) & static_cast<int64_t>(region->mask));
      place[j + k] = e->place;
    }
  }
}

}  // namespace shoal::ops
