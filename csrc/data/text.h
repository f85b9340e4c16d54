// Delimited text (TSV, CSV) into blocks of samples.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/block.h"

namespace shoal {

enum class Role : int { skip = 0, label = 1, dense = 2, sparse = 3, raw = 4, time = 5 };

// What the cells of one column are. `raw` cells hold ids, `sparse` ones text that is hashed into the slot.
struct TextColumn {
  Role role = Role::skip;
  int64_t index = 0;  // among the dense or among the sparse features
  uint64_t slot = 0;
};

class TextParser {
 public:
  // `quote` and `separator` are 0 for none; with a separator a sparse cell holds any number of values. Throws
  // std::invalid_argument where columns do not make sense together.
  TextParser(std::vector<TextColumn> columns, char delimiter, char quote, char separator, int64_t max_line);

  // Reads whole lines that begin before `limit`, at most `max_rows` of them. `final` says that the text does not go on,
  // so that the last line needs no newline. A line that cannot be read is bad and gives no sample. `threads` spreads
  // the work over the pool.
  Block parse(std::string_view text, bool final, int64_t max_rows, int64_t limit, bool threads) const;

  bool ragged() const { return separator_ != 0; }
  int64_t dense() const { return dense_; }
  int64_t sparse() const { return sparse_; }

 private:
  void parse_lines(std::string_view text, const int64_t* starts, int64_t begin, int64_t end, Block* out) const;
  bool parse_line(const char* at, const char* end, float* label, float* dense, int64_t* ids, int64_t* time,
                  std::vector<std::vector<int64_t>>* lists, std::string* scratch, std::string* why) const;

  std::vector<TextColumn> columns_;
  char delimiter_, quote_, separator_;
  int64_t max_line_;
  int64_t dense_ = 0, sparse_ = 0;
};

}  // namespace shoal
