#include "serving/raw_requests.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <stdexcept>

#include "data/numbers.h"
#include "data/raw_columns.h"
#include "serving/batch.h"
#include "serving/messages.h"

namespace shoal {
namespace {

constexpr int64_t kMaxBytes = (int64_t{1} << 31) - 1;  // of the ids and numbers of a request
constexpr int64_t kString = 7, kStrings = 8;           // TensorFlow's DataType, and the field of its values

// One input of one request: its values as a RawColumn has them.
struct Values {
  bool given = false;
  RawKind kind = RawKind::integer;
  int64_t rows = 0;
  int64_t width = -1;  // values per row of the tensor; -1: it has one dimension
  std::vector<int64_t> integers;
  std::vector<double> reals;
  std::vector<Text> texts;
  std::vector<int64_t> lengths;
  bool has_lengths = false;
  std::vector<uint8_t> valid;  // empty: all are

  int64_t count() const {
    return static_cast<int64_t>(kind == RawKind::text     ? texts.size()
                                : kind == RawKind::number ? reals.size()
                                                          : integers.size());
  }
  const void* data() const {
    return kind == RawKind::text     ? static_cast<const void*>(texts.data())
           : kind == RawKind::number ? static_cast<const void*>(reals.data())
                                     : integers.data();
  }
};

template <class To, class From>
void widen(const std::vector<uint8_t>& from, std::vector<To>* out) {
  const auto* values = reinterpret_cast<const From*>(from.data());
  out->assign(values, values + from.size() / sizeof(From));
}

// Keeps the first lengths[i] of the `width` values of row i.
template <class T>
void keep_first(std::vector<T>* values, int64_t width, const std::vector<int64_t>& lengths) {
  int64_t to = 0, from = 0;
  for (int64_t length : lengths) {
    for (int64_t i = 0; i < length; ++i) (*values)[to++] = (*values)[from + i];
    from += width;
  }
  values->resize(static_cast<size_t>(to));
}

// The number of values of each row up to the last one that is present.
template <class T, class There>
void lengths_of(const std::vector<T>& values, int64_t rows, int64_t width, There there, std::vector<int64_t>* out) {
  out->clear();
  for (int64_t row = 0; row < rows; ++row) {
    int64_t length = width;
    while (length > 0 && !there(values[row * width + length - 1])) --length;
    out->push_back(length);
  }
}

}  // namespace

// Reads one request after another; its buffers are reused.
class RequestReader::Reading {
 public:
  explicit Reading(const RequestReader& reader) : reader_(reader), values_(reader.inputs_.size()) {}

  // Appends the inputs of a request and returns its rows; -1 if nothing was appended.
  int64_t add(std::string_view message, RawBatch* batch) {
    for (Values& each : values_) each.given = false;
    const auto* data = reinterpret_cast<const uint8_t*>(message.data());
    const auto size = static_cast<int64_t>(message.size());
    spans_.assign(values_.size(), Span{});
    for (const MapEntry& entry : predict_parts(data, size).tensors) {
      const auto found = reader_.places_.find(message.substr(entry.key.begin, entry.key.size));
      if (found == reader_.places_.end()) return -1;
      values_[found->second].given = true;
      spans_[found->second] = entry.value;  // the last one of a name counts
    }
    int64_t n = -1;
    for (size_t i = 0; i < values_.size(); ++i) {
      if (!values_[i].given) continue;
      if (!decode(data, spans_[i], reader_.inputs_[i], &values_[i])) return -1;
      if (n >= 0 && values_[i].rows != n) return -1;
      n = values_[i].rows;
    }
    if (n < 0 || n > size) return -1;  // a shape may claim any number of rows without values
    const auto width = static_cast<int64_t>(reader_.set_.features.size() + reader_.set_.numbers.size());
    if (n > kMaxBytes / 8 / std::max<int64_t>(1, width)) return -1;
    for (size_t i = 0; i < values_.size(); ++i)
      if (values_[i].given && !shape(i)) return -1;
    return append(n, batch);
  }

 private:
  static bool decode(const uint8_t* data, Span span, const RawInput& input, Values* out) {
    const TensorParts parts = tensor_parts(data, span);
    if (parts.unknown_rank || parts.shape.empty() || parts.shape.size() > 2) return false;
    if (std::any_of(parts.shape.begin(), parts.shape.end(), [](int64_t size) { return size < 0; })) return false;
    out->rows = parts.shape[0];
    out->width = parts.shape.size() == 2 ? parts.shape[1] : -1;
    out->has_lengths = false;
    out->valid.clear();
    if (out->width >= 0 && !input.listed && out->width != 1) return false;
    if (parts.dtype == kString) {
      if (!input.text || parts.content.size) return false;
      int64_t count;
      if (__builtin_mul_overflow(out->rows, std::abs(out->width), &count)) return false;
      out->kind = RawKind::text;
      out->texts.clear();
      for (const Span& each : tensor_strings(data, span, kStrings, count))
        out->texts.push_back({reinterpret_cast<const char*>(data) + each.begin, each.size});
      return static_cast<int64_t>(out->texts.size()) == count;  // another reader completes shorter lists
    }
    const ValueKind* kind = value_kind(parts.dtype);
    const bool real = parts.dtype == 1 || parts.dtype == 2;
    if (!kind || kind->width == 1 || (real && !input.real)) return false;
    const std::vector<Part> part{{data, span}};
    Joined joined;
    if (!plan_join(part, *kind, &joined)) return false;
    std::vector<uint8_t> bytes(static_cast<size_t>(joined.bytes));
    join(part, *kind, joined, bytes.data());
    out->kind = real ? RawKind::number : RawKind::integer;
    if (parts.dtype == 1) widen<double, float>(bytes, &out->reals);
    if (parts.dtype == 2) widen<double, double>(bytes, &out->reals);
    if (parts.dtype == 3) widen<int64_t, int32_t>(bytes, &out->integers);
    if (parts.dtype == 9) widen<int64_t, int64_t>(bytes, &out->integers);
    return true;
  }

  // Finds the values of each row; false if they are malformed.
  bool shape(size_t place) {
    const RawInput& input = reader_.inputs_[place];
    Values& mine = values_[place];
    if (input.is_lengths) return mine.width < 0 && values_[input.lengths].given;
    const Values* lengths = input.lengths >= 0 && values_[input.lengths].given ? &values_[input.lengths] : nullptr;
    if (lengths && mine.width < 0) return false;
    if (!lengths && (mine.width < 0 || mine.width == 1)) {
      if (mine.kind != RawKind::number) return true;
      if (std::none_of(mine.reals.begin(), mine.reals.end(), [](double x) { return std::isnan(x); })) return true;
      for (double x : mine.reals) mine.valid.push_back(!std::isnan(x));
      return true;
    }
    mine.has_lengths = true;
    if (lengths) {
      mine.lengths = lengths->integers;
      for (int64_t length : mine.lengths)
        if (length < 0 || length > mine.width) return false;
    } else if (mine.kind == RawKind::text) {
      lengths_of(mine.texts, mine.rows, mine.width, [](const Text& one) { return one.size > 0; }, &mine.lengths);
    } else if (mine.kind == RawKind::number) {
      lengths_of(mine.reals, mine.rows, mine.width, [](double one) { return !std::isnan(one); }, &mine.lengths);
    } else {
      mine.lengths.assign(static_cast<size_t>(mine.rows), mine.width);
      return true;
    }
    if (mine.kind == RawKind::text) keep_first(&mine.texts, mine.width, mine.lengths);
    if (mine.kind == RawKind::number) keep_first(&mine.reals, mine.width, mine.lengths);
    if (mine.kind == RawKind::integer) keep_first(&mine.integers, mine.width, mine.lengths);
    return true;
  }

  int64_t append(int64_t n, RawBatch* batch) {
    const FeatureSet& set = reader_.set_;
    if (static_cast<int64_t>(nothing_.size()) < n) nothing_.resize(n), zeros_.resize(n);
    columns_.assign(set.features.size(), RawColumn{RawKind::integer, zeros_.data(), n});
    const auto numbers = static_cast<int64_t>(set.numbers.size());
    dense_.resize(n * numbers);
    for (int64_t row = 0; row < n; ++row)
      for (int64_t d = 0; d < numbers; ++d) dense_[row * numbers + d] = set.numbers[d].missing;
    for (size_t f = 0; f < columns_.size(); ++f) {
      columns_[f]->valid = nothing_.data();
      if (set.features[f].rule == Rule::cross) columns_[f].reset();
    }
    for (size_t i = 0; i < values_.size(); ++i) {
      const Values& mine = values_[i];
      if (!mine.given) continue;
      RawColumn column{mine.kind, mine.data(), mine.count()};
      if (mine.has_lengths) column.lengths = mine.lengths.data();
      if (!mine.valid.empty()) column.valid = mine.valid.data();
      if (reader_.ready_ && mine.kind == RawKind::integer) column.kind = RawKind::ready;
      for (int64_t feature : reader_.inputs_[i].features) columns_[feature] = column;
      for (int64_t number : reader_.inputs_[i].numbers)
        if (!fill(mine, number, n)) return -1;
    }
    const Block block = apply_columns(set, n, columns_);
    if (!block.bad.empty()) return -1;
    set.apply_numbers(dense_.data(), n);
    batch->ids.insert(batch->ids.end(), block.ids.begin(), block.ids.end());
    batch->lengths.insert(batch->lengths.end(), block.lengths.begin(), block.lengths.end());
    batch->dense.insert(batch->dense.end(), dense_.begin(), dense_.end());
    return n;
  }

  bool fill(const Values& mine, int64_t number, int64_t n) {
    if (mine.kind == RawKind::text || mine.has_lengths) return false;
    const auto numbers = static_cast<int64_t>(reader_.set_.numbers.size());
    for (int64_t row = 0; row < n; ++row) {
      const double value = mine.kind == RawKind::number ? mine.reals[row] : static_cast<double>(mine.integers[row]);
      if (std::isnan(value)) continue;
      if (!fits_float(value)) return false;
      dense_[row * numbers + number] = static_cast<float>(value);
    }
    return true;
  }

  const RequestReader& reader_;
  std::vector<Values> values_;  // of each input
  std::vector<Span> spans_;
  std::vector<std::optional<RawColumn>> columns_;
  std::vector<float> dense_;
  std::vector<int64_t> zeros_;
  std::vector<uint8_t> nothing_;
};

RequestReader::RequestReader(FeatureSet set, std::vector<std::pair<std::string, RawInput>> inputs, bool ready)
    : set_(std::move(set)), ready_(ready) {
  set_.check();
  const auto fits = [](const std::vector<int64_t>& places, size_t size) {
    return std::all_of(places.begin(), places.end(),
                       [&](int64_t place) { return place >= 0 && place < static_cast<int64_t>(size); });
  };
  for (auto& [name, input] : inputs) {
    if (!fits(input.features, set_.features.size()) || !fits(input.numbers, set_.numbers.size()) ||
        input.lengths >= static_cast<int64_t>(inputs.size()) || (input.is_lengths && input.lengths < 0))
      throw std::invalid_argument(
          "input " + name + " must have features below " + std::to_string(set_.features.size()) + ", numbers below " +
          std::to_string(set_.numbers.size()) + " and lengths below " + std::to_string(inputs.size()));
    for (int64_t feature : input.features)
      if (set_.features[feature].rule == Rule::cross)
        throw std::invalid_argument("input " + name + " must not have feature " + std::to_string(feature) +
                                    ", which is a cross");
    places_.emplace(name, static_cast<int64_t>(inputs_.size()));
    inputs_.push_back(std::move(input));
  }
}

RawBatch RequestReader::read(const std::vector<std::string_view>& messages) const {
  RawBatch batch;
  Reading reading(*this);
  for (std::string_view message : messages) {
    int64_t rows = -1;
    try {
      rows = reading.add(message, &batch);
    } catch (const std::invalid_argument&) {  // another reader reports it
    }
    batch.rows.push_back(rows);
    batch.total += std::max<int64_t>(0, rows);
  }
  return batch;
}

}  // namespace shoal
