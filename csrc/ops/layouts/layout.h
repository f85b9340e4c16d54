// Pooling embeddings into the dense tensors that a model reads, and its gradient.
#pragma once
#include <cstdint>
#include <vector>

namespace shoal::ops {

enum class Pooling : int64_t { sum = 0, mean = 1, firstn = 3 };

// One slice of one layout. Output element of sample b, sequence position t, column c:
// outputs[output] + (row + b) * sample_stride + place + t * sequence_stride + c.
struct LayoutTask {
  int64_t output, place, sample_stride, sequence_stride;
  int64_t feature, start, width;
  int64_t pooling, max_length, adds;  // adds: the layout sums its slices
};
// One request: blocks of embeddings, and which fids of them each output gets. Tasks are ordered by feature.
struct LayoutRequest {
  const LayoutTask* tasks;
  int64_t task_count;
  int64_t features;
  const int64_t* nfl;
  int64_t nfl_count;
  const int64_t* rows;  // feature_offset
  int64_t row_count;
  const uint64_t* fids;  // fid_offset
  int64_t fid_count;
  int64_t batch;
  int64_t first_row;  // of the outputs, for sample 0
  std::vector<uintptr_t> blocks;
  std::vector<int64_t> block_sizes;    // elements
  std::vector<int64_t> block_strides;  // elements per index2 step
  bool flat;                           // index2 counts elements, not rows of block_strides columns
};

// `outputs` must be zero at entry.
template <class T>
void embedding_to_layout(const LayoutRequest& request, const std::vector<uintptr_t>& outputs);
// Adds to the blocks, which must be zero at entry; grads are the upstream gradients.
template <class T>
void embedding_to_layout_gradient(const LayoutRequest& request, const std::vector<uintptr_t>& grads, T scale);

}  // namespace shoal::ops
