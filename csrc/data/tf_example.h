// tf.train.Example messages, without TensorFlow, into blocks of samples; and the frames around them.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/block.h"
#include "data/feature.h"

namespace shoal {

struct ExampleLayout {
  std::string label, time;                 // an empty name is none
  std::vector<std::string> dense, sparse;  // the names in the messages of numbers and features; of a cross, empty
  FeatureSet set;
};

// Samples in order; sparse features are ragged. A message that cannot be read is bad and gives no sample.
Block parse_tf_examples(const ExampleLayout& layout, const std::vector<std::string_view>& messages);

// Whole TFRecord frames at the beginning of `text`, at most `max_records`. Throws std::invalid_argument at a frame
// whose header is corrupt, since nobody knows where the next begins. A frame whose payload is corrupt has `good` false.
struct Frame {
  int64_t offset, begin, size;
  bool good;
};
std::vector<Frame> read_frames(std::string_view text, int64_t max_records, int64_t* consumed);

}  // namespace shoal
