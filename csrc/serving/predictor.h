// Answers requests of one signature, from their inputs to the net's outputs, without Python.
//
// A batch sees one moment: one net and one state of the rows. A round of pushes is switched to as a whole; its rows
// override those of the tables until they are written there.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nn/net/row_net.h"
#include "serving/batch.h"
#include "serving/raw_requests.h"
#include "serving/slot_rows.h"

namespace shoal {

// A feature of the net: its rows go to the net's input `input`, from column `column` on.
struct ServedFeature {
  size_t source = 0;
  BagRule rule;
  bool apart = false;  // not pooled: each id keeps its row
  size_t input = 0;
  int64_t column = 0;
};

// A named input of requests with joined tensors.
struct NamedInput {
  std::string alias;
  int64_t dtype = 0;
  std::vector<int64_t> shape;  // after the first dimension; -1: any
  int64_t feature = -1;        // the feature whose ids it has; -1: it is the net's `input`
  size_t input = 0;
};

// An output of the net in answers.
struct NamedOutput {
  std::string alias;
  std::vector<int64_t> shape;  // after the first dimension
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
    // Either a reader, which returns the ids of all features sample by sample, and the net's input number `numbers`;
    const RequestReader* reader = nullptr;
    size_t numbers = 0;
    // or named inputs.
    std::vector<NamedInput> inputs;
  };
  // Throws std::invalid_argument for inconsistent parts.
  Predictor(Parts parts, std::shared_ptr<const RowNet> net);

  const Parts& parts() const { return parts_; }

  class Use;
  // The outputs of a batch, each with its rows one after another.
  struct Results {
    std::vector<std::vector<float>> values;
  };
  void run(const Use& use, const RawBatch& made, Results* results) const;
  // `tensors`: the joined values of each named input; `shapes` include the rows.
  void run(const Use& use, const std::vector<const uint8_t*>& tensors, const std::vector<std::vector<int64_t>>& shapes,
           int64_t rows, Results* results) const;
  // The outputs to write answers from: those with the numbers `chosen`, or all if it is empty.
  std::vector<Output> outputs_of(const Results& results, const std::vector<size_t>& chosen) const;

  // Makes new batches use `net` (null: the current one) and `fresh`. Returns when all earlier batches have ended, or
  // false if one still runs after `timeout_s`. For one caller at a time.
  bool switch_to(std::shared_ptr<const RowNet> net, Fresh fresh, double timeout_s);
  // Lets no batch begin any more, then waits like switch_to. Afterwards tables and reader are not used.
  bool close(double timeout_s);

  // Held by a batch while it runs; empty if the predictor is closed.
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
  bool uniform_ = false;  // all features have the same source and pool, and their columns are side by side
  mutable std::mutex mutex_;
  std::shared_ptr<const Moment> now_;  // null: closed
};

}  // namespace shoal
