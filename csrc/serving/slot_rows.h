// Rows of features for a net: looked up, overridden by fresh pushes, and pooled.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "nn/bag.h"
#include "table/table.h"

namespace shoal {

// Fresh rows that override a table's until they are written there; a removed row is zeros.
class FreshRows {
 public:
  FreshRows(const int64_t* ids, int64_t n, const float* values, int64_t dim);  // copies them; ids must be distinct
  const float* find(int64_t id) const;                                         // null: there is no fresh row

 private:
  int64_t dim_;
  std::vector<int64_t> ids_;
  std::vector<float> values_;
  std::vector<uint32_t> slots_;  // number of an id + 1
};
using Fresh = std::vector<std::shared_ptr<const FreshRows>>;  // of each table; null or missing: none

// Where the rows of some features are: in one table, or in several, each with the ids of one remainder.
struct RowSource {
  std::vector<const Table*> tables;
  size_t first = 0;  // the number of tables[0] in `Fresh`
  int64_t dim() const { return tables[0]->layout().dim; }
};

// How a bag's rows are pooled.
struct BagRule {
  Pool pool = Pool::sum;
  int64_t length = 1;  // rows of firstn
  std::optional<int64_t> padding;
};

// Writes bag b, ids[offsets[b] .. offsets[b + 1]), to out + b * stride, on the calling thread. Offsets rise from 0.
void read_bags(const RowSource& source, const Fresh& fresh, const BagRule& rule, const int64_t* ids,
               const int64_t* offsets, int64_t bags, float* out, int64_t stride);

}  // namespace shoal
