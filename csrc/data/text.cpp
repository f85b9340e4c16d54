#include "data/text.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "core/thread_pool.h"
#include "data/numbers.h"
#include "data/text_hash.h"

namespace shoal {
namespace {

constexpr int64_t kLinesPerPart = 2048;

const char* newline(const char* at, const char* end) {
  const void* found = std::memchr(at, '\n', static_cast<size_t>(end - at));
  return found == nullptr ? end : static_cast<const char*>(found);
}

// The end of a line that begins at `at`: its newline, or `end`. Newlines between quotes do not count, unless the quote
// is not closed within `max_line` bytes or before the end of the text: then only its own line is bad.
const char* line_end(const char* at, const char* end, char quote, bool final, int64_t max_line) {
  if (quote == 0) return newline(at, end);
  bool quoted = false;
  for (const char* p = at; p < end; ++p) {
    if (*p == quote) quoted = !quoted;
    if (*p == '\n' && !quoted) return p;
    if (quoted && p - at > max_line) return newline(at, end);
  }
  return quoted && final ? newline(at, end) : end;
}

}  // namespace

TextParser::TextParser(std::vector<std::vector<TextUse>> columns, FeatureSet set, char delimiter, char quote,
                       int64_t max_line)
    : columns_(std::move(columns)), set_(std::move(set)), delimiter_(delimiter), quote_(quote), max_line_(max_line) {
  set_.check();
  dense_ = static_cast<int64_t>(set_.numbers.size());
  sparse_ = static_cast<int64_t>(set_.features.size());
  ragged_ = set_.listed();
  plain_ = std::all_of(set_.features.begin(), set_.features.end(), [](const FeatureRule& feature) {
    return !feature.listed && !feature.missing && (feature.rule == Rule::text || feature.rule == Rule::id);
  });
  if (delimiter_ == '\n' || delimiter_ == quote_ || delimiter_ == 0)
    throw std::invalid_argument("the delimiter must not be a newline, a zero byte or the quote");
  for (const FeatureRule& feature : set_.features)
    if (feature.separator == delimiter_)
      throw std::invalid_argument(std::string("the separator must differ from the delimiter, got '") + delimiter_ +
                                  "' for both");
  int64_t labels = 0, times = 0;
  std::vector<char> seen_dense(dense_), seen_sparse(sparse_);
  for (const auto& uses : columns_) {
    for (const TextUse& use : uses) {
      labels += use.role == Role::label;
      times += use.role == Role::time;
      if (use.role != Role::dense && use.role != Role::sparse) continue;
      auto& seen = use.role == Role::dense ? seen_dense : seen_sparse;
      if (use.index < 0 || use.index >= static_cast<int64_t>(seen.size()) || seen[use.index]++)
        throw std::invalid_argument(std::string(use.role == Role::dense ? "number " : "feature ") +
                                    std::to_string(use.index) + " must be one of " + std::to_string(seen.size()) +
                                    " and have one column");
    }
  }
  for (int64_t f = 0; f < sparse_; ++f) seen_sparse[f] |= set_.features[f].rule == Rule::cross;
  for (const auto* seen : {&seen_dense, &seen_sparse})
    if (const auto found = std::find(seen->begin(), seen->end(), 0); found != seen->end())
      throw std::invalid_argument(std::string(seen == &seen_dense ? "number " : "feature ") +
                                  std::to_string(found - seen->begin()) + " must have a column, got none");
  if (labels != 1) throw std::invalid_argument("there must be one label column, got " + std::to_string(labels));
  if (times > 1) throw std::invalid_argument("there must be at most one time column, got " + std::to_string(times));
}

// Where the values of one line's cells go.
struct TextParser::Line {
  float* label;
  float* dense;
  int64_t* ids;  // if features are plain
  int64_t* time;
  std::vector<std::vector<int64_t>> lists;  // otherwise, the ids of each feature
  std::string scratch, why;
};

Block TextParser::parse(std::string_view text, bool final, int64_t max_rows, int64_t limit, bool threads) const {
  Block out;
  std::vector<int64_t> starts;  // of the lines, and where the last one ends
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  const char* at = begin;
  limit = std::min(limit, static_cast<int64_t>(text.size()));
  while (at < end && at - begin < limit && static_cast<int64_t>(starts.size()) < max_rows) {
    const char* stop = line_end(at, end, quote_, final, max_line_);
    if (stop == end && !final) break;
    starts.push_back(at - begin);
    at = stop == end ? end : stop + 1;
  }
  out.lines = static_cast<int64_t>(starts.size());
  out.consumed = at - begin;
  starts.push_back(out.consumed);

  const int64_t share = threads ? kLinesPerPart : std::max<int64_t>(1, out.lines);
  const int64_t parts = std::max<int64_t>(1, (out.lines + share - 1) / share);
  std::vector<Block> blocks(parts);
  parallel_parts(parts, [&](int64_t part) {
    const int64_t first = part * share;
    parse_lines(text, starts.data(), first, std::min(out.lines, first + share), &blocks[part]);
  });
  const auto join = [&](auto Block::* field, int64_t per_row) {
    auto& to = out.*field;
    if (blocks.size() == 1) {
      to = std::move(blocks[0].*field);
      return;
    }
    to.reserve(out.lines * per_row);
    for (Block& block : blocks) to.insert(to.end(), (block.*field).begin(), (block.*field).end());
  };
  join(&Block::label, 1);
  join(&Block::dense, dense_);
  join(&Block::ids, sparse_);
  join(&Block::lengths, ragged() ? sparse_ : 0);
  join(&Block::time, 0);
  join(&Block::bad, 0);
  for (const Block& block : blocks) out.rows += block.rows;
  return out;
}

void TextParser::parse_lines(std::string_view text, const int64_t* starts, int64_t begin, int64_t end,
                             Block* out) const {
  const int64_t lines = end - begin;
  out->label.resize(lines);
  out->dense.resize(lines * dense_);
  if (!ragged()) out->ids.resize(lines * sparse_);
  const bool timed = std::any_of(columns_.begin(), columns_.end(), [](const auto& uses) {
    return std::any_of(uses.begin(), uses.end(), [](const TextUse& use) { return use.role == Role::time; });
  });
  if (timed) out->time.resize(lines);
  Line cells{};
  cells.lists.resize(plain_ ? 0 : sparse_);
  int64_t row = 0, unused = 0;
  for (int64_t line = begin; line < end; ++line) {
    const char* at = text.data() + starts[line];
    const char* stop = text.data() + starts[line + 1];
    if (stop > at && stop[-1] == '\n') --stop;
    if (stop > at && stop[-1] == '\r') --stop;
    if (stop == at) continue;  // empty lines are ignored
    bool good;
    if (stop - at > max_line_) {
      good = false;
      cells.why = "the line has " + std::to_string(stop - at) + " bytes, more than " + std::to_string(max_line_);
    } else {
      cells.label = &out->label[row];
      cells.dense = out->dense.data() + row * dense_;
      cells.ids = out->ids.data() + (ragged() ? 0 : row * sparse_);
      cells.time = timed ? &out->time[row] : &unused;
      good = parse_line(at, stop, &cells);
    }
    if (!good) {
      out->bad.push_back({line, starts[line], cells.why});
      continue;
    }
    for (size_t f = 0; f < cells.lists.size(); ++f) {
      const auto& list = cells.lists[f];
      if (ragged()) {
        out->lengths.push_back(static_cast<int64_t>(list.size()));
        out->ids.insert(out->ids.end(), list.begin(), list.end());
      } else {
        cells.ids[f] = list[0];
      }
    }
    ++row;
  }
  out->rows = row;
  out->label.resize(row);
  out->dense.resize(row * dense_);
  if (!ragged()) out->ids.resize(row * sparse_);
  if (timed) out->time.resize(row);
}

bool TextParser::use_cell(const TextUse& use, std::string_view cell, Line* line) const {
  const auto bad = [&](const char* what) {
    line->why = std::string(what) + ", got " + shown(cell);
    return false;
  };
  switch (use.role) {
    case Role::label:
      return to_float(cell, line->label) || bad("is the label and must be a number");
    case Role::dense:
      if (cell.empty()) return line->dense[use.index] = set_.numbers[use.index].missing, true;
      return to_float(cell, line->dense + use.index) || bad("must be a number or empty");
    case Role::time:
      return (to_integer(cell, line->time) && *line->time >= 0 && *line->time <= UINT32_MAX) ||
             bad("must be a time in seconds since 1970");
    case Role::sparse:
      break;
  }
  const FeatureRule& feature = set_.features[use.index];
  if (!plain_) {
    auto* list = &line->lists[use.index];
    list->clear();
    return feature.add_cell(cell, list, &line->why) && feature.end(list, &line->why);
  }
  if (feature.rule == Rule::text) return line->ids[use.index] = text_fid(cell, feature.slot), true;
  return to_id(cell, line->ids + use.index) || bad("must be a 64-bit id");
}

bool TextParser::parse_line(const char* at, const char* end, Line* line) const {
  const auto bad = [&](size_t column, const std::string& why) {
    line->why = "column " + std::to_string(column + 1) + " " + why;
    return false;
  };
  for (size_t c = 0; c < columns_.size(); ++c) {
    if (at > end) {
      line->why = "the line must have " + std::to_string(columns_.size()) + " columns, got " + std::to_string(c);
      return false;
    }
    std::string_view cell;
    if (quote_ != 0 && at < end && *at == quote_) {  // "a ""quoted"" cell"
      std::string& scratch = line->scratch;
      scratch.clear();
      for (++at;; ++at) {
        if (at >= end) return bad(c, "has a quote that is not closed, got " + shown(scratch));
        if (*at == quote_) {
          if (at + 1 >= end || at[1] != quote_) break;
          ++at;
        }
        scratch.push_back(*at);
      }
      ++at;
      if (at < end && *at != delimiter_)
        return bad(c, "must end at its closing quote, got " + shown({at, size_t(end - at)}) + " after it");
      cell = scratch;
    } else {
      const void* found = std::memchr(at, delimiter_, static_cast<size_t>(end - at));
      const char* stop = found == nullptr ? end : static_cast<const char*>(found);
      cell = {at, static_cast<size_t>(stop - at)};
      at = stop;
    }
    ++at;  // past the delimiter; without one, past the end
    for (const TextUse& use : columns_[c])
      if (!use_cell(use, cell, line)) return bad(c, line->why);
  }
  if (at <= end) {
    line->why = "the line must have " + std::to_string(columns_.size()) + " columns, got more";
    return false;
  }
  return plain_ || set_.cross(&line->lists, &line->why);
}

}  // namespace shoal
