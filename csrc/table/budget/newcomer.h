// An id that found no room, and whoever wants to know of rows before they leave.
#pragma once
#include <cstdint>

#include "table/table.h"

namespace shoal {

struct Table::Newcomer {
  int64_t place;  // in its chunk
  uint64_t hash;
  int64_t id;
  uint32_t key;  // that its row would have
  int stripe = 0;
  bool refused = false;
};

}  // namespace shoal
