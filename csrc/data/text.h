// Delimited text (TSV, CSV) into blocks of samples.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/block.h"
#include "data/feature.h"

namespace shoal {

enum class Role : int { label = 0, dense = 1, sparse = 2, time = 3 };

// A use of a column's cells; `index` is among the numbers or among the features.
struct TextUse {
  Role role = Role::label;
  int64_t index = 0;
};

class TextParser {
 public:
  // `columns` has the uses of each column, which may be none; `quote` 0 means none. Throws std::invalid_argument for
  // columns that conflict.
  TextParser(std::vector<std::vector<TextUse>> columns, FeatureSet set, char delimiter, char quote, int64_t max_line);

  // Reads complete lines that begin before `limit`, at most `max_rows`. `final` says that the text ends here, so the
  // last line needs no newline. A line that cannot be read is bad and gives no sample. `threads` spreads the work over
  // the pool.
  Block parse(std::string_view text, bool final, int64_t max_rows, int64_t limit, bool threads) const;

  bool ragged() const { return ragged_; }

 private:
  void parse_lines(std::string_view text, const int64_t* starts, int64_t begin, int64_t end, Block* out) const;
  struct Line;
  bool parse_line(const char* at, const char* end, Line* line) const;
  bool use_cell(const TextUse& use, std::string_view cell, Line* line) const;

  std::vector<std::vector<TextUse>> columns_;
  FeatureSet set_;
  char delimiter_, quote_;
  int64_t max_line_;
  int64_t dense_, sparse_;
  bool ragged_;  // features have any number of ids
  bool plain_;   // every feature has one id, made of its cell
};

}  // namespace shoal
