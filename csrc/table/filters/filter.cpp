#include "table/filters/filter.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace shoal {

Thresholds::Thresholds(uint32_t default_threshold, const std::vector<std::pair<uint32_t, uint32_t>>& of_slot)
    : default_(default_threshold), largest_(default_threshold) {
  if (of_slot.empty()) return;
  of_slot_.assign(kSlots, default_threshold);
  for (auto [slot, threshold] : of_slot) {
    if (slot >= kSlots) throw std::invalid_argument("a slot must be 0..32767, got " + std::to_string(slot));
    of_slot_[slot] = threshold;
    largest_ = std::max(largest_, threshold);
  }
}

}  // namespace shoal
