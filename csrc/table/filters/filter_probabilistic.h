// Random admission without memory: an id is admitted with a probability that grows with its occurrences.
#pragma once
#include <atomic>

#include "table/filters/filter.h"

namespace shoal {

class ProbabilisticFilter final : public Filter {
 public:
  // The probability: 1 - 0.05^(count / threshold) if equal, so that 95 % are admitted after `threshold` single
  // occurrences; otherwise min(1, count / threshold).
  ProbabilisticFilter(bool equal_probability, Thresholds thresholds = {}, uint64_t seed = 0);
  bool should_be_filtered(int64_t id, uint32_t count, uint32_t threshold) override;
  using Filter::should_be_filtered;

 private:
  bool equal_;
  std::atomic<uint64_t> drawn_;  // each draw hashes the next number, so threads share one sequence without a lock
};

}  // namespace shoal
