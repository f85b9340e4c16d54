// Rows of one flat buffer that arrived in parts, and gradients of bags on their way back to such rows.
#pragma once
#include <cstdint>
#include <vector>

namespace shoal {

// rows[j] = buffer[offsets[j] : + width], where the buffer's floats [edges[p], edges[p + 1]) are at parts[p]. A row
// is in one part. Throws std::invalid_argument for an offset that is in none.
void gather_from_parts(const std::vector<const float*>& parts, const std::vector<int64_t>& edges,
                       const int32_t* offsets, int64_t n, int64_t width, float* rows);

// Gradients of pooled bags. Bag b of feature f is ids [offsets[f * bags + b], offsets[f * bags + b + 1]), and its
// gradient the `dim` floats from grad[b * width + columns[f]] on.
struct BagGradients {
  const float* grad;  // [bags, width]
  int64_t width, bags, dim;
  std::vector<int64_t> columns;  // [F]
  const int64_t* offsets;        // [F * bags + 1]
  const float* factors;          // [F * bags], of whole bags, or null
  const float* weights;          // [n], of their ids, or null
};

// Adds to out[places[i] : + dim] the gradient of id i, in the order of ids, without laying all of them out; the id at
// a place below 0 has none. Throws std::invalid_argument, before any effect, for offsets, columns or places that are
// outside.
void add_bag_gradients(const BagGradients& bags, const int32_t* places, int64_t n, float* out, int64_t size);

}  // namespace shoal
