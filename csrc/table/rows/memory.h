// Memory for rows and index segments: large slabs, on huge pages once a table is no longer small.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/ahead.h"
#include "core/pages.h"
#include "table/budget/budget.h"

namespace shoal {

// Where rows are, for loops that look up many: the compiler cannot know that what they write leaves the arena alone.
struct RowPlaces {
  const std::atomic<char*>* slabs;
  size_t stride;
  int shift;
  uint32_t mask;
  [[gnu::always_inline]] char* row(uint32_t number) const {
    return slabs[number >> shift].load(std::memory_order_relaxed) + (number & mask) * stride;
  }
  // Whether the first so many bytes of every row are in one cache line.
  [[gnu::always_inline]] bool in_one_line(int32_t bytes) const {
    return bytes <= 64 && (stride % 64 == 0 || 64 % stride == 0);
  }
};

// Rows by number: they never move, and a number that was given back is reused by its stripe.
class RowArena {
 public:
  // With a budget, rows also have a time, all they take is asked for, and there are at most `most` of them.
  explicit RowArena(int32_t stride, Budget* budget = nullptr, int64_t most = kMost);
  static constexpr int64_t kMost = 0xFFFFFFF0u;
  ~RowArena();
  RowArena(const RowArena&) = delete;
  RowArena& operator=(const RowArena&) = delete;

  [[gnu::always_inline]] RowPlaces places() const { return {slabs_, static_cast<size_t>(stride_), shift_, mask_}; }
  [[gnu::always_inline]] char* row(uint32_t number) const { return places().row(number); }
  // The first of `count` fresh consecutive rows; they may lie in two slabs. 0: the budget does not allow it.
  uint32_t allocate(uint32_t count);
  int64_t bytes() const;
  // What was taken is another budget's from now on, which has been asked.
  void set_budget(Budget* budget) { budget_ = budget; }

  // Seconds of the last write of each row, in a table with a budget, whose index has something else in their place.
  uint32_t time(uint32_t number) const {
    return times_[number >> shift_].load(std::memory_order_relaxed)[number & mask_];
  }
  void set_time(uint32_t number, uint32_t time) {
    times_[number >> shift_].load(std::memory_order_relaxed)[number & mask_] = time;
  }
  const uint32_t* time_of(uint32_t number) const {
    return times_[number >> shift_].load(std::memory_order_relaxed) + (number & mask_);
  }

  // The epoch in which each row was last written; kept from the first call of track() on.
  void track();
  uint32_t epoch(uint32_t number) const {
    const uint32_t* of_slab = epochs_[number >> shift_].load(std::memory_order_acquire);
    return of_slab ? of_slab[number & mask_] & ~kUnsaved : 0;
  }
  void set_epoch(uint32_t number, uint32_t epoch, bool created) {
    uint32_t& has = epochs_[number >> shift_].load(std::memory_order_acquire)[number & mask_];
    has = epoch | (created ? kUnsaved : has & kUnsaved);
  }
  // Whether no copy of the row has been taken since it came into being, so that nobody need hear that it is gone.
  bool unsaved(uint32_t number) const {
    const uint32_t* of_slab = epochs_[number >> shift_].load(std::memory_order_acquire);
    return of_slab && (of_slab[number & mask_] & kUnsaved);
  }
  void note_saved(uint32_t number) const {
    uint32_t* of_slab = epochs_[number >> shift_].load(std::memory_order_acquire);
    if (of_slab) std::atomic_ref(of_slab[number & mask_]).fetch_and(~kUnsaved, std::memory_order_relaxed);
  }

 private:
  static constexpr uint32_t kUnsaved = 1u << 31;
  size_t slab_bytes() const { return (size_t(mask_) + 1) * stride_; }
  uint32_t* map_numbers() const;
  void map_slabs(uint64_t last);
  void make_ready();
  int64_t bytes_of(uint64_t rows) const;
  bool charge(uint64_t rows);

  const int32_t stride_;
  int shift_;
  uint32_t mask_;
  size_t slab_count_;
  std::atomic<char*>* slabs_;  // lazily backed arrays of slab_count_ pointers
  std::atomic<uint32_t*>* epochs_;
  std::atomic<uint32_t*>* times_ = nullptr;
  Budget* budget_;
  const bool huge_;  // pages, once rows are no longer few: a small budget has no use for the rest of the last one
  const uint64_t most_;
  uint64_t charged_ = 0;  // rows that were asked for
  mutable std::mutex mutex_;
  uint64_t next_ = 2;   // rows handed out; 0 and 1 mean something else in the index
  uint64_t ready_ = 0;  // rows whose pages were asked for, of a table that is no longer small
  uint32_t mapped_ = 0;
  bool gathered_ = false;  // the first 2 MiB, which begin on small pages
  bool tracking_ = false;
  Ahead ahead_;
};

// Blocks for full index segments, zeroed and aligned to a cache line, of at most 2 MiB.
class BlockArena {
 public:
  explicit BlockArena(Budget* budget = nullptr) : budget_(budget) {}
  ~BlockArena();
  BlockArena(const BlockArena&) = delete;
  BlockArena& operator=(const BlockArena&) = delete;
  void* allocate(size_t bytes);  // a multiple of 64; null: the budget does not allow it
  int64_t bytes() const;
  // Memory of its users' own: directories, and segments that are smaller than full ones.
  bool take(size_t bytes) { return !budget_ || budget_->take(static_cast<int64_t>(bytes)); }
  void give(size_t bytes) {
    if (budget_) budget_->give(static_cast<int64_t>(bytes));
  }
  void set_budget(Budget* budget) { budget_ = budget; }

 private:
  size_t touched(size_t used, size_t ready) const;
  mutable std::mutex mutex_;
  std::vector<std::pair<void*, size_t>> slabs_;
  char* next_ = nullptr;
  Budget* budget_;
  size_t left_ = 0;
  size_t used_ = 0;
  size_t before_ = 0;  // what former slabs take
  size_t ready_ = 0;   // bytes of what is left whose pages were asked for
  bool huge_ = false;  // the last slab is on huge pages
  Ahead ahead_;
};

}  // namespace shoal
