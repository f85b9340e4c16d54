// Inner loops of the layouts, compiled per instruction set.
#pragma once
#include <cstdint>

#include "core/isa.h"

namespace shoal {

#define SHOAL_LAYOUT_KERNELS(T)                                                                                  \
  /* out[c] (+)= sum of vectors[k][start + c], each divided by n if `mean` */                                    \
  void pool_rows(const T* const* vectors, const int64_t* row_starts, int64_t rows, int64_t start, int64_t width, \
                 bool mean, bool adds, T* out, int64_t out_stride);                                              \
  /* vectors[k][start + c] += scale * grad[c], divided by n if `mean` */                                         \
  void spread_rows(T* const* vectors, const int64_t* row_starts, int64_t rows, int64_t start, int64_t width,     \
                   bool mean, T scale, const T* grad, int64_t grad_stride);

SHOAL_PER_ISA(SHOAL_LAYOUT_KERNELS(float) SHOAL_LAYOUT_KERNELS(double))
#undef SHOAL_LAYOUT_KERNELS

}  // namespace shoal
