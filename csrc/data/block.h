// Parsed samples: the output of all readers of text and records.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace shoal {

// A row of numbers and the ids of all features per sample. A feature has one id per sample, a listed one any number.
// `lengths` has an entry per sample and feature; it may be empty if no feature is listed.
struct Block {
  int64_t rows = 0;
  std::vector<float> label;
  std::vector<float> dense;
  std::vector<int64_t> ids;
  std::vector<int64_t> lengths;
  std::vector<int64_t> time;

  struct Bad {
    int64_t line;    // number among the lines or records of the call
    int64_t offset;  // the byte of the call's text at which it begins
    std::string why;
  };
  std::vector<Bad> bad;
  int64_t lines = 0;     // read, including bad ones
  int64_t consumed = 0;  // bytes that were read
};

// Joins blocks of consecutive samples; the caller sets `lines` and `consumed`.
inline Block joined(std::vector<Block>& blocks) {
  Block out;
  const auto join = [&](auto Block::* field) {
    if (blocks.size() == 1) {
      out.*field = std::move(blocks[0].*field);
      return;
    }
    for (Block& block : blocks) (out.*field).insert((out.*field).end(), (block.*field).begin(), (block.*field).end());
  };
  join(&Block::label), join(&Block::dense), join(&Block::ids), join(&Block::lengths), join(&Block::time);
  join(&Block::bad);
  for (const Block& block : blocks) out.rows += block.rows;
  return out;
}

}  // namespace shoal
