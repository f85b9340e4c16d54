#include "data/tf_example.h"

#include <cmath>
#include <cstring>
#include <stdexcept>

#include "core/thread_pool.h"
#include "core/wire.h"
#include "io/crc32c.h"
#include "io/record.h"

namespace shoal {
namespace {

struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct FailExample {
  [[noreturn]] void operator()(const std::string& what) const { throw Malformed("it is not a tf.Example: it " + what); }
};
using Fields = wire::Fields<FailExample>;

// One Feature: a list of texts, floats or integers.
struct Values {
  int kind = 0;  // 1 bytes, 2 floats, 3 integers
  std::vector<std::string_view> texts;
  std::vector<float> floats;
  std::vector<int64_t> integers;

  void read(std::string_view feature) {
    kind = 0;
    texts.clear(), floats.clear(), integers.clear();
    for (Fields one(feature); one.next();) {
      if (one.field < 1 || one.field > 3 || one.type != 2) continue;
      kind = one.field;
      for (Fields list(one.bytes); list.next();) {
        if (list.field != 1) continue;
        if (kind == 1 && list.type == 2) {
          texts.push_back(list.bytes);
        } else if (kind == 2 && (list.type == 2 || list.type == 5)) {
          if (list.bytes.size() % 4) throw Malformed("a list of floats is cut off");
          const size_t old = floats.size();
          floats.resize(old + list.bytes.size() / 4);
          if (!list.bytes.empty()) std::memcpy(floats.data() + old, list.bytes.data(), list.bytes.size());
        } else if (kind == 3 && list.type == 0) {
          integers.push_back(static_cast<int64_t>(list.number));
        } else if (kind == 3 && list.type == 2) {
          for (Fields packed(list.bytes); !packed.done();) {
            integers.push_back(static_cast<int64_t>(packed.number_left()));
          }
        } else {
          throw Malformed("a list of values has wire type " + std::to_string(list.type));
        }
      }
    }
  }
  bool number(double* out) const {
    if (kind == 2 && !floats.empty()) return *out = floats[0], std::isfinite(floats[0]);
    if (kind == 3 && !integers.empty()) return *out = static_cast<double>(integers[0]), true;
    return false;
  }
};

// Appends the ids of one feature's values.
void add_values(const FeatureRule& feature, const Values& values, std::vector<int64_t>* list) {
  std::string why;
  bool good = true;
  if (!values.floats.empty() && feature.rule != Rule::bucket && feature.rule != Rule::log)
    throw Malformed("must hold ids, got floats");
  for (auto text : values.texts) good = good && feature.add_cell(text, list, &why);
  for (auto id : values.integers) good = good && feature.add(id, list, &why);
  for (auto number : values.floats) good = good && feature.add(static_cast<double>(number), list, &why);
  if (!good) throw Malformed(why);
}

}  // namespace

ExampleLayout::Uses ExampleLayout::uses() const {
  Uses found;
  for (size_t i = 0; i < dense.size(); ++i) found[dense[i]].push_back({What::dense, i});
  for (size_t i = 0; i < sparse.size(); ++i)
    if (set.features[i].rule != Rule::cross) found[sparse[i]].push_back({What::sparse, i});
  if (!time.empty()) found[time].push_back({What::time, 0});
  found[label].push_back({What::label, 0});
  return found;
}

void ExampleLayout::check() const {
  set.check();
  if (set.features.size() != sparse.size() || set.numbers.size() != dense.size())
    throw std::invalid_argument("there must be one rule per feature, " + std::to_string(sparse.size()) +
                                ", and per number, " + std::to_string(dense.size()) + ", got " +
                                std::to_string(set.features.size()) + " and " + std::to_string(set.numbers.size()));
}

Block parse_tf_examples(const ExampleLayout& layout, const std::vector<std::string_view>& messages) {
  using What = ExampleLayout::What;
  layout.check();
  const ExampleLayout::Uses names = layout.uses();
  const size_t dense = layout.dense.size();
  constexpr int64_t kPerPart = 1024;
  const int64_t count = static_cast<int64_t>(messages.size());
  std::vector<Block> blocks(std::max<int64_t>(1, (count + kPerPart - 1) / kPerPart));
  parallel_parts(static_cast<int64_t>(blocks.size()), [&](int64_t part) {
    Block& out = blocks[part];
    Values values;
    std::vector<float> row(dense);
    std::vector<std::vector<int64_t>> lists(layout.sparse.size());
    for (int64_t i = part * kPerPart; i < std::min(count, (part + 1) * kPerPart); ++i) {
      for (size_t d = 0; d < dense; ++d) row[d] = layout.set.numbers[d].missing;
      for (auto& list : lists) list.clear();
      double label = 0, time = 0;
      bool labelled = false, timed = layout.time.empty();
      try {
        for (Fields example(messages[i]); example.next();) {
          if (example.field != 1 || example.type != 2) continue;
          for (Fields features(example.bytes); features.next();) {
            if (features.field != 1 || features.type != 2) continue;
            std::string_view key, feature;
            for (Fields entry(features.bytes); entry.next();) {
              if (entry.type != 2) continue;
              (entry.field == 1 ? key : feature) = entry.bytes;
            }
            const auto found = names.find(key);
            if (found == names.end()) continue;
            values.read(feature);
            for (const auto& [what, index] : found->second) {
              double number = 0;
              if (what == What::sparse) {
                try {
                  lists[index].clear();
                  add_values(layout.set.features[index], values, &lists[index]);
                } catch (const Malformed& error) {
                  throw Malformed("feature '" + layout.sparse[index] + "' " + error.what());
                }
              } else if (values.number(&number)) {
                if (what == What::label) label = number, labelled = true;
                if (what == What::time) time = number, timed = true;
                if (what == What::dense) row[index] = static_cast<float>(number);
              } else if (what != What::dense || values.kind == 1 || !values.floats.empty()) {
                throw Malformed("feature '" + std::string(key.substr(0, 40)) + "' must be a finite number");
              }
            }
          }
        }
        std::string why;
        for (size_t f = 0; f < lists.size(); ++f) {
          const FeatureRule& feature = layout.set.features[f];
          if (feature.rule == Rule::cross) continue;
          if ((lists[f].empty() && !feature.add_missing(&lists[f], &why)) || !feature.end(&lists[f], &why))
            throw Malformed("feature '" + layout.sparse[f] + "' " + why);
        }
        if (!layout.set.cross(&lists, &why)) throw Malformed("a cross " + why);
        if (!labelled) throw Malformed("it has no label '" + layout.label + "'");
        if (!timed) throw Malformed("it has no time '" + layout.time + "'");
        if (!(time >= 0 && time <= 4294967295.0))
          throw Malformed("its time must be in seconds since 1970, 0..4294967295, got " + std::to_string(time));
      } catch (const Malformed& error) {
        out.bad.push_back({i, 0, error.what()});
        continue;
      }
      out.label.push_back(static_cast<float>(label));
      out.dense.insert(out.dense.end(), row.begin(), row.end());
      if (!layout.time.empty()) out.time.push_back(static_cast<int64_t>(time));
      for (auto& list : lists) {
        out.lengths.push_back(static_cast<int64_t>(list.size()));
        out.ids.insert(out.ids.end(), list.begin(), list.end());
      }
      ++out.rows;
    }
  });
  Block out = joined(blocks);
  out.lines = count;
  return out;
}

std::vector<Frame> read_frames(std::string_view text, int64_t max_records, int64_t* consumed) {
  std::vector<Frame> out;
  size_t at = 0;
  while (static_cast<int64_t>(out.size()) < max_records && text.size() - at >= kRecordHeader) {
    uint64_t size;
    uint32_t crc;
    std::memcpy(&size, text.data() + at, 8);
    std::memcpy(&crc, text.data() + at + 8, 4);
    if (crc != mask_crc(crc32c(text.data() + at, 8)) || size > (uint64_t{1} << 40)) {
      if (!out.empty()) break;  // return the good frames first; the next call throws
      throw std::invalid_argument("the header of a record is corrupt");
    }
    if (text.size() - at - kRecordHeader < size + kRecordFooter) break;
    const char* payload = text.data() + at + kRecordHeader;
    std::memcpy(&crc, payload + size, 4);
    out.push_back({static_cast<int64_t>(at), static_cast<int64_t>(at + kRecordHeader), static_cast<int64_t>(size),
                   crc == mask_crc(crc32c(payload, size))});
    at += kRecordHeader + size + kRecordFooter;
  }
  *consumed = static_cast<int64_t>(at);
  return out;
}

}  // namespace shoal
