// The row optimizers: for each one its name, its number in files and the state that a row holds for it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace shoal {

// A field of an optimizer's state: it begins after `vectors` times dim floats and `bytes` bytes, and is field `number`
// of the message in a checkpoint.
struct StateField {
  enum Type { vector, scalar, step };  // dim floats, a float, an int64 that may be unaligned
  enum Start { zero, accumulator, beta1, beta2 };
  uint32_t number;
  Type type;
  int vectors;
  int bytes;
  const char* name;
  Start start = zero;  // its value in a fresh row

  int32_t offset(int32_t dim) const { return vectors * 4 * dim + bytes; }
  int32_t size(int32_t dim) const { return type == vector ? 4 * dim : type == scalar ? 4 : 8; }
};

namespace states {
using enum StateField::Type;
using enum StateField::Start;
inline constexpr std::span<const StateField> none;
inline constexpr StateField norm[] = {{1, vector, 0, 0, "norm", accumulator}};
inline constexpr StateField dynamic[] = {{1, vector, 0, 0, "norm", accumulator}, {2, step, 1, 0, "last_update_step"}};
inline constexpr StateField ftrl[] = {{1, vector, 1, 0, "zero"}, {2, vector, 0, 0, "norm", accumulator}};
inline constexpr StateField square_sum[] = {{1, scalar, 0, 0, "grad_square_sum", accumulator}};
inline constexpr StateField adadelta[] = {{1, vector, 0, 0, "accum"}, {2, vector, 1, 0, "accum_update"}};
inline constexpr StateField adam[] = {{1, vector, 0, 0, "m"},
                                      {2, vector, 1, 0, "v"},
                                      {3, scalar, 2, 0, "beta1_power", beta1},
                                      {4, scalar, 2, 4, "beta2_power", beta2}};
inline constexpr StateField amsgrad[] = {{1, vector, 0, 0, "m"},
                                         {2, vector, 1, 0, "v"},
                                         {3, vector, 2, 0, "vhat"},
                                         {4, scalar, 3, 0, "beta1_power", beta1},
                                         {5, scalar, 3, 4, "beta2_power", beta2}};
inline constexpr StateField momentum[] = {{1, vector, 0, 0, "n"}};
inline constexpr StateField last_step[] = {{1, step, 0, 0, "global_step"}};
inline constexpr StateField row_norm[] = {{1, scalar, 0, 0, "norm", accumulator}};
}  // namespace states

// name, number in SingleOptimizerDump (not the one in OptimizerConfig; 0: nothing is saved), state
#define SHOAL_OPTIMIZERS(X)         \
  X(sgd, 2, none)                   \
  X(adagrad, 1, norm)               \
  X(dynamic_wd_adagrad, 4, dynamic) \
  X(adadelta, 6, adadelta)          \
  X(adam, 7, adam)                  \
  X(amsgrad, 8, amsgrad)            \
  X(momentum, 9, momentum)          \
  X(moving_average, 0, none)        \
  X(rmsprop, 11, momentum)          \
  X(rmspropv2, 12, momentum)        \
  X(ftrl, 3, ftrl)                  \
  X(group_ftrl, 13, ftrl)           \
  X(group_adagrad, 15, square_sum)  \
  X(batch_softmax, 14, last_step)   \
  X(rowwise_adagrad, 101, row_norm) \
  X(adamw, 102, adam)               \
  X(lamb, 103, adam)

enum class Opt : int32_t {
#define SHOAL_ROW(name, number, state) name,
  SHOAL_OPTIMIZERS(SHOAL_ROW)
#undef SHOAL_ROW
};

struct OptKind {
  const char* name;
  uint32_t number;
  std::span<const StateField> state;  // by number
};

inline constexpr OptKind kOptKinds[] = {
#define SHOAL_ROW(name, number, state) {#name, number, states::state},
    SHOAL_OPTIMIZERS(SHOAL_ROW)
#undef SHOAL_ROW
};

inline const OptKind& kind_of(Opt opt) { return kOptKinds[static_cast<size_t>(opt)]; }

}  // namespace shoal
