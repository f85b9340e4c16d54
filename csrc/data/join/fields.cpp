#include "data/join/fields.h"

#include <cmath>

#include "data/json_text.h"
#include "data/numbers.h"

namespace shoal::join {

namespace {

constexpr char kBetweenKeys = '\x1f';

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && is_json_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_json_space(text.back())) text.remove_suffix(1);
  return text;
}

// Reads the members of a JSON object one after another. Nested values are skipped, not checked.
class Members {
 public:
  explicit Members(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

  // True for a member; false at the end, with `*why` if the text is not an object.
  bool next(std::string_view* name, std::string_view* value, bool* quoted, std::string* why) {
    if (first_) {
      if (!take('{')) return fail(why, "is not a JSON object");
      if (take('}')) return finish(why);
      first_ = false;
    } else {
      if (take('}')) return finish(why);
      if (!take(',')) return fail(why, "has a JSON member without ',' or '}' after it");
    }
    skip_spaces();
    if (!string(name)) return fail(why, "has a JSON member without a name in quotes");
    if (!take(':')) return fail(why, "has a JSON member without ':'");
    skip_spaces();
    if (at_ == end_) return fail(why, "ends inside a JSON object");
    *quoted = *at_ == '"';
    if (*quoted) return string(value) || fail(why, "ends inside a JSON string");
    const char* begin = at_;
    if (*at_ == '{' || *at_ == '[') {
      if (!nested()) return fail(why, "ends inside a JSON value");
    } else {
      while (at_ < end_ && *at_ != ',' && *at_ != '}' && *at_ != ']' && !is_json_space(*at_)) ++at_;
    }
    *value = {begin, static_cast<size_t>(at_ - begin)};
    const bool scalar = *begin != '{' && *begin != '[';
    if (value->empty() || (scalar && !is_scalar(*value))) return fail(why, "has a malformed JSON value");
    return true;
  }

 private:
  static bool is_scalar(std::string_view text) {
    if (text == "true" || text == "false" || text == "null") return true;
    double number;
    return text[0] != '+' && to_number(text, &number);
  }
  static bool fail(std::string* why, const char* text) {
    *why = text;
    return false;
  }
  bool finish(std::string* why) {
    skip_spaces();
    return at_ == end_ ? false : fail(why, "has bytes after its JSON object");
  }
  void skip_spaces() {
    while (at_ < end_ && is_json_space(*at_)) ++at_;
  }
  bool take(char c) {
    skip_spaces();
    if (at_ == end_ || *at_ != c) return false;
    ++at_;
    return true;
  }
  bool string(std::string_view* out) {
    if (at_ == end_ || *at_ != '"') return false;
    ++at_;
    return json_text(&at_, end_, out);
  }
  bool nested() {
    int64_t depth = 0;
    std::string_view passed;
    while (at_ < end_) {
      const char c = *at_;
      if (c == '"') {
        if (!string(&passed)) return false;
        continue;
      }
      ++at_;
      if (c == '{' || c == '[') ++depth;
      if ((c == '}' || c == ']') && --depth == 0) return true;
    }
    return false;
  }

  const char* at_;
  const char* end_;
  bool first_ = true;
};

// Appends a value, unescaped if it is a text, so that two spellings of one text are one key.
bool text_of(std::string_view raw, bool quoted, std::string* out) {
  if (quoted && raw.find('\\') != std::string_view::npos) return append_unescaped(raw, out) != Unescaped::broken_escape;
  out->append(raw);
  return true;
}

bool read_time(const Fields& fields, std::string_view text, int64_t* out) {
  if (fields.per_second == 0) return read_iso_time(text, out);
  int64_t whole;
  if (to_integer(text, &whole)) {  // exact even for integers that a double cannot hold
    const double limit = static_cast<double>(kMaxTime) / 1e6 * fields.per_second;
    if (std::abs(static_cast<double>(whole)) > limit) return false;
    *out = fields.per_second <= 1e6 ? whole * static_cast<int64_t>(1e6 / fields.per_second)
                                    : whole / static_cast<int64_t>(fields.per_second / 1e6);
    return true;
  }
  double number;
  if (!to_number(text, &number)) return false;
  number = std::floor(number * (1e6 / fields.per_second) + 0.5);
  if (!(std::abs(number) <= static_cast<double>(kMaxTime))) return false;
  *out = static_cast<int64_t>(number);
  return true;
}

// The fields found in a message, of JSON or of text.
struct Found {
  std::vector<std::pair<std::string_view, bool>> key;  // with whether it was in quotes
  std::string_view time, kind, value;
  bool has_time = false, has_kind = false, has_value = false, kind_quoted = false;
};

bool find_json(const Fields& fields, std::string_view text, Found* out, std::string* why) {
  Members members(text);
  std::string_view name, value;
  bool quoted;
  size_t keys = 0;
  why->clear();
  while (members.next(&name, &value, &quoted, why)) {
    for (size_t k = 0; k < fields.key.size(); ++k) {
      if (name != fields.key[k]) continue;
      keys += out->key[k].first.data() == nullptr;
      out->key[k] = {value, quoted};
    }
    if (name == fields.time) out->time = value, out->has_time = true;
    if (!fields.kind.empty() && name == fields.kind) {
      out->kind = value, out->has_kind = true, out->kind_quoted = quoted;
    }
    if (!fields.value.empty() && name == fields.value) out->value = value, out->has_value = value != "null";
    for (const std::string& taken : fields.forbidden) {
      if (name == taken) {
        *why = "must not have a member " + shown(name) + ", since the joiner adds it";
        return false;
      }
    }
  }
  if (!why->empty()) return false;
  for (size_t k = 0; keys < fields.key.size() && k < fields.key.size(); ++k) {
    if (out->key[k].first.data() == nullptr) {
      *why = "has no member " + shown(fields.key[k]) + ", the key";
      return false;
    }
  }
  if (!out->has_time) *why = "has no member " + shown(fields.time) + ", the time";
  return out->has_time;
}

bool find_text(const Fields& fields, std::string_view text, Found* out, std::string* why) {
  int64_t column = 0;
  size_t keys = 0;
  while (true) {
    const size_t end = text.find(fields.delimiter);
    const std::string_view cell = text.substr(0, end);
    for (size_t k = 0; k < fields.key_columns.size(); ++k) {
      if (column == fields.key_columns[k]) out->key[k] = {cell, false}, ++keys;
    }
    if (column == fields.time_column) out->time = cell, out->has_time = true;
    if (column == fields.kind_column) out->kind = cell, out->has_kind = true;
    if (column == fields.value_column) out->value = cell, out->has_value = !cell.empty();
    ++column;
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  if (keys < fields.key_columns.size() || !out->has_time) {
    *why = "has " + std::to_string(column) + " columns, too few for the key and the time";
    return false;
  }
  return true;
}

}  // namespace

bool read_message(const Fields& fields, std::string_view text, Message* out, std::string* why) {
  text = trimmed(text);
  const bool json = fields.coding == Coding::json;
  Found found;
  found.key.resize(json ? fields.key.size() : fields.key_columns.size());
  if (!(json ? find_json(fields, text, &found, why) : find_text(fields, text, &found, why))) return false;
  out->key.clear();
  bool empty = true;
  for (size_t k = 0; k < found.key.size(); ++k) {
    const auto [value, quoted] = found.key[k];
    if (k > 0) out->key.push_back(kBetweenKeys);
    empty = empty && (value.empty() || (!quoted && value == "null"));
    if (!text_of(value, quoted, &out->key)) {
      *why = "has a key with a broken escape: " + shown(value);
      return false;
    }
  }
  if (empty || out->key.size() > kMaxKey) {
    *why = empty ? "has an empty key" : "has a key of more than 4096 bytes";
    return false;
  }
  if (!read_time(fields, found.time, &out->time)) {
    *why = "has a time that cannot be read: " + shown(found.time);
    return false;
  }
  out->kind = found.has_kind ? found.kind : std::string_view();
  if (found.kind_quoted && found.kind.find('\\') != std::string_view::npos) {
    out->kind_text.clear();
    text_of(found.kind, true, &out->kind_text);
    out->kind = out->kind_text;
  }
  if (out->kind.size() > kMaxKey) {
    *why = "has a kind of more than 4096 bytes";
    return false;
  }
  out->has_value = found.has_value;
  out->value = 0;
  if (found.has_value && !to_number(found.value, &out->value)) {
    *why = "has a value that is not a number: " + shown(found.value);
    return false;
  }
  out->payload = text;
  return true;
}

bool read_iso_time(std::string_view text, int64_t* out) {
  const auto digits = [&](size_t at, size_t n, int64_t* value) {
    if (at + n > text.size()) return false;
    *value = 0;
    for (size_t i = at; i < at + n; ++i) {
      if (text[i] < '0' || text[i] > '9') return false;
      *value = *value * 10 + (text[i] - '0');
    }
    return true;
  };
  const auto is = [&](size_t at, char c) { return at < text.size() && text[at] == c; };
  int64_t year, month, day, hour = 0, minute = 0, second = 0, micros = 0, offset = 0;
  if (!digits(0, 4, &year) || !is(4, '-') || !digits(5, 2, &month) || !is(7, '-') || !digits(8, 2, &day)) return false;
  size_t at = 10;
  if (at < text.size()) {
    if (!is(10, 'T') && !is(10, ' ')) return false;
    if (!digits(11, 2, &hour) || !is(13, ':') || !digits(14, 2, &minute)) return false;
    at = 16;
    if (is(at, ':')) {
      if (!digits(17, 2, &second)) return false;
      at = 19;
    }
    if (is(at, '.')) {
      int64_t scale = 100000;
      size_t digit = ++at;
      for (; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at, scale /= 10) {
        micros += (text[at] - '0') * scale;
      }
      if (at == digit) return false;
    }
    if (is(at, 'Z')) {
      ++at;
    } else if (is(at, '+') || is(at, '-')) {
      int64_t hours, minutes = 0;
      const int64_t sign = text[at] == '+' ? 1 : -1;
      if (!digits(at + 1, 2, &hours)) return false;
      at += 3;
      if (is(at, ':')) ++at;
      if (at < text.size()) {
        if (!digits(at, 2, &minutes)) return false;
        at += 2;
      }
      offset = sign * (hours * 60 + minutes) * 60;
    }
    if (at != text.size()) return false;
  }
  if (month < 1 || month > 12 || day < 1 || day > 31 || hour > 24 || minute > 59 || second > 60) return false;
  // Days since 1970 by the calendar of 400-year cycles that begin in March.
  const int64_t y = year - (month <= 2), era = (y >= 0 ? y : y - 399) / 400, of_era = y - era * 400;
  const int64_t of_year = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
  const int64_t days = era * 146097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719468;
  *out = (((days * 24 + hour) * 60 + minute) * 60 + second - offset) * 1000000 + micros;
  return true;
}

}  // namespace shoal::join
