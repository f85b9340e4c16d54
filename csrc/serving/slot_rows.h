// Rows of features as a net takes them: looked up, overlaid by what was just pushed, and pooled.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "nn/bag.h"
#include "table/table.h"

namespace shoal {

// Rows of one table that lie over it until they are written there; a row that is gone is zeros.
class FreshRows {
 public:
  FreshRows(const int64_t* ids, int64_t n, const float* values, int64_t dim);  // copies them; ids are distinct
  const float* find(int64_t id) const;                                         // null: it is not among them

 private:
  int64_t dim_;
  std::vector<int64_t> ids_;
  std::vector<float> values_;
  std::vector<uint32_t> slots_;  // number of an id + 1
};
using Fresh = std::vector<std::shared_ptr<const FreshRows>>;  // of each table; null, or none at all: nothing

// Where the rows of some features are: in one table, or in several that have the ids of one remainder each.
struct RowSource {
  std::vector<const Table*> tables;
  size_t first = 0;  // of them, among the tables that `Fresh` counts
  int64_t dim() const { return tables[0]->layout().dim; }
};

// How the ids of a bag become its values.
struct BagRule {
  Pool pool = Pool::sum;
  int64_t length = 1;  // rows of firstn
  std::optional<int64_t> padding;
};

// Bag b, ids[offsets[b] .. offsets[b + 1]), goes to out + b * stride. Offsets rise from 0. On the calling thread.
void read_bags(const RowSource& source, const Fresh& fresh, const BagRule& rule, const int64_t* ids,
               const int64_t* offsets, int64_t bags, float* out, int64_t stride);

}  // namespace shoal
