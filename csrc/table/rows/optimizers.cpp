#include "table/rows/optimizers.h"

#include <algorithm>
#include <cstring>

namespace shoal {

StepFn step_function(Opt opt) { return SHOAL_DISPATCH(step_function)(opt); }

void init_state(const Segment& s, char* state) {
  std::memset(state, 0, static_cast<size_t>(s.state_bytes));
  const float starts[] = {0, s.initial_accumulator, s.beta1, s.beta2};  // in the order of StateField::Start
  for (const StateField& field : kind_of(s.opt).state) {
    if (field.start == StateField::zero) continue;
    auto* at = reinterpret_cast<float*>(state + field.offset(s.dim));
    std::fill_n(at, field.type == StateField::vector ? s.dim : 1, starts[field.start]);
  }
}

}  // namespace shoal
