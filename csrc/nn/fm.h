// The factorisation machine's term over the rows of each sample, and its gradient, in one pass each.
#pragma once
#include <cstdint>

#include "core/isa.h"

namespace shoal {

// rows [n, features, dim]: column 0 holds linear weights, the others factors. out[i] = the sum of the linear weights of
// sample i and the dot products of all pairs of its factors. sums [n, dim] keeps the columns' sums for the gradient.
void fm(const float* rows, int64_t n, int64_t features, int64_t dim, float* sums, float* out);

// grad_rows = grad_flat (zeros if null) + the gradient of fm for grad [n].
void fm_gradient(const float* rows, const float* sums, const float* grad, const float* grad_flat, int64_t n,
                 int64_t features, int64_t dim, float* grad_rows);

SHOAL_PER_ISA(void fm_part(const float* rows, int64_t begin, int64_t end, int64_t features, int64_t dim, float* sums,
                           float* out);
              void fm_gradient_part(const float* rows, const float* sums, const float* grad, const float* grad_flat,
                                    int64_t begin, int64_t end, int64_t features, int64_t dim, float* grad_rows);)

}  // namespace shoal
