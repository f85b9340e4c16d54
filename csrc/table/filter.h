// Admission: may an id that is not in the table get a row?
#pragma once
#include <cstdint>

namespace shoal {

// Thread-safe; several tables may share one.
class Filter {
 public:
  virtual ~Filter() = default;
  // False when no id can ever be dropped (no thresholds set), which lets a batch skip the whole question.
  virtual bool active() const = 0;
  // `count` occurrences of an id that is not in the asking table. True: drop the write.
  virtual bool should_be_filtered(int64_t id, uint32_t count) = 0;
};

}  // namespace shoal
