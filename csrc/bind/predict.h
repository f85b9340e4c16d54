// Python's handles to a native predictor. Native threads share the contents, which the last owner frees without the
// interpreter.
#pragma once
#include <atomic>
#include <memory>

#include "serving/predictor.h"

namespace shoal::bind {

struct PlanHandle {
  std::shared_ptr<const RowPlan> plan;
};
struct NetHandle {
  std::shared_ptr<const RowNet> net;
};
struct PredictorHandle {
  std::shared_ptr<Predictor> predictor;
};
// Counts how often another version of a model began to answer.
struct Generation {
  std::shared_ptr<std::atomic<int64_t>> number = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace shoal::bind
