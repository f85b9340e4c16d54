// Requests of raw features, or of ids, read and made into a net's inputs together, without a Python object per tensor.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/feature.h"

namespace shoal {

// What an input of a request stands for.
struct RawInput {
  std::vector<int64_t> features;  // made of its values
  std::vector<int64_t> numbers;
  int64_t lengths = -1;  // the input that says how many values each row of this list has, if there can be one
  bool listed = false;   // rows may have several values
  bool text = false;     // strings are taken
  bool real = false;     // numbers with a fraction are taken
  bool is_lengths = false;
};

// Inputs of all requests that could be read, one after the other.
struct RawBatch {
  std::vector<int64_t> rows;  // of each request; -1: it is left to a reader that can say what is wrong with it
  int64_t total = 0;
  std::vector<int64_t> ids;
  std::vector<int64_t> lengths;  // of each sample and feature; empty where every feature has one id
  std::vector<float> dense;      // [total, numbers]
};

class RequestReader {
 public:
  // `ready`: integers of features are ids. Throws std::invalid_argument where an input has a feature that is not there.
  RequestReader(FeatureSet set, std::vector<std::pair<std::string, RawInput>> inputs, bool ready);
  // Of serialised PredictRequests.
  RawBatch read(const std::vector<std::string_view>& messages) const;
  bool ragged() const { return ragged_; }
  int64_t numbers() const { return static_cast<int64_t>(set_.numbers.size()); }

 private:
  class Reading;
  FeatureSet set_;
  std::vector<RawInput> inputs_;
  std::unordered_map<std::string, int64_t, TextHash, std::equal_to<>> places_;
  bool ready_, ragged_;
};

}  // namespace shoal
