#include "data/json_lines.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/thread_pool.h"
#include "data/json_text.h"
#include "data/numbers.h"

namespace shoal {
namespace {

constexpr int64_t kPerPart = 1024;
constexpr int kDepth = 256;  // levels of nesting in a value that is skipped

struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using What = ExampleLayout::What;
using Use = ExampleLayout::Use;
using Uses = ExampleLayout::Uses;

// A text without its quotes, a number's digits, true, false or null.
struct Scalar {
  enum Kind { text, number, truth, null } kind = null;
  std::string_view view;  // into the message, or into the scratch memory of its reader
  bool is_true = false;
};

// Reads one object, value by value.
class Reader {
 public:
  explicit Reader(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

  void skip_space() {
    while (at_ < end_ && is_json_space(*at_)) ++at_;
  }
  bool take(char wanted) {
    skip_space();
    if (at_ == end_ || *at_ != wanted) return false;
    ++at_;
    return true;
  }
  void expect(char wanted) {
    if (!take(wanted)) fail(std::string("must have '") + wanted + "'");
  }
  bool done() {
    skip_space();
    return at_ == end_;
  }
  bool at(char wanted) {
    skip_space();
    return at_ < end_ && *at_ == wanted;
  }

  // The text between quotes; `scratch` holds it if there were escapes.
  std::string_view text(std::string* scratch) {
    expect('"');
    std::string_view raw;
    if (!json_text(&at_, end_, &raw)) fail("ends inside a text");
    if (raw.find('\\') == raw.npos) return raw;
    scratch->clear();
    const Unescaped result = append_unescaped(raw, scratch);
    if (result == Unescaped::broken_escape) fail("has an escape that is not JSON");
    if (result == Unescaped::lone_surrogate) fail("has half of a surrogate pair");
    return *scratch;
  }

  Scalar scalar(std::string* scratch) {
    skip_space();
    if (at_ == end_) fail("ends before a value");
    if (*at_ == '"') return {Scalar::text, text(scratch)};
    const char* begin = at_;
    while (at_ < end_ && *at_ != ',' && *at_ != '}' && *at_ != ']' && *at_ > ' ') ++at_;
    const std::string_view word(begin, static_cast<size_t>(at_ - begin));
    if (word == "null") return {Scalar::null, word};
    if (word == "true" || word == "false") return {Scalar::truth, word, word == "true"};
    double ignored;
    if (word.empty() || word[0] == '+' || !to_number(word, &ignored))
      fail("has a value that is not JSON: " + shown(word));
    return {Scalar::number, word};
  }

  // Skips a value of any kind.
  void skip() {
    int depth = 0;
    std::string scratch;
    do {
      skip_space();
      if (at_ == end_) fail("ends inside a value");
      if (*at_ == '{' || *at_ == '[') {
        ++at_;
        if (++depth > kDepth) fail("is nested more than " + std::to_string(kDepth) + " deep");
      } else if (*at_ == '}' || *at_ == ']') {
        if (depth-- == 0) fail("has a member without a value");
        ++at_;
      } else if (*at_ == ',' || *at_ == ':') {
        if (depth == 0) fail("has a member without a value");
        ++at_;
      } else if (*at_ == '"') {
        text(&scratch);
      } else {
        const char* begin = at_;
        while (at_ < end_ && *at_ != ',' && *at_ != '}' && *at_ != ']' && *at_ != ':' && *at_ > ' ') ++at_;
        if (at_ == begin) fail("is not JSON");
      }
    } while (depth > 0);
  }

  [[noreturn]] static void fail(const std::string& what) { throw Malformed("it is not a JSON object: it " + what); }

 private:
  const char* at_;
  const char* end_;
};

// Reads a number, which may also be a text, true or false; returns false if there is none.
bool number_of(const Scalar& value, double* out) {
  if (value.kind == Scalar::truth) return *out = value.is_true, true;
  return value.kind != Scalar::null && to_number(value.view, out);
}

bool add_value(const FeatureRule& feature, const Scalar& value, std::vector<int64_t>* list, std::string* why) {
  switch (value.kind) {
    case Scalar::null:
      return true;
    case Scalar::text:
      return feature.add_cell(value.view, list, why);
    case Scalar::truth:
      return feature.add(static_cast<int64_t>(value.is_true), list, why);
    case Scalar::number:
      break;
  }
  int64_t integer;
  if (to_id(value.view, &integer)) return feature.add(integer, list, why);
  if (feature.rule != Rule::bucket && feature.rule != Rule::log)
    return *why = "must be a text or a whole number, got " + shown(value.view), false;
  double number = 0;
  to_number(value.view, &number);
  return feature.add(number, list, why);
}

// The sample that is being read.
struct Sample {
  double label = 0, time = 0;
  bool labelled = false, timed = false;
  std::vector<float> dense;
  std::vector<std::vector<int64_t>> lists;
};

[[noreturn]] void bad_value(std::string_view name, const std::string& why) {
  throw Malformed("feature '" + std::string(name.substr(0, 40)) + "' " + why);
}

void use_value(const ExampleLayout& layout, const Use& use, std::string_view name, const Scalar& value, bool in_list,
               Sample* out) {
  double number = 0;
  std::string why;
  const auto got = [&] { return ", got " + (in_list ? "a list" : shown(value.view)); };
  switch (use.what) {
    case What::sparse:
      if (!add_value(layout.set.features[use.index], value, &out->lists[use.index], &why)) bad_value(name, why);
      return;
    case What::dense:
      if (value.kind == Scalar::null || (value.kind == Scalar::text && value.view.empty())) return;
      if (in_list || !number_of(value, &number) || !fits_float(number))
        bad_value(name, "must be a finite number" + got());
      out->dense[use.index] = static_cast<float>(number);
      return;
    case What::label:
      if (in_list || !number_of(value, &number) || !fits_float(number))
        bad_value(name, "is the label and must be a number" + got());
      out->label = number, out->labelled = true;
      return;
    case What::time:
      if (in_list || !number_of(value, &number) || !(number >= 0 && number <= 4294967295.0))
        bad_value(name, "must be a time in seconds since 1970" + got());
      out->time = number, out->timed = true;
  }
}

void read_object(const ExampleLayout& layout, const Uses& names, std::string_view message, Sample* out) {
  Reader reader(message);
  std::string key_scratch, scratch;
  reader.expect('{');
  if (!reader.take('}')) {
    do {
      const std::string_view name = reader.text(&key_scratch);
      reader.expect(':');
      const auto found = names.find(name);
      if (found == names.end()) {
        reader.skip();
        continue;
      }
      for (const Use& use : found->second)
        if (use.what == What::sparse) out->lists[use.index].clear();
      if (reader.at('{')) bad_value(name, "must be a value or a list of values, got an object");
      if (!reader.take('[')) {
        const Scalar value = reader.scalar(&scratch);
        for (const Use& use : found->second) use_value(layout, use, name, value, false, out);
        continue;
      }
      if (reader.take(']')) continue;
      do {
        const Scalar value = reader.scalar(&scratch);
        for (const Use& use : found->second) use_value(layout, use, name, value, true, out);
      } while (reader.take(','));
      reader.expect(']');
    } while (reader.take(','));
    reader.expect('}');
  }
  if (!reader.done()) Reader::fail("has text after its end");
  std::string why;
  for (size_t f = 0; f < out->lists.size(); ++f) {
    const FeatureRule& feature = layout.set.features[f];
    if (feature.rule == Rule::cross) continue;
    auto* list = &out->lists[f];
    if ((list->empty() && !feature.add_missing(list, &why)) || !feature.end(list, &why))
      bad_value(layout.sparse[f], why);
  }
  if (!layout.set.cross(&out->lists, &why)) throw Malformed("a cross " + why);
  if (!out->labelled) throw Malformed("it has no label '" + layout.label + "'");
  if (!out->timed && !layout.time.empty()) throw Malformed("it has no time '" + layout.time + "'");
}

}  // namespace

Block parse_json_objects(const ExampleLayout& layout, const std::vector<std::string_view>& messages, bool threads) {
  layout.check();
  const Uses names = layout.uses();
  const bool ragged = layout.set.listed();
  const size_t dense = layout.dense.size();
  const int64_t count = static_cast<int64_t>(messages.size());
  const int64_t share = threads ? kPerPart : std::max<int64_t>(1, count);
  std::vector<Block> blocks(std::max<int64_t>(1, (count + share - 1) / share));
  parallel_parts(static_cast<int64_t>(blocks.size()), [&](int64_t part) {
    Block& out = blocks[part];
    Sample sample;
    sample.lists.resize(layout.sparse.size());
    for (int64_t i = part * share; i < std::min(count, (part + 1) * share); ++i) {
      sample.dense.resize(dense);
      for (size_t d = 0; d < dense; ++d) sample.dense[d] = layout.set.numbers[d].missing;
      for (auto& list : sample.lists) list.clear();
      sample.labelled = sample.timed = false;
      try {
        read_object(layout, names, messages[i], &sample);
      } catch (const Malformed& error) {
        out.bad.push_back({i, 0, error.what()});
        continue;
      }
      out.label.push_back(static_cast<float>(sample.label));
      out.dense.insert(out.dense.end(), sample.dense.begin(), sample.dense.end());
      if (!layout.time.empty()) out.time.push_back(static_cast<int64_t>(sample.time));
      for (auto& list : sample.lists) {
        if (ragged) out.lengths.push_back(static_cast<int64_t>(list.size()));
        out.ids.insert(out.ids.end(), list.begin(), list.end());
      }
      ++out.rows;
    }
  });
  Block out = joined(blocks);
  out.lines = count;
  return out;
}

}  // namespace shoal
