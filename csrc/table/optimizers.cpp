#include "table/optimizers.h"

#include <algorithm>
#include <cstring>

namespace shoal {

StepFn step_function(Opt opt) { return SHOAL_DISPATCH(step_function)(opt); }

void init_state(const Segment& s, char* state) {
  std::memset(state, 0, static_cast<size_t>(s.state_bytes));
  auto* floats = reinterpret_cast<float*>(state);
  switch (s.opt) {
    case Opt::adagrad:
    case Opt::dynamic_wd_adagrad:
    case Opt::ftrl:
    case Opt::group_ftrl:
      std::fill_n(floats, s.dim, s.initial_accumulator);
      break;
    case Opt::group_adagrad:
    case Opt::rowwise_adagrad:
      floats[0] = s.initial_accumulator;
      break;
    case Opt::adam:
    case Opt::adamw:
    case Opt::lamb:
    case Opt::amsgrad: {
      float* powers = floats + (s.opt == Opt::amsgrad ? 3 : 2) * s.dim;
      powers[0] = s.beta1;
      powers[1] = s.beta2;
      break;
    }
    default:
      break;
  }
}

}  // namespace shoal
