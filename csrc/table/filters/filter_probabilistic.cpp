#include "table/filters/filter_probabilistic.h"

#include <cmath>

#include "core/hash.h"

namespace shoal {

ProbabilisticFilter::ProbabilisticFilter(bool equal_probability, Thresholds thresholds, uint64_t seed)
    : Filter(std::move(thresholds)), equal_(equal_probability), drawn_(seed) {}

bool ProbabilisticFilter::should_be_filtered(int64_t, uint32_t count, uint32_t threshold) {
  if (threshold == 0) return false;
  const double ratio = static_cast<double>(count) / threshold;
  const double admitted = equal_ ? 1 - std::pow(0.05, ratio) : ratio;
  const uint64_t bits = hash_id(drawn_.fetch_add(1, std::memory_order_relaxed) * 0x9e3779b97f4a7c15ULL + 1);
  return static_cast<double>(bits >> 11) * 0x1p-53 >= admitted;
}

}  // namespace shoal
