// One batch of writes, as the operations of a table describe it.
#pragma once
#include "table/table.h"

namespace shoal {

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
};

}  // namespace shoal
