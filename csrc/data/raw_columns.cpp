#include "data/raw_columns.h"

#include <algorithm>
#include <stdexcept>

#include "core/thread_pool.h"
#include "data/text_hash.h"

namespace shoal {
namespace {

constexpr int64_t kPerPart = 1024;

template <class Offset>
std::string_view text_at(const RawColumn& column, int64_t i) {
  const auto* offsets = static_cast<const Offset*>(column.values);
  const int64_t begin = offsets[i], end = offsets[i + 1];
  if (begin < 0 || begin > end || end > column.text_bytes)
    throw std::invalid_argument("the offsets of texts must rise within 0.." + std::to_string(column.text_bytes) +
                                ", got " + std::to_string(begin) + ".." + std::to_string(end));
  return {column.text + begin, static_cast<size_t>(end - begin)};
}

std::string_view lone_text(const RawColumn& column, int64_t i) {
  const Text& text = static_cast<const Text*>(column.values)[i];
  return {text.data, static_cast<size_t>(text.size)};
}

bool add_value(const FeatureRule& feature, const RawColumn& column, int64_t i, std::vector<int64_t>* out,
               std::string* why) {
  if (column.valid && !column.valid[i]) return feature.add_missing(out, why);
  switch (column.kind) {
    case RawKind::text32:
      return feature.add_cell(text_at<int32_t>(column, i), out, why);
    case RawKind::text64:
      return feature.add_cell(text_at<int64_t>(column, i), out, why);
    case RawKind::text:
      return feature.add_cell(lone_text(column, i), out, why);
    case RawKind::integer:
      return feature.add(static_cast<const int64_t*>(column.values)[i], out, why);
    case RawKind::number:
      return feature.add(static_cast<const double*>(column.values)[i], out, why);
    case RawKind::ready:
      return out->push_back(static_cast<const int64_t*>(column.values)[i]), true;
  }
  return false;
}

// Where each sample's values begin in a column.
std::vector<int64_t> starts_of(const RawColumn& column, int64_t n) {
  std::vector<int64_t> starts(static_cast<size_t>(n) + 1, 0);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t length = column.lengths ? column.lengths[i] : 1;
    if (length < 0) throw std::invalid_argument("lengths must be >= 0, got " + std::to_string(length));
    starts[i + 1] = starts[i] + length;
  }
  if (starts[n] != column.count)
    throw std::invalid_argument("a column must have as many values as its samples, " + std::to_string(starts[n]) +
                                ", got " + std::to_string(column.count));
  return starts;
}

// Whether every feature has exactly one text or integer that is only hashed, so that ids can be written directly.
bool is_plain(const FeatureSet& set, const std::vector<std::optional<RawColumn>>& columns) {
  for (size_t f = 0; f < columns.size(); ++f) {
    const FeatureRule& feature = set.features[f];
    if (feature.listed || feature.missing || feature.rule != Rule::text || feature.separator) return false;
    if (columns[f]->lengths || columns[f]->kind == RawKind::number) return false;
  }
  return true;
}

void apply_plain(const FeatureSet& set, int64_t n, const std::vector<std::optional<RawColumn>>& columns, Block* out) {
  const auto width = static_cast<int64_t>(columns.size());
  out->ids.resize(n * width);
  parallel_for(n, kPerPart, [&](int64_t begin, int64_t end) {
    for (int64_t f = 0; f < width; ++f) {
      const RawColumn& column = *columns[f];
      const uint64_t slot = set.features[f].slot;
      for (int64_t i = begin; i < end; ++i) {
        int64_t& id = out->ids[i * width + f];
        if (column.valid && !column.valid[i]) {
          id = text_fid({}, slot);
        } else if (column.kind == RawKind::text32) {
          id = text_fid(text_at<int32_t>(column, i), slot);
        } else if (column.kind == RawKind::text64) {
          id = text_fid(text_at<int64_t>(column, i), slot);
        } else if (column.kind == RawKind::text) {
          id = text_fid(lone_text(column, i), slot);
        } else {
          const int64_t value = static_cast<const int64_t*>(column.values)[i];
          id = column.kind == RawKind::ready ? value : number_fid(value, slot);
        }
      }
    }
  });
}

}  // namespace

Block apply_columns(const FeatureSet& set, int64_t n, const std::vector<std::optional<RawColumn>>& columns) {
  const size_t width = set.features.size();
  if (columns.size() != width)
    throw std::invalid_argument("there must be one column per feature, " + std::to_string(width) + ", got " +
                                std::to_string(columns.size()));
  for (size_t f = 0; f < width; ++f)
    if (columns[f].has_value() == (set.features[f].rule == Rule::cross))
      throw std::invalid_argument("feature " + std::to_string(f) + " must have " +
                                  (columns[f] ? "no column, since it is a cross" : "a column, got none"));
  Block out;
  out.rows = out.lines = n;
  out.label.resize(n);  // the caller sets them
  std::vector<std::vector<int64_t>> starts(width);
  for (size_t f = 0; f < width; ++f)
    if (columns[f]) starts[f] = starts_of(*columns[f], n);
  const bool ragged = set.listed();
  if (!ragged && is_plain(set, columns)) {
    apply_plain(set, n, columns, &out);
    return out;
  }
  std::vector<Block> blocks(static_cast<size_t>(std::max<int64_t>(1, (n + kPerPart - 1) / kPerPart)));
  parallel_parts(static_cast<int64_t>(blocks.size()), [&](int64_t part) {
    Block& block = blocks[part];
    std::vector<std::vector<int64_t>> lists(width);
    std::string why;
    for (int64_t i = part * kPerPart; i < std::min(n, (part + 1) * kPerPart); ++i) {
      bool good = true;
      for (size_t f = 0; f < width && good; ++f) {
        const FeatureRule& feature = set.features[f];
        lists[f].clear();
        if (!columns[f]) continue;
        const int64_t begin = starts[f][i], end = starts[f][i + 1];
        const bool none = columns[f]->kind == RawKind::ready && feature.listed;  // an empty list of ids stays empty
        if (begin == end && !none) good = feature.add_missing(&lists[f], &why);
        for (int64_t at = begin; at < end && good; ++at) good = add_value(feature, *columns[f], at, &lists[f], &why);
        good = good && feature.end(&lists[f], &why);
        if (!good) why = "feature " + std::to_string(f) + " " + why;
      }
      good = good && set.cross(&lists, &why);
      if (!good) block.bad.push_back({i, 0, why});
      for (const auto& list : lists) {
        if (ragged) block.lengths.push_back(good ? static_cast<int64_t>(list.size()) : 0);
        if (good) block.ids.insert(block.ids.end(), list.begin(), list.end());
        if (!good && !ragged) block.ids.push_back(0);
      }
    }
  });
  for (Block& block : blocks) {
    out.ids.insert(out.ids.end(), block.ids.begin(), block.ids.end());
    out.lengths.insert(out.lengths.end(), block.lengths.begin(), block.lengths.end());
    out.bad.insert(out.bad.end(), block.bad.begin(), block.bad.end());
  }
  return out;
}

}  // namespace shoal
