// Pooling bags of rows straight from a flat buffer, and adding their gradients to it.
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
  const int64_t* keys = nullptr;                    // [ids], needed with padding
  const int64_t* padding = nullptr;                 // or null
  const int64_t* offsets;                           // [features * bags + 1]
  int64_t ids, features, bags, dim, width, floats;  // floats of the flat buffer
  std::vector<Pool> combiners;
  std::vector<int64_t> columns;
  std::vector<int64_t> lengths = {};  // for firstn; may be empty without it
  const float* weights = nullptr;     // [ids] or null
  uint8_t* marks = nullptr;           // [ids, mark_bytes(dim)] for max: pool_at writes them, gradients read them

  bool is_there(int64_t i) const { return in_order ? !padding || keys[i] != *padding : at[i] >= 0; }
  int64_t row(int64_t i) const { return in_order ? i * dim : at[i]; }  // its first float
  int64_t length(int64_t feature) const { return combiners[feature] == Pool::firstn ? lengths[feature] : 1; }
  // Throws std::invalid_argument unless everything fits.
  void check() const;
};

void pool_at(const BagsAt& bags, const float* flat, float* out);
// Adds the gradient of each row, from grad [bags, width], to flat, ids in order.
void add_pooled_at(const BagsAt& bags, const float* grad, float* flat);
// Writes the gradient of each weight; the rows are in flat.
void weigh_pooled_at(const BagsAt& bags, const float* grad, const float* flat, float* of_weights);

SHOAL_PER_ISA(
    // The same for bags [begin, end), counted over all features, and for rows that begin in [low, high). scratch: a row
    // of zeros, and room for two others.
    void add_some_pooled_at(const BagsAt& bags, int64_t begin, int64_t end, int64_t low, int64_t high,
                            const float* grad, float* scratch, float* flat);
    void weigh_some_pooled_at(const BagsAt& bags, int64_t begin, int64_t end, const float* grad, const float* flat,
                              float* scratch, float* of_weights);)

}  // namespace shoal
