// Requests of one signature, from their inputs to the net's outputs, without Python.
//
// What a batch sees is a moment: one net and one state of the rows, from its first lookup on. A round of pushes is
// switched to as a whole; its rows lie over the tables until they are written there.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "nn/net/row_net.h"
#include "serving/batch.h"
#include "serving/raw_requests.h"
#include "serving/slot_rows.h"

namespace shoal {

// A feature of the net: its rows go to the columns from `column` on of the net's input `input`.
struct ServedFeature {
  size_t source = 0;
  BagRule rule;
  bool apart = false;  // not pooled: each id has a row
  size_t input = 0;
  int64_t column = 0;
};

// A named input of a request, as requests of joined tensors have them.
struct NamedInput {
  std::string alias;
  int64_t dtype = 0;
  std::vector<int64_t> shape;  // behind the rows; -1: any
  int64_t feature = -1;        // whose ids it has; else it is the net's `input`
  size_t input = 0;
};

// A result of the net, as answers have it.
struct NamedOutput {
  std::string alias;
  std::vector<int64_t> shape;  // behind the rows
};

struct PredictorMoment {
  std::shared_ptr<const RowNet> net;
  Fresh fresh;
};

class Predictor {
 public:
  struct Parts {
    std::vector<RowSource> sources;
    std::vector<ServedFeature> features;
    std::vector<NamedOutput> outputs;  // of the net, in order
    // Either a reader, whose ids are of all features sample by sample, and whose numbers are the net's input `numbers`,
    const RequestReader* reader = nullptr;
    size_t numbers = 0;
    // or inputs by name.
    std::vector<NamedInput> inputs;
  };
  // Throws std::invalid_argument where the parts do not go together.
  Predictor(Parts parts, std::shared_ptr<const RowNet> net);

  const Parts& parts() const { return parts_; }

  class Use;
  // Outputs of a batch: of each a row behind the other.
  struct Results {
    std::vector<std::vector<float>> values;
  };
  void run(const Use& use, const RawBatch& made, Results* results) const;
  // `tensors`: the joined values of each named input, `shapes` with their rows.
  void run(const Use& use, const std::vector<const uint8_t*>& tensors, const std::vector<std::vector<int64_t>>& shapes,
           int64_t rows, Results* results) const;
  // The values as answers are written from; some of the outputs by their number, all if there is none.
  std::vector<Output> outputs_of(const Results& results, const std::vector<size_t>& chosen) const;

  // Batches begin with `net` (null: the one that there is) and `fresh` from now on. Returns when no batch is left that
  // began before; false if one still runs after `timeout_s`. One caller at a time.
  bool switch_to(std::shared_ptr<const RowNet> net, Fresh fresh, double timeout_s);
  // No batch begins any more; then as above. Tables and reader are not used after that.
  bool close(double timeout_s);

  // Held by a batch while it runs; empty where the predictor is closed.
  class Use {
   public:
    explicit Use(const Predictor& predictor) : moment_(predictor.enter()) {}
    explicit operator bool() const { return moment_ != nullptr; }

   private:
    friend class Predictor;
    std::shared_ptr<const PredictorMoment> moment_;
  };

 private:
  using Moment = PredictorMoment;
  std::shared_ptr<const Moment> enter() const;
  void finish(const Moment& moment, const std::vector<const float*>& inputs, int64_t rows, Results* results) const;
  void read_samples(const Moment& moment, const RawBatch& made, std::vector<std::vector<float>>* inputs) const;

  const Parts parts_;
  bool uniform_ = false;  // all features are read from one source in one way, side by side
  mutable std::mutex mutex_;
  std::shared_ptr<const Moment> now_;  // null: closed
};

}  // namespace shoal
