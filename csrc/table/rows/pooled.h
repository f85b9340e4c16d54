// Pooling of a bag's rows, and the gradient of each of them. Code for all instruction sets includes this, so everything
// here must be inlined: otherwise one set could use code that was compiled for another.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace shoal {

enum class Pool : int32_t { sum, mean, firstn, sqrtn, max };  // the order is shared with src/shoal/table/protocol.py

// Marks of max: a bit for each column of each id, set where its row has the largest value of its bag. Bytes per id:
[[gnu::always_inline]] inline int64_t mark_bytes(int64_t dim) { return (dim + 7) / 8; }
[[gnu::always_inline]] inline bool is_marked(const uint8_t* marks, int64_t column) {
  return marks[column >> 3] >> (column & 7) & 1;
}

// The factor for the sum of n rows.
[[gnu::always_inline]] inline float pool_scale(Pool pool, int64_t n) {
  if (pool == Pool::mean && n > 1) return 1.0f / static_cast<float>(n);
  if (pool == Pool::sqrtn && n > 1) return 1.0f / std::sqrt(static_cast<float>(n));
  return 1.0f;
}

// A bag of ids [begin, end) and its gradient.
struct PooledBag {
  Pool pool;
  int64_t dim;
  int64_t length;        // rows that firstn puts side by side
  const float* grad;     // [dim], or [length * dim] for firstn
  const float* zeros;    // [dim]: the gradient of rows that firstn left out
  const float* weights;  // of all ids, or null
  const uint8_t* marks;  // of all ids; null unless the pool is max
  int64_t begin, end;
};

// Calls use(i, grad, factor, marks) for each id of a bag for which there(i): its gradient is factor * grad, in the
// marked columns (null: in all). Rows that share a maximum share its gradient, which is written to `shares` [dim].
template <class There, class Use>
[[gnu::always_inline]] inline void spread_gradient(const PooledBag& bag, float* shares, There there, Use use) {
  float factor = 1.0f;
  if (bag.pool == Pool::mean || bag.pool == Pool::sqrtn) {
    int64_t kept = 0;
    for (int64_t i = bag.begin; i < bag.end; ++i) kept += there(i);
    factor = pool_scale(bag.pool, kept);
  }
  const float* grad = bag.grad;
  const int64_t bytes = bag.marks ? mark_bytes(bag.dim) : 0;
  if (bag.marks) {
    for (int64_t byte = 0; byte < bytes; ++byte) {
      uint8_t seen = 0, again = 0;
      for (int64_t i = bag.begin; i < bag.end; ++i) {
        if (!there(i)) continue;
        const uint8_t marked = bag.marks[i * bytes + byte];
        again |= seen & marked;
        seen |= marked;
      }
      if (!again) continue;
      if (grad == bag.grad) grad = static_cast<float*>(std::memcpy(shares, grad, 4 * static_cast<size_t>(bag.dim)));
      for (int64_t c = 8 * byte; c < std::min(bag.dim, 8 * byte + 8); ++c) {
        int64_t equal = 0;
        for (int64_t i = bag.begin; i < bag.end; ++i) equal += there(i) && is_marked(bag.marks + i * bytes, c);
        if (equal > 1) shares[c] /= static_cast<float>(equal);
      }
    }
  }
  for (int64_t i = bag.begin, place = 0; i < bag.end; ++i) {
    if (!there(i)) continue;
    const float* own = grad;
    if (bag.pool == Pool::firstn) own = place < bag.length ? grad + bag.dim * place++ : bag.zeros;
    use(i, own, bag.weights ? factor * bag.weights[i] : factor, bag.marks ? bag.marks + i * bytes : nullptr);
  }
}

}  // namespace shoal
