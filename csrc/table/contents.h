// The parts of a table, for the files that implement it: its stripes, their locks, and how ids are spread over them.
#pragma once
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "table/budget/eviction.h"
#include "table/index.h"
#include "table/rows/memory.h"
#include "table/table.h"

namespace shoal {

constexpr uint64_t kAllStripes = ~uint64_t{0};

inline uint64_t hash_of(int64_t id) { return index_hash(static_cast<uint64_t>(id)); }

// Stripes have different shares of the ids, rising by equal ratios until the last has almost twice as many as the
// first. So a few of them grow at any time, and never all at once.
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
  // How many of `ids` ids a stripe has.
  int64_t share(size_t stripe, int64_t ids) const {
    const int end = stripe + 1 < Table::kStripes ? first_cell[stripe + 1] : kCells;
    return ids / kCells * (end - first_cell[stripe]);
  }
  // Which of `parts` parts owns the stripe of a cell.
  int part(int cell, int parts) const { return first_cell[of_cell[cell]] * parts / kCells; }
};
inline const Stripes kStripesOfCells;

inline int stripe_of(uint64_t hash) { return kStripesOfCells.of_cell[hash >> (64 - Index::kStripeBits)]; }

// The stripes that a chunk of ids needs: those of its ids if it is short, else all `possible` ones.
inline uint64_t stripes_of(const int64_t* ids, const uint32_t* positions, int64_t n, uint64_t possible) {
  if (n >= 256) return possible;
  uint64_t stripes = 0;
  for (int64_t i = 0; i < n; ++i) stripes |= uint64_t{1} << stripe_of(hash_of(ids[positions ? positions[i] : i]));
  return stripes;
}

struct Table::Stripe {
  Stripe(BlockArena* blocks, uint32_t full_buckets) : index(blocks, full_buckets) {}
  Index index;
  std::vector<uint32_t> spare;                        // rows of removed ids, at most Contents::most_spare
  uint32_t chained = kFreeRow;                        // the first of the other ones; each holds the number of the next
  uint32_t next_row = 0, rows_left = 0;               // fresh rows reserved for this stripe
  uint64_t hand = 0;                                  // the segment to search next for rows to evict
  std::vector<std::pair<uint32_t, int64_t>> removed;  // (epoch, id), while changes are tracked
};

struct Table::Contents {
  Contents(int32_t stride, int64_t expected, Eviction* eviction, bool small)
      : most_spare(small ? 128 : 1024),
        fixed((small ? 128 : 384) << 10),
        budget(eviction ? eviction->budget : nullptr),
        rows(stride, budget.get(), eviction ? eviction->options.max_rows : RowArena::kMost),
        blocks(budget.get()),
        stripes(make_stripes(expected)) {
    if (budget && !(charged = budget->take(fixed))) throw std::bad_alloc();
  }
  ~Contents() {
    if (!charged) return;
    for (const Stripe& stripe : stripes)
      budget->give(static_cast<int64_t>(stripe.removed.capacity() * sizeof stripe.removed[0]));
    budget->give(fixed);
  }
  // The bytes that were taken from the budget.
  int64_t charged_bytes() const {
    int64_t bytes = rows.bytes() + blocks.bytes() + fixed;
    for (const Stripe& s : stripes)
      bytes += s.index.bytes() - static_cast<int64_t>(sizeof s.index - s.removed.capacity() * sizeof s.removed[0]);
    return bytes;
  }
  // Charges the other one's budget from now on, and the other one this budget. Changes nothing if it throws.
  void trade_budgets(Contents& other) {
    const int64_t more = other.charged_bytes() - charged_bytes();
    if (!budget->take(more))
      throw std::runtime_error("the memory budget has " + std::to_string(budget->limit() - budget->used()) +
                               " bytes left, but the new rows take " + std::to_string(more) +
                               " more than the old ones; nothing was changed");
    other.budget->give(more);
    std::swap(budget, other.budget);
    for (Contents* each : {this, &other}) {
      each->rows.set_budget(each->budget.get());
      each->blocks.set_budget(each->budget.get());
    }
  }
  Contents(const Contents&) = delete;

  // Makes sure that the next take_row() succeeds; false if no row is left. `one` reserves a single row: the stripes of
  // a small table must not keep rows from each other.
  bool reserve_rows(Stripe& stripe, bool one) {
    if (!stripe.spare.empty() || stripe.rows_left) return true;
    if (pooled) {
      std::lock_guard lock(pool_mutex);
      if (!pool.empty()) {
        stripe.spare.push_back(pool.back());
        pool.pop_back();
        return true;
      }
    }
    for (; stripe.chained != kFreeRow && stripe.spare.size() < most_spare / 2;) {
      stripe.spare.push_back(stripe.chained);
      stripe.chained = *reinterpret_cast<const uint32_t*>(rows.row(stripe.chained));
    }
    if (!stripe.spare.empty()) return true;
    auto count = static_cast<uint32_t>(one || pooled ? 1 : std::clamp<int64_t>(stripe.index.size() / 8, 1, 64));
    uint32_t first = rows.allocate(count);
    if (!first && count > 1) first = rows.allocate(count = 1);
    if (!first) return false;
    stripe.next_row = first;
    stripe.rows_left = count;
    return true;
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
  // Makes a row available again. The list stays short: further rows are chained through their own memory.
  void give_row(Stripe& stripe, uint32_t row) {
    if (pooled) {
      std::lock_guard lock(pool_mutex);
      pool.push_back(row);
    } else if (stripe.spare.size() < most_spare) {
      stripe.spare.push_back(row);
    } else {
      *reinterpret_cast<uint32_t*>(rows.row(row)) = std::exchange(stripe.chained, row);
    }
  }

  // While rows are loaded, all stripes share their spare rows, so that as many fit as the saved table had.
  void share_spare(bool share) {
    pooled = share;
    for (Stripe& stripe : stripes) {
      if (!share) break;
      pool.insert(pool.end(), stripe.spare.begin(), stripe.spare.end());
      stripe.spare.clear();
      for (; stripe.rows_left; --stripe.rows_left) pool.push_back(stripe.next_row++);
      for (; stripe.chained != kFreeRow; stripe.chained = *reinterpret_cast<const uint32_t*>(rows.row(stripe.chained)))
        pool.push_back(stripe.chained);
    }
    for (size_t stripe = 0; !share && !pool.empty(); stripe = (stripe + 1) % stripes.size()) {
      const uint32_t row = pool.back();
      pool.pop_back();
      give_row(stripes[stripe], row);
    }
    if (!share) std::vector<uint32_t>().swap(pool);
  }
  bool pooled = false;
  std::mutex pool_mutex;
  std::vector<uint32_t> pool;

  const size_t most_spare;
  // Bytes that a table takes without rows; spare lists and the arenas' pointers are counted as full.
  const int64_t fixed;

  std::shared_ptr<Budget> budget;  // null: none
  bool charged = false;
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

// The locks of a set of stripes, taken in ascending order to avoid deadlocks. Readers need no lock of a stripe without
// a recent writer.
template <bool kExclusive>
class Table::Locks {
 public:
  Locks(const Table& table, uint64_t stripes) : table_(table) {
    if (kExclusive || !(place_ = table.readers_.enter(stripes))) take(stripes);
  }
  // Locks the stripes of some ids for reading.
  Locks(const Table& table, const int64_t* ids, int64_t n)
    requires(!kExclusive)
      : table_(table) {
    if ((place_ = table.readers_.enter(kAllStripes))) return;
    const uint64_t stripes = stripes_of(ids, nullptr, n, kAllStripes);
    if (!(place_ = table.readers_.enter(stripes))) take(stripes);
  }
  ~Locks() {
    if (place_) Readers::leave(place_);
    for (uint64_t s = stripes_; s; s &= s - 1) {
      RwLock& lock = table_.locks_[std::countr_zero(s)];
      kExclusive ? lock.unlock() : lock.unlock_shared();
    }
  }
  Locks(const Locks&) = delete;

 private:
  void take(uint64_t stripes) {
    stripes_ = stripes;
    for (uint64_t s = stripes; s; s &= s - 1) {
      RwLock& lock = table_.locks_[std::countr_zero(s)];
      kExclusive ? lock.lock() : lock.lock_shared();
    }
    kExclusive ? table_.readers_.exclude(stripes) : table_.readers_.admit(stripes);
  }

  const Table& table_;
  Readers::Place* place_ = nullptr;  // of a reader without locks
  uint64_t stripes_ = 0;
};

}  // namespace shoal
