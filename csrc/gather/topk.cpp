#include "gather/topk.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <stdexcept>
#include <vector>

#include "core/thread_pool.h"

namespace shoal::gather {
namespace {

constexpr int64_t kGrain = 16;  // chunks

// Keeps the best k of what was seen: a full buffer is cut back to k, which raises the bar for what follows.
void select(const std::vector<uint32_t>& keys, int64_t k, std::vector<uint64_t>& buffer, int32_t* indices) {
  const int64_t n = static_cast<int64_t>(keys.size()), capacity = static_cast<int64_t>(buffer.size());
  int64_t length = 0, at = 0;
  // Everything that fits goes in first: with no bar yet, a key of 0 counts too.
  for (; at < n && length < capacity; ++at)
    buffer[length++] = static_cast<uint64_t>(keys[at]) << 32 | static_cast<uint32_t>(~at);
  for (;;) {
    if (length > k) {
      std::nth_element(buffer.begin(), buffer.begin() + (k - 1), buffer.begin() + length, std::greater<>());
      length = k;
    }
    if (at >= n) break;
    at = SHOAL_DISPATCH(collect_above)(keys.data(), at, n, static_cast<uint32_t>(buffer[k - 1] >> 32), buffer.data(),
                                       capacity, &length);
  }
  for (int64_t i = 0; i < k; ++i) indices[i] = static_cast<int32_t>(~static_cast<uint32_t>(buffer[i]));
  std::sort(indices, indices + k);
}

}  // namespace

void topk_chunks(const float* gradient, float* memory, float decay, const ChunkGrid& grid, int64_t k, int32_t* indices,
                 float* values) {
  const int64_t totalk = grid.height * grid.width, columns = grid.columns();
  std::atomic<bool> nonfinite{false};
  parallel_for(grid.rows * grid.across, kGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> chunk(static_cast<size_t>(totalk));
    std::vector<uint32_t> keys(static_cast<size_t>(totalk));
    std::vector<uint64_t> buffer(static_cast<size_t>(std::max<int64_t>(4 * k, k + 64)));
    for (int64_t c = begin; c < end; ++c) {
      const int64_t start = c / grid.across * grid.height * columns + c % grid.across * grid.width;
      uint32_t most = 0;
      for (int64_t h = 0; h < grid.height; ++h) {
        most = std::max(most, SHOAL_DISPATCH(fold_row)(
                                  gradient + start + h * columns, memory ? memory + start + h * columns : nullptr,
                                  decay, grid.width, chunk.data() + h * grid.width, keys.data() + h * grid.width));
      }
      if (most >= 0x7f800000u) nonfinite = true;
      select(keys, k, buffer, indices + c * k);
      for (int64_t i = 0; i < k; ++i) values[c * k + i] = chunk[static_cast<size_t>(indices[c * k + i])];
    }
  });
  if (nonfinite) throw std::invalid_argument("the gradient holds a value that is not finite");
}

void subtract_sent(float* memory, const ChunkGrid& grid, int64_t k, const int32_t* indices, const float* sent) {
  const int64_t columns = grid.columns();
  parallel_for(grid.rows * grid.across, 256, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      float* chunk = memory + c / grid.across * grid.height * columns + c % grid.across * grid.width;
      for (int64_t i = c * k; i < (c + 1) * k; ++i)
        chunk[indices[i] / grid.width * columns + indices[i] % grid.width] -= sent[i];
    }
  });
}

void scatter_chunks(float* dense, const ChunkGrid& grid, int64_t k, const int64_t* indices, const float* values) {
  const int64_t columns = grid.columns(), totalk = grid.height * grid.width;
  parallel_for(grid.rows * grid.across, 256, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      float* chunk = dense + c / grid.across * grid.height * columns + c % grid.across * grid.width;
      for (int64_t i = c * k; i < (c + 1) * k; ++i) {
        if (indices[i] < 0 || indices[i] >= totalk) throw std::invalid_argument("an index is outside its chunk");
        chunk[indices[i] / grid.width * columns + indices[i] % grid.width] = values[i];
      }
    }
  });
}

}  // namespace shoal::gather
