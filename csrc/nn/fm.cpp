#include "nn/fm.h"

#include <algorithm>

#include "core/thread_pool.h"

namespace shoal {
namespace {

int64_t grain(int64_t features, int64_t dim) {
  return std::max<int64_t>(1, 65536 / std::max<int64_t>(1, features * dim));
}

}  // namespace

void fm(const float* rows, int64_t n, int64_t features, int64_t dim, float* sums, float* out) {
  parallel_for(n, grain(features, dim), [&](int64_t begin, int64_t end) {
    SHOAL_DISPATCH(fm_part)(rows, begin, end, features, dim, sums, out);
  });
}

void fm_gradient(const float* rows, const float* sums, const float* grad, const float* grad_flat, int64_t n,
                 int64_t features, int64_t dim, float* grad_rows) {
  parallel_for(n, grain(features, dim), [&](int64_t begin, int64_t end) {
    SHOAL_DISPATCH(fm_gradient_part)(rows, sums, grad, grad_flat, begin, end, features, dim, grad_rows);
  });
}

}  // namespace shoal
