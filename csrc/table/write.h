// One batch of writes, as a table's operations describe it.
#pragma once
#include <stdexcept>
#include <string>

#include "table/budget/policy.h"
#include "table/rows/gradients.h"
#include "table/table.h"

namespace shoal {

inline void check_number(int64_t ids) {
  if (ids > (int64_t{1} << 31))
    throw std::invalid_argument("one call must have at most 2147483648 ids, got " + std::to_string(ids));
}

struct Table::Write {
  Kind kind;
  const int64_t* ids;
  int64_t n;
  const float* values = nullptr;
  Stamp time = 0;
  const uint8_t* drop = nullptr;  // positions to skip
  const float* rates = nullptr;
  int64_t global_step = 0;
  bool dedup = false;
  const Rows* rows = nullptr;
  int32_t* existed = nullptr;
  float* out = nullptr;
  uint64_t noise = 0;
  Gradients gradients = {};  // of Kind::gradients, instead of values
  Table* table = nullptr;
  // In a table with a budget:
  const float* scores = nullptr;         // one per id, or null
  Moment moment = {};                    // the policy's clocks
  int64_t now_s = 0;                     // the time from which ages count
  std::vector<int64_t>* gone = nullptr;  // gets the ids of rows that leave, if given
  Batch* batch = nullptr;                // the ids of this part, whose rows must stay
  bool restored = false;                 // rows are restored, with the policy's bits
};

}  // namespace shoal
