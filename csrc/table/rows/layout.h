// The layout of a table's row: its segments, the places of their weights and optimizer states, and their encoding.
//
// A training row is float weights[dim], then the optimizer states of the segments in order, without gaps; an int64
// in a state may be unaligned, so it is read and written by memcpy. A serving row is the encoded weights of the
// segments in order.
#pragma once
#include <cstdint>
#include <vector>

#include "table/rows/kinds.h"

namespace shoal {

enum class Init : int32_t { zeros, ones, constants, random_uniform };
enum class Codec : int32_t { fp32, fp16, fixed_r8, one_bit };

struct Segment {
  int32_t dim = 0;

  Opt opt = Opt::sgd;
  float initial_accumulator = 0.1f;
  float weight_decay = 0;
  float beta1 = 0.9f;  // also adadelta's averaging ratio, and the momentum of optimizers with one
  float beta2 = 0.99f;
  float epsilon = 0;               // added to the root that a step is divided by; adadelta: under the roots
  bool corrected_epsilon = false;  // adam family: epsilon is added to the bias-corrected root
  float beta = 0;                  // ftrl family and group_adagrad
  float l1 = 0, l2 = 0;
  bool nesterov = false;
  bool decoupled = false;  // decouple_weight_decay
  bool stochastic_rounding = false;

  Init init = Init::zeros;
  float init_low = 0, init_high = 0;  // constants: low; random_uniform: [low, high)
  int32_t init_column = 0;            // first column in the wider segment of which this is a slice

  // Training: fixed_r8 and one_bit make lookups quantization-aware. Serving: how the row is stored.
  Codec codec = Codec::fp32;
  float r = 1.0f;  // fixed_r8
  int64_t step_size = 200;
  float init_scale = 1.0f, max_scale = 10000.0f, amplitude = 0.1f;  // one_bit

  // Set by Layout.
  int32_t weight = 0;  // first weight, in floats from the start of the embedding
  int32_t state = 0;   // first byte of the state in a training row
  int32_t state_bytes = 0;
  int32_t code = 0;  // first byte of the code in a serving row
  int32_t code_bytes = 0;
};

struct Layout {
  // Throws std::invalid_argument for an empty list, a dim below 1 or one that makes a row larger than 2^28 bytes.
  Layout(std::vector<Segment> segments, bool serving, bool skip_zero);

  std::vector<Segment> segments;
  bool serving;
  bool skip_zero;                 // serving: an all-zero vector is not stored
  int32_t dim = 0;                // floats of one embedding
  int32_t row_bytes = 0;          // bytes of a row
  int32_t stride = 0;             // bytes from one row to the next in memory: row_bytes rounded up to a multiple of 4
  std::vector<char> fresh_state;  // of a training row: the bytes after its weights, before any gradient
};

int32_t state_bytes(Opt opt, int32_t dim);
int32_t code_bytes(Codec codec, int32_t dim);

}  // namespace shoal
