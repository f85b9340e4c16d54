// Bags of rows that are somewhere in one flat buffer, pooled straight out of it, and their gradients added into it.
#pragma once
#include <cstdint>
#include <vector>

#include "core/isa.h"
#include "nn/bag.h"

namespace shoal {

// `features` x `bags` bags of ids. Bag b of feature f goes to out[b, columns[f] : + dim] of [bags, width]; the first
// lengths[f] rows of firstn go there one after another.
struct BagsAt {
  // Id i has its row at flat[at[i] : + dim], or has none (at[i] < 0). `in_order`: it is the i-th row, and ids that
  // equal *padding have none.
  const int32_t* at = nullptr;
  bool in_order = false;
  const int64_t* keys = nullptr;                    // [ids], needed where there is padding
  const int64_t* padding = nullptr;                 // or null
  const int64_t* offsets;                           // [features * bags + 1]
  int64_t ids, features, bags, dim, width, floats;  // floats of the flat buffer
  std::vector<Pool> combiners;
  std::vector<int64_t> columns;
  std::vector<int64_t> lengths = {};  // of firstn; may be empty where no feature is one
  const float* weights = nullptr;     // [ids] or null

  // Throws std::invalid_argument unless everything fits.
  void check() const;
};

void pool_at(const BagsAt& bags, const float* flat, float* out);
// Adds to flat what grad [bags, width] means for each row, ids in order. Nothing else of it is written. Needs `at`, and
// combiners that add.
void add_pooled_at(const BagsAt& bags, const float* grad, float* flat);

SHOAL_PER_ISA(void pool_some_at(const BagsAt& bags, int64_t begin, int64_t end, const float* flat, float* out);
              void add_some_pooled_at(const BagsAt& bags, int64_t low, int64_t high, const float* grad, float* flat);)

}  // namespace shoal
