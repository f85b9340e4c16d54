// tf.train.Example messages, without TensorFlow, into blocks of samples; and the frames around them.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/block.h"
#include "data/feature.h"

namespace shoal {

// The names in messages of the label, the time (may be empty), the numbers and the features (empty for a cross).
struct ExampleLayout {
  std::string label, time;
  std::vector<std::string> dense, sparse;
  FeatureSet set;

  enum class What { label, time, dense, sparse };
  struct Use {
    What what;
    size_t index;  // among the numbers or the features
  };
  using Uses = std::unordered_map<std::string_view, std::vector<Use>>;
  // What each name is used for.
  Uses uses() const;
  // Throws std::invalid_argument unless every number and feature has a valid rule.
  void check() const;
};

// Samples in order; sparse features are ragged. A message that cannot be read is bad and gives no sample.
Block parse_tf_examples(const ExampleLayout& layout, const std::vector<std::string_view>& messages);

// The complete TFRecord frames at the beginning of `text`, at most `max_records`. Throws std::invalid_argument if the
// header of a frame is corrupt, since then the next one cannot be found. A frame with a corrupt payload is not `good`.
struct Frame {
  int64_t offset, begin, size;
  bool good;
};
std::vector<Frame> read_frames(std::string_view text, int64_t max_records, int64_t* consumed);

}  // namespace shoal
