// Inner loops of the reductions, compiled per instruction set. Sums run in input order.
#pragma once
#include <cstdint>

#include "core/isa.h"

namespace shoal {

enum class Reduce : int { sum = 0, mean = 1, sqrtn = 2 };  // sqrtn: the square root of the sum of squares

#define SHOAL_SUM_KERNELS(T)                                                                                        \
  /* out[b] = sum of rows[splits[b]..splits[b + 1]) for b in [begin, end) */                                        \
  void segment_sum(const T* rows, const int64_t* splits, int64_t begin, int64_t end, int64_t d, T* out);            \
  /* reduces rows [begin, end), whose index never falls, to out rows [row_begin, row_end); zero if none has it */   \
  void sorted_reduce(const T* rows, const int64_t* index, int64_t stride, int64_t begin, int64_t end, int64_t d,    \
                     Reduce how, int64_t row_begin, int64_t row_end, T* out);                                       \
  /* out[index[i]] += rows[i] (squared for sqrtn) for i in [0, n) whose target row is in [begin, end) */            \
  void scatter_rows(const T* rows, const int64_t* index, int64_t stride, int64_t n, int64_t d, int64_t begin,       \
                    int64_t end, bool squares, T* out);                                                             \
  /* rows [begin, end) of sums become means or roots */                                                             \
  void finish_reduce(T* out, const int64_t* counts, int64_t begin, int64_t end, int64_t d, Reduce how);             \
  /* out[i] = derivative of the reduction with respect to rows[i]; only sqrtn reads `rows` and `norm` */            \
  void reduce_gradient(const T* grad, const int64_t* index, int64_t stride, const T* scale, const T* rows,          \
                       const T* norm, int64_t begin, int64_t end, int64_t d, Reduce how, T* out);                   \
  /* out[lo..hi) += scale * grads[row] at offsets[row], clipped to [lo, hi), for all n rows; `whole`: nothing needs \
   * clipping */                                                                                                    \
  void scatter_floats(const T* grads, const int64_t* offsets, int64_t n, int64_t width, T scale, int64_t lo,        \
                      int64_t hi, bool whole, T* out);                                                              \
  void scatter_floats(const T* grads, const int32_t* offsets, int64_t n, int64_t width, T scale, int64_t lo,        \
                      int64_t hi, bool whole, T* out);

SHOAL_PER_ISA(SHOAL_SUM_KERNELS(float) SHOAL_SUM_KERNELS(double))
#undef SHOAL_SUM_KERNELS

}  // namespace shoal

// Like SHOAL_DISPATCH, for overloaded kernels.
#if defined(__x86_64__)
#define SHOAL_CALL(fn, ...)                                                  \
  (::shoal::isa() == ::shoal::Isa::avx512 ? ::shoal::avx512::fn(__VA_ARGS__) \
   : ::shoal::isa() == ::shoal::Isa::avx2 ? ::shoal::avx2::fn(__VA_ARGS__)   \
                                          : ::shoal::base::fn(__VA_ARGS__))
#else
#define SHOAL_CALL(fn, ...) ::shoal::base::fn(__VA_ARGS__)
#endif
