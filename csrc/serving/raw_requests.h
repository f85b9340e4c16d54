// Reads requests with raw features or ids and makes them a net's inputs, without a Python object per tensor.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/feature.h"

namespace shoal {

// The features and numbers that an input of a request fills.
struct RawInput {
  std::vector<int64_t> features;  // whose ids are made of its values
  std::vector<int64_t> numbers;
  int64_t lengths = -1;  // the input with the number of values of each row; for lengths, their list; -1: none
  bool listed = false;   // rows may have several values
  bool text = false;     // strings are accepted
  bool real = false;     // numbers with a fraction are accepted
  bool is_lengths = false;
};

// The inputs of all requests that could be read, one after another.
struct RawBatch {
  std::vector<int64_t> rows;  // of each request; -1: another reader must read it, or report what is wrong
  int64_t total = 0;
  std::vector<int64_t> ids;
  std::vector<int64_t> lengths;  // of each sample and feature; empty if every feature has one id
  std::vector<float> dense;      // [total, numbers]
};

class RequestReader {
 public:
  // `ready`: integers of features are ids. Throws std::invalid_argument for an input with an unknown feature.
  RequestReader(FeatureSet set, std::vector<std::pair<std::string, RawInput>> inputs, bool ready);
  // Reads serialised PredictRequests.
  RawBatch read(const std::vector<std::string_view>& messages) const;
  int64_t numbers() const { return static_cast<int64_t>(set_.numbers.size()); }

 private:
  class Reading;
  FeatureSet set_;
  std::vector<RawInput> inputs_;
  std::unordered_map<std::string, int64_t, TextHash, std::equal_to<>> places_;
  bool ready_;
};

}  // namespace shoal
