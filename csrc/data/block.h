// Parsed samples: what every reader of text or records fills.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace shoal {

// One row of `dense` numbers and `sparse` features per sample. A feature has one id, or with `ragged` any number of
// them: then `lengths` has an entry per sample and feature.
struct Block {
  int64_t rows = 0;
  std::vector<float> label;
  std::vector<float> dense;
  std::vector<int64_t> ids;
  std::vector<int64_t> lengths;
  std::vector<int64_t> time;

  struct Bad {
    int64_t line;    // number among the lines or records of the call
    int64_t offset;  // where it begins, in bytes from the beginning of the call's text
    std::string why;
  };
  std::vector<Bad> bad;
  int64_t lines = 0;     // that were read, bad ones too
  int64_t consumed = 0;  // bytes that were read
};

}  // namespace shoal
