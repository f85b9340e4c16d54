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

// The addresses of rows, copied for loops over many: otherwise the compiler reloads them after each write.
struct RowPlaces {
  const std::atomic<char*>* slabs;
  size_t stride;
  int shift;
  uint32_t mask;
  [[gnu::always_inline]] char* row(uint32_t number) const {
    return slabs[number >> shift].load(std::memory_order_relaxed) + (number & mask) * stride;
  }
  // Whether the first `bytes` bytes of every row are in one cache line.
  [[gnu::always_inline]] bool in_one_line(int32_t bytes) const {
    return bytes <= 64 && (stride % 64 == 0 || 64 % stride == 0);
  }
};

// Rows by number. They never move; the number of a removed row is reused.
class RowArena {
 public:
  // With a budget, rows also have a time, their memory is charged to it, and there are at most `most` of them.
  explicit RowArena(int32_t stride, Budget* budget = nullptr, int64_t most = kMost);
  static constexpr int64_t kMost = 0xFFFFFFF0u;
  ~RowArena();
  RowArena(const RowArena&) = delete;
  RowArena& operator=(const RowArena&) = delete;

  [[gnu::always_inline]] RowPlaces places() const { return {slabs_, static_cast<size_t>(stride_), shift_, mask_}; }
  [[gnu::always_inline]] char* row(uint32_t number) const { return places().row(number); }
  // The first of `count` fresh consecutive rows, which may be in two slabs. 0: the budget does not allow it.
  uint32_t allocate(uint32_t count);
  int64_t bytes() const;
  // Moves the charge to another budget, which has agreed to it.
  void set_budget(Budget* budget) { budget_ = budget; }

  // The time of the last write of a row, in seconds; only with a budget: then the index holds the policy's bits.
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
  // Whether no copy of the row has been taken since it was created, so that its removal need not be recorded.
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
  const bool huge_;  // use huge pages after the first 2 MiB; not with a small budget, which would waste the last one
  const uint64_t most_;
  uint64_t charged_ = 0;  // rows that the budget was charged for
  mutable std::mutex mutex_;
  uint64_t next_ = 2;   // the next row; 0 and 1 are kFreeRow and kErasedRow in the index
  uint64_t ready_ = 0;  // rows below this have pages, or they were requested; for tables that are no longer small
  uint32_t mapped_ = 0;
  bool gathered_ = false;  // the first 2 MiB, which begin as small pages, were moved to a huge one
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
  // Charges the budget for memory that its users allocate themselves: directories and small segments.
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
  size_t before_ = 0;  // bytes that earlier slabs take
  size_t ready_ = 0;   // bytes of the last slab after next_ whose pages were requested
  bool huge_ = false;  // the last slab is on huge pages
  Ahead ahead_;
};

}  // namespace shoal
