// Bags of rows that are somewhere in one flat buffer, pooled straight out of it, and their gradients added into it.
#pragma once
#include <cstdint>
#include <vector>

#include "core/isa.h"

namespace shoal {

// `features` x `bags` bags of ids, of which id i has its row at flat[at[i] : + dim], or stands for none (at[i] < 0).
// Bag b of feature f goes to out[b, columns[f] : + dim] of [bags, width].
struct BagsAt {
  const int32_t* at;                                // [ids]
  const int64_t* offsets;                           // [features * bags + 1]
  int64_t ids, features, bags, dim, width, floats;  // floats of the flat buffer
  std::vector<int32_t> combiners;                   // by feature: 0 sum, 1 mean, 3 sum over the root of the number
  std::vector<int64_t> columns;
  const float* weights;  // [ids] or null

  // Throws std::invalid_argument unless everything fits.
  void check() const;
};

void pool_at(const BagsAt& bags, const float* flat, float* out);
// Adds to flat what grad [bags, width] means for each row, ids in order. Nothing else of it is written.
void add_pooled_at(const BagsAt& bags, const float* grad, float* flat);

SHOAL_PER_ISA(void pool_some_at(const BagsAt& bags, int64_t begin, int64_t end, const float* flat, float* out);
              void add_some_pooled_at(const BagsAt& bags, int64_t low, int64_t high, const float* grad, float* flat);)

}  // namespace shoal
