// Counts that forget: a ring of blocks, of which the newest is written and the oldest is cleared.
#pragma once
#include <mutex>
#include <vector>

#include "core/at_fork.h"
#include "table/filters/filter.h"
#include "table/filters/filter_block.h"

namespace shoal {

class SlidingFilter final : public Filter {
 public:
  static constexpr int kMaxStep = 16;    // cells looked at in a block
  static constexpr int kMaxForward = 2;  // blocks that may take a new id: the head and the next

  // Holds max(capacity, 300) elements in max(split_num, 5) blocks. Throws std::invalid_argument for a threshold above
  // 15, which no count could reach.
  SlidingFilter(int64_t capacity, int split_num, Thresholds thresholds = {});

  uint32_t add(int64_t id, uint32_t count);  // returns the count before
  uint32_t get(int64_t id) const;
  bool should_be_filtered(int64_t id, uint32_t count, uint32_t threshold) override {
    return threshold > 0 && add(id, count) < threshold;
  }
  using Filter::should_be_filtered;

  struct Meta {
    int64_t head, head_increment, failures;
  };
  int split_num() const { return static_cast<int>(blocks_.size()); }
  int max_backward() const { return split_num() - 2; }
  int64_t capacity() const { return capacity_; }
  int64_t elements() const;
  Meta meta() const;
  void set_meta(const Meta& meta);  // throws std::invalid_argument for a head that is not a block

  // For files: the numbers of a block, and its cells.
  struct BlockMeta {
    int64_t total, elements, failures;
    double fill_rate;
  };
  BlockMeta block_meta(int block) const;
  void read_block(int block, int64_t offset, int64_t n, uint16_t* out) const;
  void set_block(int block, const BlockMeta& meta, const uint16_t* cells, int64_t n);

 private:
  int at(int64_t block) const { return static_cast<int>(block % split_num()); }
  int checked(int block) const;
  uint32_t older_count(int64_t id) const;

  int64_t capacity_;
  mutable std::mutex mutex_;
  AtFork at_fork_{&mutex_};
  std::vector<FilterBlock> blocks_;
  int64_t head_ = 0;
  int64_t head_increment_ = 0;
  int64_t failures_ = 0;
};

}  // namespace shoal
