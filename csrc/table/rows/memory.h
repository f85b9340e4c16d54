// Memory for rows and index segments: large slabs, on huge pages once a table is no longer small.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/ahead.h"
#include "core/pages.h"

namespace shoal {

// Rows by number: they never move, and a number that was given back is reused by its stripe.
class RowArena {
 public:
  explicit RowArena(int32_t stride);
  ~RowArena();
  RowArena(const RowArena&) = delete;
  RowArena& operator=(const RowArena&) = delete;

  [[gnu::always_inline]] char* row(uint32_t number) const {
    return slabs_[number >> shift_].load(std::memory_order_relaxed) + size_t(number & mask_) * stride_;
  }
  // Whether the first so many bytes of every row are in one cache line.
  [[gnu::always_inline]] bool in_one_line(int32_t bytes) const {
    return bytes <= 64 && (stride_ % 64 == 0 || 64 % stride_ == 0);
  }
  // The first of `count` fresh consecutive rows; they may lie in two slabs.
  uint32_t allocate(uint32_t count);
  int64_t bytes() const;

  // The epoch in which each row was last written; kept from the first call of track() on.
  void track();
  uint32_t epoch(uint32_t number) const {
    const uint32_t* of_slab = epochs_[number >> shift_].load(std::memory_order_acquire);
    return of_slab ? of_slab[number & mask_] : 0;
  }
  void set_epoch(uint32_t number, uint32_t epoch) {
    epochs_[number >> shift_].load(std::memory_order_acquire)[number & mask_] = epoch;
  }

 private:
  size_t slab_bytes() const { return (size_t(mask_) + 1) * stride_; }
  void map_slabs(uint64_t last);
  void make_ready();

  const int32_t stride_;
  int shift_;
  uint32_t mask_;
  size_t slab_count_;
  std::atomic<char*>* slabs_;  // lazily backed arrays of slab_count_ pointers
  std::atomic<uint32_t*>* epochs_;
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
  BlockArena() = default;
  ~BlockArena();
  BlockArena(const BlockArena&) = delete;
  BlockArena& operator=(const BlockArena&) = delete;
  void* allocate(size_t bytes);  // a multiple of 64
  int64_t bytes() const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::pair<void*, size_t>> slabs_;
  char* next_ = nullptr;
  size_t left_ = 0;
  size_t used_ = 0;
  size_t ready_ = 0;   // bytes of what is left whose pages were asked for
  bool huge_ = false;  // the last slab is on huge pages
  Ahead ahead_;
};

}  // namespace shoal
