// One call over several tables and several sources of ids.
#pragma once
#include <cstdint>
#include <vector>

#include "table/table.h"

namespace shoal {

// Block (s, k), number s * K + k, holds the ids of source s for table k: sizes[s * K + k] of them. Ids and rows are
// stored block after block.
struct Blocks {
  Blocks(const std::vector<Table*>& tables, const int64_t* sizes, int64_t sources);  // throws std::invalid_argument
  const std::vector<Table*>& tables;
  std::vector<int64_t> ids;     // where each block's ids begin; the last entry is their number
  std::vector<int64_t> floats;  // the same for the floats of their rows
  int64_t size() const { return static_cast<int64_t>(ids.size()) - 1; }
  int64_t sources() const { return tables.empty() ? 0 : size() / static_cast<int64_t>(tables.size()); }
};

void fused_lookup(const Blocks& blocks, const int64_t* ids, float* out);

// Calls Table::apply_gradients for each block, source 0 first. `rates` has the learning rates of one table after
// another, `bad` a policy per table. Returns the skipped occurrences per table; throws NonFinite before any effect.
std::vector<int64_t> fused_apply_gradients(const Blocks& blocks, const int64_t* ids, const float* grads,
                                           const std::vector<float>& rates, int64_t global_step, Stamp time, bool dedup,
                                           const std::vector<BadGradient>& bad);

}  // namespace shoal
