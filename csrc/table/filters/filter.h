// Admission: decides whether an id that is not in the table may get a row.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

namespace shoal {

// How often an id must have been seen before it gets a row, by the slot of the id.
class Thresholds {
 public:
  static constexpr uint32_t kSlots = 32768;
  Thresholds() = default;
  // Throws std::invalid_argument for a slot that does not exist.
  Thresholds(uint32_t default_threshold, const std::vector<std::pair<uint32_t, uint32_t>>& of_slot);
  uint32_t of(int64_t id) const {
    return of_slot_.empty() ? default_ : of_slot_[(static_cast<uint64_t>(id) >> 48) & (kSlots - 1)];
  }
  uint32_t largest() const { return largest_; }

 private:
  uint32_t default_ = 0;
  uint32_t largest_ = 0;
  std::vector<uint32_t> of_slot_;  // empty, or one for each slot
};

// Thread-safe; several tables may share one.
class Filter {
 public:
  explicit Filter(Thresholds thresholds = {}) : thresholds_(std::move(thresholds)) {}
  virtual ~Filter() = default;
  Filter(const Filter&) = delete;
  Filter& operator=(const Filter&) = delete;

  // False if no id can ever be dropped, since no threshold is set; then a batch need not ask.
  virtual bool active() const { return thresholds_.largest() > 0; }
  // Counts `count` occurrences of an id that is not in the table. True: drop the write.
  bool should_be_filtered(int64_t id, uint32_t count) { return should_be_filtered(id, count, thresholds_.of(id)); }
  // The same with this threshold instead of that of the id's slot.
  virtual bool should_be_filtered(int64_t id, uint32_t count, uint32_t threshold) = 0;
  uint32_t threshold(int64_t id) const { return thresholds_.of(id); }
  uint32_t largest_threshold() const { return thresholds_.largest(); }

 private:
  Thresholds thresholds_;
};

// Admits everything.
class NoFilter final : public Filter {
 public:
  bool active() const override { return false; }
  bool should_be_filtered(int64_t, uint32_t, uint32_t) override { return false; }
};

}  // namespace shoal
