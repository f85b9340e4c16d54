#include "table/fused.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/thread_pool.h"
#include "table/rows/optimizers.h"

namespace shoal {

Blocks::Blocks(const std::vector<Table*>& tables, const int64_t* sizes, int64_t sources) : tables(tables) {
  const int64_t k = static_cast<int64_t>(tables.size());
  ids.reserve(static_cast<size_t>(k * sources) + 1);
  floats.reserve(static_cast<size_t>(k * sources) + 1);
  ids.push_back(0);
  floats.push_back(0);
  for (int64_t block = 0; block < k * sources; ++block) {
    if (sizes[block] < 0)
      throw std::invalid_argument("block " + std::to_string(block) + ": the number of ids must be >= 0, got " +
                                  std::to_string(sizes[block]));
    ids.push_back(ids.back() + sizes[block]);
    floats.push_back(floats.back() + sizes[block] * tables[static_cast<size_t>(block % k)]->layout().dim);
  }
}

void fused_lookup(const Blocks& blocks, const int64_t* ids, float* out) {
  const int64_t k = static_cast<int64_t>(blocks.tables.size());
  parallel_parts(blocks.size(), [&](int64_t block) {
    const int64_t n = blocks.ids[block + 1] - blocks.ids[block];
    if (n > 0) blocks.tables[block % k]->lookup(ids + blocks.ids[block], n, out + blocks.floats[block]);
  });
}

std::vector<int64_t> fused_apply_gradients(const Blocks& blocks, const int64_t* ids, const float* grads,
                                           const std::vector<float>& rates, int64_t global_step, Stamp time, bool dedup,
                                           const std::vector<BadGradient>& bad) {
  const int64_t k = static_cast<int64_t>(blocks.tables.size());
  std::vector<int64_t> rate(1, 0);
  for (const Table* table : blocks.tables)
    rate.push_back(rate.back() + static_cast<int64_t>(table->layout().segments.size()));
  if (rate.back() != static_cast<int64_t>(rates.size()) || bad.size() != blocks.tables.size())
    throw std::invalid_argument("there must be one learning rate per segment of each table, " +
                                std::to_string(rate.back()) + ", and one policy per table, " + std::to_string(k) +
                                ", got " + std::to_string(rates.size()) + " and " + std::to_string(bad.size()));
  for (int64_t block = 0; block < blocks.size(); ++block) {
    if (bad[block % k] != BadGradient::raise) continue;
    const int64_t dim = blocks.tables[block % k]->layout().dim;
    const float* of_block = grads + blocks.floats[block];
    if (SHOAL_DISPATCH(all_finite)(of_block, blocks.floats[block + 1] - blocks.floats[block])) continue;
    for (int64_t i = blocks.ids[block]; i < blocks.ids[block + 1]; ++i, of_block += dim)
      if (!SHOAL_DISPATCH(all_finite)(of_block, dim)) throw NonFinite{i, ids[i]};
  }

  std::vector<int64_t> skipped(static_cast<size_t>(k), 0);
  auto apply = [&](int64_t block) {
    const int64_t t = block % k;
    const BadGradient policy = bad[t] == BadGradient::raise ? BadGradient::ignore : bad[t];
    skipped[t] += blocks.tables[t]->apply_gradients(ids + blocks.ids[block], blocks.ids[block + 1] - blocks.ids[block],
                                                    grads + blocks.floats[block], rates.data() + rate[t], global_step,
                                                    time, dedup, policy);
  };
  // Tables may share a filter, whose counts depend on the order of the ids.
  const bool filtered =
      std::any_of(blocks.tables.begin(), blocks.tables.end(), [](const Table* t) { return t->has_filter(); });
  // A table with two names would see its sources out of order.
  std::vector<Table*> distinct = blocks.tables;
  std::sort(distinct.begin(), distinct.end());
  const bool repeated = std::adjacent_find(distinct.begin(), distinct.end()) != distinct.end();
  if (filtered || repeated) {
    for (int64_t block = 0; block < blocks.size(); ++block) apply(block);
  } else {
    parallel_parts(k, [&](int64_t t) {
      for (int64_t source = 0; source < blocks.sources(); ++source) apply(source * k + t);
    });
  }
  return skipped;
}

}  // namespace shoal
