// One call over several tables and several sources of ids.
#pragma once
#include <cstdint>
#include <vector>

#include "table/table.h"

namespace shoal {

// Block (s, k), number s * K + k, holds the ids that source s brings for table k: sizes[s * K + k] of them. Ids and
// rows lie block after block.
struct Blocks {
  Blocks(const std::vector<Table*>& tables, const int64_t* sizes, int64_t sources);  // throws std::invalid_argument
  const std::vector<Table*>& tables;
  std::vector<int64_t> ids;     // where each block's ids begin, and their number at the end
  std::vector<int64_t> floats;  // the same of their rows
  int64_t size() const { return static_cast<int64_t>(ids.size()) - 1; }
  int64_t sources() const { return tables.empty() ? 0 : size() / static_cast<int64_t>(tables.size()); }
};

void fused_lookup(const Blocks& blocks, const int64_t* ids, float* out);

// What Table::apply_gradients does on each block, source 0 first. `rates` are those of the tables one after another,
// `bad` has the policy of each table. Returns the skipped occurrences per table; throws NonFinite before any effect.
std::vector<int64_t> fused_apply_gradients(const Blocks& blocks, const int64_t* ids, const float* grads,
                                           const std::vector<float>& rates, int64_t global_step, Stamp time, bool dedup,
                                           const std::vector<BadGradient>& bad);

}  // namespace shoal
