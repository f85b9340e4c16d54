// Which table each feature of a batch reads, and where its pooled rows go, so that one call reads many tables.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "nn/bag.h"
#include "table/table.h"

namespace shoal {

struct Feature {
  const Table* table;
  Pool pool = Pool::sum;
  int64_t column = 0;  // the output's column at which its pooled rows begin
  int64_t length = 1;  // rows that firstn puts side by side
};

class Wiring {
 public:
  // Throws std::invalid_argument unless all tables have one dim and the columns are within the width.
  Wiring(std::vector<Feature> features, int64_t width, std::optional<int64_t> padding);

  int64_t size() const { return static_cast<int64_t>(features_.size()); }
  // Writes the rows of n ids, counts[0] of feature 0 first, to out [n, dim]; zeros for padding.
  void rows(const int64_t* ids, int64_t n, const int64_t* counts, Missing missing, float* out) const;
  // Writes the pooled rows of size() * bags bags, all of feature 0 first, to out [bags, width]. weights: [n] or null.
  // marks: null, or gets the marks of features with max, [n, mark_bytes(dim)].
  void pooled(const int64_t* ids, int64_t n, const int64_t* offsets, int64_t bags, const float* weights,
              Missing missing, float* out, uint8_t* marks = nullptr) const;

 private:
  std::vector<Feature> features_;
  int64_t dim_;
  int64_t width_;
  std::optional<int64_t> padding_;
};

}  // namespace shoal
