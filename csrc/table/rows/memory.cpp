#include "table/rows/memory.h"

#include <algorithm>
#include <stdexcept>

namespace shoal {
namespace {

constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kSmall = size_t{32} << 20;  // bytes below which a table requests no pages ahead

// Bytes of pages to request ahead when `used` bytes are in use.
size_t ahead_of(size_t used) { return std::clamp(used / 16, kHuge, 8 * kHuge); }

template <class T>
std::atomic<T*>* map_pointers(size_t count) {
  return static_cast<std::atomic<T*>*>(map_pages(count * sizeof(std::atomic<T*>), false));
}

}  // namespace

RowArena::RowArena(int32_t stride, Budget* budget, int64_t most)
    : stride_(stride),
      shift_(6),
      budget_(budget),
      huge_(!budget || budget->limit() > static_cast<int64_t>(kSmall)),
      most_(static_cast<uint64_t>(std::min(most, kMost)) + 2) {
  // Slabs of about 16 MiB, of at least 64 and at most 2^20 rows.
  while (shift_ < 20 && (size_t{1} << (shift_ + 1)) * stride_ <= (size_t{16} << 20)) ++shift_;
  mask_ = (uint32_t{1} << shift_) - 1;
  slab_count_ = (uint64_t{1} << 32) >> shift_;
  slabs_ = map_pointers<char>(slab_count_);
  epochs_ = map_pointers<uint32_t>(slab_count_);
  if (budget_) times_ = map_pointers<uint32_t>(slab_count_);
}

RowArena::~RowArena() {
  ahead_.stop();
  for (uint32_t i = 0; i < mapped_; ++i) {
    unmap_pages(slabs_[i].load(), slab_bytes());
    if (auto* epochs = epochs_[i].load()) unmap_pages(epochs, (size_t(mask_) + 1) * sizeof(uint32_t));
    if (times_) unmap_pages(times_[i].load(), (size_t(mask_) + 1) * sizeof(uint32_t));
  }
  if (times_) unmap_pages(times_, slab_count_ * sizeof(*times_));
  if (budget_) budget_->give(bytes_of(charged_));
  unmap_pages(slabs_, slab_count_ * sizeof(*slabs_));
  unmap_pages(epochs_, slab_count_ * sizeof(*epochs_));
}

uint32_t* RowArena::map_numbers() const {
  return static_cast<uint32_t*>(map_pages((size_t(mask_) + 1) * sizeof(uint32_t), false));
}

// The bytes of `rows` rows, in pages of 2 MiB after the first of them. With a budget each row has a time and an epoch,
// which is counted even while it is not kept.
int64_t RowArena::bytes_of(uint64_t rows) const {
  if (rows == 0) return 0;
  int64_t touched = static_cast<int64_t>(rows) * stride_;
  if (huge_ && touched > static_cast<int64_t>(kHuge)) touched = (touched + kHuge - 1) / kHuge * kHuge;
  return touched + (budget_ ? static_cast<int64_t>(rows) * 8 : 0) + static_cast<int64_t>(rows >> shift_) * 24 + 24;
}

bool RowArena::charge(uint64_t rows) {
  if (!budget_ || rows <= charged_) return true;
  if (!budget_->take(bytes_of(rows) - bytes_of(charged_))) return false;
  charged_ = rows;
  return true;
}

void RowArena::map_slabs(uint64_t last) {
  while (mapped_ <= last) {
    if (times_) times_[mapped_].store(map_numbers());
    // The first 2 MiB stay on small pages, so that a small table is small.
    auto* slab = static_cast<char*>(map_pages(slab_bytes(), huge_ && mapped_ > 0));
    if (huge_ && mapped_ == 0 && slab_bytes() > kHuge) advise_huge(slab + kHuge, slab_bytes() - kHuge);
    slabs_[mapped_].store(slab);
    ++mapped_;
  }
}

// Requests the pages that rows will need soon, and moves the first 2 MiB to a huge page once they are full.
void RowArena::make_ready() {
  const size_t used = next_ * static_cast<size_t>(stride_);
  if (huge_ && !gathered_ && kHuge <= std::min(used, slab_bytes())) {
    ahead_.gather(slabs_[0].load());
    gathered_ = true;
  }
  const size_t ahead = ahead_of(used);
  if (used < kSmall || (ready_ > next_ && (ready_ - next_) * stride_ > ahead / 2)) return;
  uint64_t row = std::max(ready_, next_);
  const auto ready = std::min({next_ + ahead / static_cast<size_t>(stride_), uint64_t{slab_count_} << shift_, most_});
  if (row >= ready || !charge(ready)) return;
  ready_ = ready;
  map_slabs((ready_ - 1) >> shift_);
  for (uint64_t end; row < ready_; row = end) {
    end = std::min(ready_, ((row >> shift_) + 1) << shift_);
    ahead_.populate(this->row(static_cast<uint32_t>(row)), (end - row) * stride_);
  }
}

uint32_t RowArena::allocate(uint32_t count) {
  std::lock_guard lock(mutex_);
  if (next_ + count > most_) {
    if (budget_) return 0;
    throw std::length_error("a table holds at most 4294967280 rows; shard it");
  }
  if (!charge(next_ + count)) return 0;
  uint64_t last = (next_ + count - 1) >> shift_;
  map_slabs(last);
  if (tracking_) {
    for (uint64_t slab = next_ >> shift_; slab <= last; ++slab) {
      if (!epochs_[slab].load()) epochs_[slab].store(map_numbers());
    }
  }
  uint32_t first = static_cast<uint32_t>(next_);
  next_ += count;
  make_ready();
  return first;
}

void RowArena::track() {
  std::lock_guard lock(mutex_);
  if (tracking_) return;
  for (uint32_t slab = 0; slab < mapped_; ++slab) epochs_[slab].store(map_numbers());
  tracking_ = true;
}

int64_t RowArena::bytes() const {
  std::lock_guard lock(mutex_);
  if (budget_) return bytes_of(charged_);
  int64_t touched = static_cast<int64_t>(std::max(next_, ready_)) * stride_;
  if (touched > static_cast<int64_t>(kHuge)) touched = (touched + kHuge - 1) / kHuge * kHuge;
  return touched + (tracking_ ? static_cast<int64_t>(next_) * 4 : 0) + static_cast<int64_t>(mapped_) * 8;
}

BlockArena::~BlockArena() {
  ahead_.stop();
  give(static_cast<size_t>(bytes()));
  for (auto [slab, bytes] : slabs_) unmap_pages(slab, bytes);
}

void* BlockArena::allocate(size_t bytes) {
  std::lock_guard lock(mutex_);
  if (left_ < bytes) {
    if (next_ && !huge_) ahead_.gather(static_cast<char*>(slabs_.back().first));
    // A slab is an eighth of the bytes in use: few mappings in a large table, little waste in a small one.
    size_t slab = std::clamp(used_ / 8, size_t{2} << 20, size_t{64} << 20);
    slab = (slab + kHuge - 1) & ~(kHuge - 1);
    before_ += slabs_.empty() ? 0 : touched(slabs_.back().second - left_, ready_);
    huge_ = used_ >= (size_t{8} << 20);
    next_ = static_cast<char*>(map_pages(slab, huge_));
    left_ = slab;
    ready_ = 0;
    slabs_.emplace_back(next_, slab);
  }
  const size_t taken = slabs_.back().second - left_;
  size_t ready = ready_ - std::min(ready_, bytes);
  if (!take(touched(taken + bytes, ready) - touched(taken, ready_))) return nullptr;
  void* block = next_;
  next_ += bytes;
  left_ -= bytes;
  used_ += bytes;
  ready_ = ready;
  if (used_ >= kSmall / 4 && ready_ < std::min(left_, ahead_of(used_) / 2)) {
    const size_t more = std::min(left_, ahead_of(used_)) - ready_;
    if (take(touched(taken + bytes, ready_ + more) - touched(taken + bytes, ready_))) {
      ahead_.populate(next_ + ready_, more);
      ready_ += more;
    }
  }
  return block;
}

// The memory of the last slab: only pages that were touched or requested take any.
size_t BlockArena::touched(size_t used, size_t ready) const {
  const size_t page = huge_ ? kHuge : 4096;
  return (used + ready + page - 1) / page * page;
}

int64_t BlockArena::bytes() const {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(before_ + (slabs_.empty() ? 0 : touched(slabs_.back().second - left_, ready_)));
}

}  // namespace shoal
