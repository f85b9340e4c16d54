#include "gather/topk.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/thread_pool.h"

namespace shoal::gather {
namespace {

constexpr int64_t kGrain = 16;  // chunks

// Selects the k largest keys of a chunk. Neighbouring chunks have similar values, so the threshold of the last chunk,
// lowered a little, usually leaves little more than k candidates; otherwise all keys go through a buffer that is cut
// back to k whenever it is full.
class Selector {
 public:
  Selector(int64_t totalk, int64_t k)
      : k_(k),
        totalk_(totalk),
        buffer_(static_cast<size_t>(std::max<int64_t>(4 * k, k + 64))),
        ranked_(buffer_.size()) {}

  void select(const uint32_t* keys, int32_t* indices) {
    int64_t length = 0;
    bool guessed = false;
    if (bar_ > kMargin) {
      int64_t at = collect(keys, 0, bar_ - kMargin, &length);
      guessed = at == totalk_ && length >= k_;
    }
    if (!guessed) length = scan(keys);
    // Keeps all keys that are at least the k-th largest, in the order of positions.
    std::copy_n(buffer_.begin(), length, ranked_.begin());
    std::nth_element(ranked_.begin(), ranked_.begin() + (k_ - 1), ranked_.begin() + length, std::greater<>());
    const uint64_t last = ranked_[static_cast<size_t>(k_ - 1)];
    int64_t kept = 0;
    for (int64_t i = 0; i < length; ++i)
      if (buffer_[i] >= last) indices[kept++] = static_cast<int32_t>(~static_cast<uint32_t>(buffer_[i]));
    if (!guessed) std::sort(indices, indices + k_);
    bar_ = static_cast<uint32_t>(last >> 32);
  }

 private:
  static constexpr uint32_t kMargin = 1u << 19;  // a sixteenth of an octave

  int64_t collect(const uint32_t* keys, int64_t begin, uint32_t bar, int64_t* length) {
    return SHOAL_DISPATCH(collect_above)(keys, begin, totalk_, bar, buffer_.data(),
                                         static_cast<int64_t>(buffer_.size()), length);
  }

  int64_t scan(const uint32_t* keys) {
    int64_t length = 0, at = 0;
    // Fill the buffer first: without a threshold, even a key of 0 counts.
    for (; at < totalk_ && length < static_cast<int64_t>(buffer_.size()); ++at)
      buffer_[length++] = static_cast<uint64_t>(keys[at]) << 32 | static_cast<uint32_t>(~at);
    while (at < totalk_) {
      std::nth_element(buffer_.begin(), buffer_.begin() + (k_ - 1), buffer_.begin() + length, std::greater<>());
      length = k_;
      at = collect(keys, at, static_cast<uint32_t>(buffer_[static_cast<size_t>(k_ - 1)] >> 32), &length);
    }
    return length;
  }

  int64_t k_, totalk_;
  std::vector<uint64_t> buffer_, ranked_;
  uint32_t bar_ = 0;
};

}  // namespace

void topk_chunks(const float* gradient, float* memory, float decay, const ChunkGrid& grid, int64_t k, int32_t* indices,
                 float* values) {
  const int64_t totalk = grid.height * grid.width, columns = grid.columns();
  std::atomic<bool> nonfinite{false};
  parallel_for(grid.rows * grid.across, kGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> chunk(static_cast<size_t>(totalk));
    std::vector<uint32_t> keys(static_cast<size_t>(totalk));
    Selector selector(totalk, k);
    for (int64_t c = begin; c < end; ++c) {
      const int64_t start = c / grid.across * grid.height * columns + c % grid.across * grid.width;
      uint32_t most = 0;
      for (int64_t h = 0; h < grid.height; ++h) {
        most = std::max(most, SHOAL_DISPATCH(fold_row)(
                                  gradient + start + h * columns, memory ? memory + start + h * columns : nullptr,
                                  decay, grid.width, chunk.data() + h * grid.width, keys.data() + h * grid.width));
      }
      if (most >= 0x7f800000u) nonfinite = true;
      selector.select(keys.data(), indices + c * k);
      for (int64_t i = 0; i < k; ++i) values[c * k + i] = chunk[static_cast<size_t>(indices[c * k + i])];
    }
  });
  if (nonfinite) throw std::invalid_argument("the gradient must be finite, got NaN or infinity");
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
        if (indices[i] < 0 || indices[i] >= totalk)
          throw std::invalid_argument("an index must be 0.." + std::to_string(totalk - 1) + " within its chunk, got " +
                                      std::to_string(indices[i]));
        chunk[indices[i] / grid.width * columns + indices[i] % grid.width] = values[i];
      }
    }
  });
}

}  // namespace shoal::gather
