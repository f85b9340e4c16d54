#include "data/feature.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <stdexcept>

#include "data/numbers.h"
#include "data/text_hash.h"

namespace shoal {
namespace {

bool refuse(std::string* why, const char* what, std::string_view got) {
  *why = std::string(what) + ", got " + shown(got);
  return false;
}

std::string spelled(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

}  // namespace

void FeatureRule::add_number(double value, std::vector<int64_t>* out) const {
  if (rule == Rule::bucket) {
    const auto above = std::upper_bound(edges.begin(), edges.end(), value);
    out->push_back(number_fid(above - edges.begin(), slot));
  } else {
    const double power = std::floor(steps * std::log2(1 + std::fabs(value)));
    out->push_back(number_fid(static_cast<int64_t>(std::copysign(power, value)), slot));
  }
}

bool FeatureRule::add(std::string_view value, std::vector<int64_t>* out, std::string* why) const {
  switch (rule) {
    case Rule::text:
      out->push_back(text_fid(value, slot));
      return true;
    case Rule::id: {
      int64_t id;
      if (!to_id(value, &id)) return refuse(why, "must be a 64-bit id", value);
      out->push_back(id);
      return true;
    }
    case Rule::bucket:
    case Rule::log: {
      double number;
      if (!to_number(value, &number)) return refuse(why, "must be a number", value);
      add_number(number, out);
      return true;
    }
    case Rule::vocabulary: {
      const auto found = words->find(value);
      if (found != words->end()) {
        out->push_back(number_fid(found->second, slot));
      } else if (unknown == Unknown::one) {
        out->push_back(number_fid(static_cast<int64_t>(words->size()), slot));
      } else if (unknown == Unknown::hash) {
        out->push_back(text_fid(value, slot));
      }
      return true;
    }
    case Rule::cross:
      break;
  }
  return refuse(why, "is a cross of features and must have no value", value);
}

bool FeatureRule::add(int64_t value, std::vector<int64_t>* out, std::string* why) const {
  if (rule == Rule::id) return out->push_back(value), true;
  if (rule == Rule::bucket || rule == Rule::log) return add_number(static_cast<double>(value), out), true;
  char text[20];
  return add(std::string_view(text, std::to_chars(text, text + sizeof text, value).ptr - text), out, why);
}

bool FeatureRule::add(double value, std::vector<int64_t>* out, std::string* why) const {
  if (rule == Rule::bucket || rule == Rule::log) {
    if (!std::isfinite(value)) return refuse(why, "must be a finite number", spelled(value));
    return add_number(value, out), true;
  }
  return refuse(why, "must be a text or an integer", spelled(value));
}

bool FeatureRule::add_missing(std::vector<int64_t>* out, std::string* why) const {
  if (missing) return add(std::string_view(*missing), out, why);
  if (rule == Rule::id && !listed) return refuse(why, "must be a 64-bit id", {});
  if (!listed) out->push_back(text_fid({}, slot));
  return true;
}

bool FeatureRule::add_cell(std::string_view cell, std::vector<int64_t>* out, std::string* why) const {
  if (cell.empty()) return add_missing(out, why);
  if (separator == 0) return add(cell, out, why);
  while (!cell.empty()) {
    const size_t cut = cell.find(separator);
    if (!add(cell.substr(0, cut), out, why)) return false;
    cell = cut == cell.npos ? std::string_view() : cell.substr(cut + 1);
  }
  return true;
}

bool FeatureRule::end(std::vector<int64_t>* out, std::string* why) const {
  if (limit > 0 && static_cast<int64_t>(out->size()) > limit) out->resize(static_cast<size_t>(limit));
  if (listed || out->size() == 1) return true;
  *why = "must have one value, got " + std::to_string(out->size());
  return false;
}

NumberRows::NumberRows(const std::vector<NumberRule>& rules) {
  constexpr int kRows = 16;
  for (int row = 0; row < kRows; ++row) {
    for (const NumberRule& rule : rules) {
      low.push_back(rule.low);
      high.push_back(rule.high);
      log.push_back(rule.log ? 1 : 0);
      mean.push_back(rule.mean);
      scale.push_back(rule.scale);
    }
  }
}

void FeatureSet::apply_numbers(float* values, int64_t n) const {
  const auto all = n * static_cast<int64_t>(numbers.size());
  const NumberRows rows(numbers);
  const auto step = static_cast<int64_t>(rows.low.size());
  for (int64_t at = 0; at < all; at += step)
    SHOAL_DISPATCH(apply_number_rows)(rows, std::min(step, all - at), values + at);
}

void FeatureSet::check() const {
  const auto refuse = [](size_t number, const std::string& what) {
    throw std::invalid_argument("feature " + std::to_string(number) + ": " + what);
  };
  for (size_t f = 0; f < features.size(); ++f) {
    const FeatureRule& feature = features[f];
    if (feature.slot > 32767) refuse(f, "a slot must be 0..32767, got " + std::to_string(feature.slot));
    if (feature.rule == Rule::vocabulary && !feature.words) refuse(f, "a vocabulary must have words, got none");
    if (!std::is_sorted(feature.edges.begin(), feature.edges.end())) refuse(f, "boundaries must never fall");
    if (feature.rule == Rule::cross && feature.of.size() < 2)
      refuse(f, "a cross must have at least two features, got " + std::to_string(feature.of.size()));
    for (int64_t part : feature.of)
      if (part < 0 || part >= static_cast<int64_t>(f))
        refuse(f, "a cross must be of features before it, got feature " + std::to_string(part));
  }
}

bool FeatureSet::listed() const {
  return std::any_of(features.begin(), features.end(), [](const auto& feature) { return feature.listed; });
}

int64_t cross_fid(const int64_t* ids, size_t n, uint64_t slot) {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15ULL;
  uint64_t hash = (n + 1) * kOdd;
  for (size_t i = 0; i < n; ++i) hash = hash_id(hash ^ static_cast<uint64_t>(ids[i])) + kOdd;
  return static_cast<int64_t>((slot << 48) | (hash_id(hash) & kSignatureMask));
}

bool FeatureSet::cross(std::vector<std::vector<int64_t>>* lists, std::string* why) const {
  std::vector<int64_t> ids;
  std::vector<size_t> at;
  for (size_t f = 0; f < features.size(); ++f) {
    const FeatureRule& feature = features[f];
    if (feature.rule != Rule::cross) continue;
    auto& out = (*lists)[f];
    out.clear();
    // Every combination; the last feature's values change fastest.
    at.assign(feature.of.size(), 0);
    ids.resize(feature.of.size());
    bool any = true;
    for (int64_t part : feature.of) any = any && !(*lists)[part].empty();
    while (any && (feature.limit == 0 || static_cast<int64_t>(out.size()) < feature.limit)) {
      for (size_t i = 0; i < at.size(); ++i) ids[i] = (*lists)[feature.of[i]][at[i]];
      out.push_back(cross_fid(ids.data(), ids.size(), feature.slot));
      size_t i = at.size();
      while (i > 0 && ++at[i - 1] == (*lists)[feature.of[i - 1]].size()) at[--i] = 0;
      any = i > 0;
    }
    if (!feature.end(&out, why)) return false;
  }
  return true;
}

}  // namespace shoal
