#include "data/text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "core/thread_pool.h"
#include "data/text_hash.h"

namespace shoal {
namespace {

constexpr int64_t kLinesPerPart = 2048;

const char* newline(const char* at, const char* end) {
  const void* found = std::memchr(at, '\n', static_cast<size_t>(end - at));
  return found == nullptr ? end : static_cast<const char*>(found);
}

// The end of a line that begins at `at`: its newline, or `end`. Newlines between quotes do not count, unless the quote
// is not closed within `max_line` bytes or before the text is over: then it spoils its own line and not the rest.
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

bool to_float(std::string_view cell, float* out) {
  if (!cell.empty() && cell.size() <= 7) {  // short integers, which most numbers of a log are
    const bool negative = cell[0] == '-';
    int32_t value = 0;
    size_t i = negative;
    for (; i < cell.size() && cell[i] >= '0' && cell[i] <= '9'; ++i) value = value * 10 + (cell[i] - '0');
    if (i == cell.size() && i > negative) {
      *out = static_cast<float>(negative ? -value : value);
      return true;
    }
  }
  if (!cell.empty() && cell[0] == '+') cell.remove_prefix(1);
  const auto result = std::from_chars(cell.data(), cell.data() + cell.size(), *out);
  return result.ec == std::errc() && result.ptr == cell.data() + cell.size() && std::isfinite(*out);
}

template <class T>
bool to_integer(std::string_view cell, T* out) {
  const auto result = std::from_chars(cell.data(), cell.data() + cell.size(), *out);
  return result.ec == std::errc() && result.ptr == cell.data() + cell.size();
}

// An id in signed or unsigned decimal.
bool to_id(std::string_view cell, int64_t* out) {
  if (!cell.empty() && cell[0] == '-') return to_integer(cell, out);
  uint64_t value;
  if (!to_integer(cell, &value)) return false;
  *out = static_cast<int64_t>(value);
  return true;
}

std::string shown(std::string_view cell) {
  std::string out(cell.substr(0, 40));
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e) c = '?';
  }
  return "'" + out + (cell.size() > 40 ? "...'" : "'");
}

}  // namespace

TextParser::TextParser(std::vector<TextColumn> columns, char delimiter, char quote, char separator, int64_t max_line)
    : columns_(std::move(columns)), delimiter_(delimiter), quote_(quote), separator_(separator), max_line_(max_line) {
  int64_t labels = 0, times = 0;
  for (const TextColumn& column : columns_) {
    labels += column.role == Role::label;
    times += column.role == Role::time;
    dense_ += column.role == Role::dense;
    sparse_ += column.role == Role::sparse || column.role == Role::raw;
  }
  if (labels != 1) throw std::invalid_argument("a layout has one label column, got " + std::to_string(labels));
  if (times > 1) throw std::invalid_argument("a layout has at most one time column");
  if (delimiter_ == '\n' || delimiter_ == quote_ || delimiter_ == separator_ || delimiter_ == 0) {
    throw std::invalid_argument("the delimiter is a character of its own");
  }
  std::vector<char> seen_dense(dense_), seen_sparse(sparse_);
  for (const TextColumn& column : columns_) {
    const bool is_dense = column.role == Role::dense;
    if (!is_dense && column.role != Role::sparse && column.role != Role::raw) continue;
    auto& seen = is_dense ? seen_dense : seen_sparse;
    if (column.index < 0 || column.index >= static_cast<int64_t>(seen.size()) || seen[column.index]++) {
      throw std::invalid_argument("columns of a layout have the indices 0, 1, ...");
    }
    if (column.slot > 32767) throw std::invalid_argument("a slot is 0..32767, got " + std::to_string(column.slot));
  }
}

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
  const bool timed = std::any_of(columns_.begin(), columns_.end(), [](auto& c) { return c.role == Role::time; });
  if (timed) out->time.resize(lines);
  std::vector<std::vector<int64_t>> lists(ragged() ? sparse_ : 0);
  std::string scratch, why;
  int64_t row = 0, unused = 0;
  for (int64_t line = begin; line < end; ++line) {
    const char* at = text.data() + starts[line];
    const char* stop = text.data() + starts[line + 1];
    if (stop > at && stop[-1] == '\n') --stop;
    if (stop > at && stop[-1] == '\r') --stop;
    if (stop == at) continue;  // an empty line is nothing, good or bad
    bool good;
    if (stop - at > max_line_) {
      good = false;
      why = "the line has " + std::to_string(stop - at) + " bytes, more than " + std::to_string(max_line_);
    } else {
      good = parse_line(at, stop, &out->label[row], out->dense.data() + row * dense_,
                        out->ids.data() + (ragged() ? 0 : row * sparse_), timed ? &out->time[row] : &unused, &lists,
                        &scratch, &why);
    }
    if (!good) {
      out->bad.push_back({line, starts[line], why});
      continue;
    }
    if (ragged()) {
      for (auto& list : lists) {
        out->lengths.push_back(static_cast<int64_t>(list.size()));
        out->ids.insert(out->ids.end(), list.begin(), list.end());
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

bool TextParser::parse_line(const char* at, const char* end, float* label, float* dense, int64_t* ids, int64_t* time,
                            std::vector<std::vector<int64_t>>* lists, std::string* scratch, std::string* why) const {
  const auto bad = [&](size_t column, const char* what, std::string_view cell) {
    *why = "column " + std::to_string(column + 1) + " " + what + ", got " + shown(cell);
    return false;
  };
  for (size_t c = 0; c < columns_.size(); ++c) {
    if (at > end) {
      *why = "the line has " + std::to_string(c) + " columns, not " + std::to_string(columns_.size());
      return false;
    }
    std::string_view cell;
    if (quote_ != 0 && at < end && *at == quote_) {  // "a ""quoted"" cell"
      scratch->clear();
      for (++at;; ++at) {
        if (at >= end) return bad(c, "has a quote that is not closed", *scratch);
        if (*at == quote_) {
          if (at + 1 >= end || at[1] != quote_) break;
          ++at;
        }
        scratch->push_back(*at);
      }
      ++at;
      if (at < end && *at != delimiter_) return bad(c, "goes on after its closing quote", {at, size_t(end - at)});
      cell = *scratch;
    } else {
      const void* found = std::memchr(at, delimiter_, static_cast<size_t>(end - at));
      const char* stop = found == nullptr ? end : static_cast<const char*>(found);
      cell = {at, static_cast<size_t>(stop - at)};
      at = stop;
    }
    ++at;  // past the delimiter, or past the end, which says that there was none
    const TextColumn& column = columns_[c];
    switch (column.role) {
      case Role::skip:
        break;
      case Role::label:
        if (!to_float(cell, label)) return bad(c, "is the label, a number", cell);
        break;
      case Role::dense:
        if (cell.empty()) {
          dense[column.index] = 0;  // missing
        } else if (!to_float(cell, dense + column.index)) {
          return bad(c, "is a number or empty", cell);
        }
        break;
      case Role::time:
        if (!to_integer(cell, time) || *time < 0 || *time > UINT32_MAX) {
          return bad(c, "is a time in seconds since 1970", cell);
        }
        break;
      case Role::sparse:
      case Role::raw: {
        std::vector<int64_t>* list = lists->empty() ? nullptr : &(*lists)[column.index];
        if (list != nullptr) list->clear();
        while (list == nullptr || !cell.empty()) {
          const size_t cut = list == nullptr ? cell.npos : cell.find(separator_);
          const std::string_view value = cell.substr(0, cut);
          int64_t id;
          if (column.role == Role::sparse) {
            id = text_fid(value, column.slot);
          } else if (!to_id(value, &id)) {
            return bad(c, "is a 64-bit id", value);
          }
          if (list == nullptr) {
            ids[column.index] = id;
            break;
          }
          list->push_back(id);
          cell = cut == cell.npos ? std::string_view() : cell.substr(cut + 1);
        }
        break;
      }
    }
  }
  if (at <= end) {
    *why = "the line has more than " + std::to_string(columns_.size()) + " columns";
    return false;
  }
  return true;
}

}  // namespace shoal
