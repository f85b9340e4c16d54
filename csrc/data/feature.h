// How raw values of features become ids, and how numbers become a net's inputs: readers and servers share this one
// definition. Checkpoints and exports depend on its results, so they must never change.
#pragma once
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/isa.h"

namespace shoal {

enum class Rule : int { text = 0, id = 1, bucket = 2, log = 3, vocabulary = 4, cross = 5 };
enum class Unknown : int { hash = 0, one = 1, drop = 2 };  // for words that are not in the vocabulary

struct TextHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
using Vocabulary = std::unordered_map<std::string, int64_t, TextHash, std::equal_to<>>;

// One feature. A feature that is not `listed` has exactly one id in every sample.
struct FeatureRule {
  Rule rule = Rule::text;
  uint64_t slot = 0;
  bool listed = false;
  char separator = 0;                  // between the values of a text cell; 0: a cell is one value
  int64_t limit = 0;                   // keep this many of a sample's ids, the first ones; 0: all
  std::optional<std::string> missing;  // the value used for an empty or missing one
  std::vector<double> edges;           // bucket: rising; the number of edges <= the value becomes the id
  double steps = 1;                    // log: ids per doubling of 1 + |x|
  std::shared_ptr<const Vocabulary> words;
  Unknown unknown = Unknown::one;
  std::vector<int64_t> of;  // cross: the numbers of its features, all before this one

  // Append the ids of a value, a text cell or a missing value; false, with `why`, if it is invalid.
  bool add(std::string_view value, std::vector<int64_t>* out, std::string* why) const;
  bool add(int64_t value, std::vector<int64_t>* out, std::string* why) const;
  bool add(double value, std::vector<int64_t>* out, std::string* why) const;
  bool add_cell(std::string_view cell, std::vector<int64_t>* out, std::string* why) const;
  bool add_missing(std::vector<int64_t>* out, std::string* why) const;
  // Keeps the first `limit` ids of a sample; false, with `why`, unless the feature is listed or has one id.
  bool end(std::vector<int64_t>* out, std::string* why) const;

 private:
  void add_number(double value, std::vector<int64_t>* out) const;
};

// One input of the net: clipped to low..high, then the logarithm, then (x - mean) * scale.
struct NumberRule {
  float missing = 0;
  float low = -std::numeric_limits<float>::infinity(), high = std::numeric_limits<float>::infinity();
  bool log = false;  // sign(x) * log(1 + |x|)
  float mean = 0, scale = 1;
};

struct FeatureSet {
  std::vector<FeatureRule> features;
  std::vector<NumberRule> numbers;

  // Throws std::invalid_argument for inconsistent rules.
  void check() const;
  bool listed() const;
  // Fills the crosses of one sample from the lists of the other features.
  bool cross(std::vector<std::vector<int64_t>>* lists, std::string* why) const;
  // Numbers of n samples, in place, on the calling thread.
  void apply_numbers(float* values, int64_t n) const;
};

// The rules of a row of numbers, repeated for some rows, so that one loop can go over all their values.
struct NumberRows {
  explicit NumberRows(const std::vector<NumberRule>& rules);
  std::vector<float> low, high, log, mean, scale;  // log: 1 or 0
};

SHOAL_PER_ISA(void apply_number_rows(const NumberRows& rows, int64_t n, float* values);)

// The id of a combination of ids, in the order of the features.
int64_t cross_fid(const int64_t* ids, size_t n, uint64_t slot);

}  // namespace shoal
