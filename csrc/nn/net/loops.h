// Elementwise loops over the values of rows, one per simple step of a net.
#pragma once
#include <cstdint>

#include "core/isa.h"

namespace shoal {

// The order is shared with src/shoal/serving/server/net/row_plan.py.
enum class Op : int32_t {
  copy,
  negate,
  absolute,
  relu,
  sigmoid,
  tanh,
  exp,
  log,
  sqrt,
  square,
  reciprocal,
  gelu,
  gelu_tanh,
  silu,
  softplus,  // beta, threshold
  leaky_relu,
  elu,
  clamp,  // low, high
  power,  // exponent
  add,    // a + number * b
  subtract,
  multiply,
  divide,
  maximum,
  minimum,
  sum,  // added to out, which has a value already
  largest,
};
constexpr int32_t kOps = static_cast<int32_t>(Op::largest) + 1;

// count[1] times count[0] values; strides of a, b and out, the inner loop's first.
struct Inner {
  int64_t count[2];
  int64_t a[2], b[2], out[2];
  float number, other;
};

SHOAL_PER_ISA(void apply_op(Op op, const Inner& loop, const float* a, const float* b, float* out);)

}  // namespace shoal
