// One batch of writes, as the operations of a table describe it.
#pragma once
#include <stdexcept>

#include "table/budget/policy.h"
#include "table/rows/gradients.h"
#include "table/table.h"

namespace shoal {

inline void check_number(int64_t ids) {
  if (ids > (int64_t{1} << 31)) throw std::invalid_argument("one call must have at most 2147483648 ids");
}

struct Table::Write {
  Kind kind;
  const int64_t* ids;
  int64_t n;
  const float* values = nullptr;
  Stamp time = 0;
  const uint8_t* drop = nullptr;  // positions to pass over
  const float* rates = nullptr;
  int64_t global_step = 0;
  bool dedup = false;
  const Rows* rows = nullptr;
  int32_t* existed = nullptr;
  float* out = nullptr;
  uint64_t noise = 0;
  Gradients gradients = {};  // of the kind that has them, in place of values
  Table* table = nullptr;
  // Of a table with a budget:
  const float* scores = nullptr;         // one per id, or null
  Moment moment = {};                    // what its clocks say
  int64_t now_s = 0;                     // from which ages count
  std::vector<int64_t>* gone = nullptr;  // gets the ids of rows that leave, if given
  Batch* batch = nullptr;                // the ids of this part, whose rows stay
  bool restored = false;                 // rows come back as they were, and the policy's numbers with them
};

}  // namespace shoal
