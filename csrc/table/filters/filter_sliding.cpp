#include "table/filters/filter_sliding.h"

#include <stdexcept>
#include <string>

namespace shoal {

SlidingFilter::SlidingFilter(int64_t capacity, int split_num, Thresholds thresholds)
    : Filter(std::move(thresholds)), capacity_(std::max<int64_t>(capacity, 300)) {
  if (largest_threshold() > FilterBlock::kMaxCount)
    throw std::invalid_argument(
        "occurrence_threshold must be at most 15 for a sliding filter, which counts to 15, got " +
        std::to_string(largest_threshold()));
  const int blocks = std::max(split_num, 5);
  if (blocks > 4096)
    throw std::invalid_argument("a filter must have at most 4096 blocks, got " + std::to_string(blocks));
  for (int i = 0; i < blocks; ++i) blocks_.emplace_back(std::max<int64_t>(1, capacity_ / (blocks - 1)), 1.2);
}

uint32_t SlidingFilter::older_count(int64_t id) const {
  const int64_t back = std::min<int64_t>(head_increment_, max_backward());
  for (int64_t i = 1; i <= back; ++i) {
    auto place = blocks_[at(head_ - i + split_num())].find(id, kMaxStep);
    if (place.index >= 0 && place.occupied) return place.count;
  }
  return 0;
}

uint32_t SlidingFilter::add(int64_t id, uint32_t count) {
  std::lock_guard lock(mutex_);
  count = std::min(count, FilterBlock::kMaxCount);
  for (int i = 0; i < kMaxForward; ++i) {
    FilterBlock& block = blocks_[at(head_ + i)];
    auto place = block.find(id, kMaxStep);
    if (place.index < 0) continue;
    const uint32_t old = place.occupied ? place.count : older_count(id);
    block.store(place, id, old + count);
    if (!place.occupied && blocks_[head_].full()) {
      head_ = at(head_ + 1);
      ++head_increment_;
      blocks_[at(head_ + 1)].clear();
    }
    return old;
  }
  ++failures_;
  return FilterBlock::kMaxCount;
}

uint32_t SlidingFilter::get(int64_t id) const {
  std::lock_guard lock(mutex_);
  for (int i = 0; i < kMaxForward; ++i) {
    auto place = blocks_[at(head_ + i)].find(id, kMaxStep);
    if (place.index >= 0) return place.occupied ? place.count : older_count(id);
  }
  return FilterBlock::kMaxCount;
}

int64_t SlidingFilter::elements() const {
  std::lock_guard lock(mutex_);
  int64_t sum = 0;
  for (const auto& block : blocks_) sum += block.elements();
  return sum;
}

SlidingFilter::Meta SlidingFilter::meta() const {
  std::lock_guard lock(mutex_);
  return {head_, head_increment_, failures_};
}

void SlidingFilter::set_meta(const Meta& meta) {
  if (meta.head < 0 || meta.head >= split_num() || meta.head_increment < 0 || meta.failures < 0)
    throw std::invalid_argument("the head of the filter must be 0.." + std::to_string(split_num() - 1) +
                                ", and its moves and failures >= 0, got " + std::to_string(meta.head) + ", " +
                                std::to_string(meta.head_increment) + " and " + std::to_string(meta.failures));
  std::lock_guard lock(mutex_);
  head_ = meta.head;
  head_increment_ = meta.head_increment;
  failures_ = meta.failures;
}

int SlidingFilter::checked(int block) const {
  if (block < 0 || block >= split_num())
    throw std::invalid_argument("a block must be 0.." + std::to_string(split_num() - 1) + ", got " +
                                std::to_string(block));
  return block;
}

SlidingFilter::BlockMeta SlidingFilter::block_meta(int block) const {
  std::lock_guard lock(mutex_);
  const FilterBlock& b = blocks_[checked(block)];
  return {b.total(), b.elements(), b.failures(), b.fill_rate()};
}

void SlidingFilter::read_block(int block, int64_t offset, int64_t n, uint16_t* out) const {
  std::lock_guard lock(mutex_);
  blocks_[checked(block)].read(offset, n, out);
}

void SlidingFilter::set_block(int block, const BlockMeta& meta, const uint16_t* cells, int64_t n) {
  if (n != meta.total + FilterBlock::kSpare)
    throw std::invalid_argument("a filter block of " + std::to_string(meta.total) + " home positions must have " +
                                std::to_string(meta.total + FilterBlock::kSpare) + " cells, got " + std::to_string(n));
  std::lock_guard lock(mutex_);
  blocks_[checked(block)].set(meta.total, meta.fill_rate, meta.elements, meta.failures, cells);
}

}  // namespace shoal
