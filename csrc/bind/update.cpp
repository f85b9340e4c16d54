// Calls over several tables: fused lookups and gradients, and updates of several tables of the same dim.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>

#include "bind/bind.h"
#include "bind/checks.h"
#include "table/fused.h"
#include "table/rows/gradients.h"

namespace shoal::bind {
namespace {

// Tables that are updated together. Python keeps them alive.
struct UpdateGroup {
  std::vector<Table*> tables;  // the distinct ones
  std::vector<int32_t> place;  // where each given table is among them
  std::vector<std::string> names;
  int64_t dim = 0;

  UpdateGroup(const std::vector<Table*>& given, const std::vector<std::string>& given_names) {
    if (given.empty() || given.size() != given_names.size())
      throw std::invalid_argument("a group must have tables, and a name for each, got " + std::to_string(given.size()) +
                                  " tables and " + std::to_string(given_names.size()) + " names");
    for (size_t k = 0; k < given.size(); ++k) {
      const auto at = std::find(tables.begin(), tables.end(), given[k]) - tables.begin();
      place.push_back(static_cast<int32_t>(at));
      if (at < static_cast<int64_t>(tables.size())) continue;
      if (given[k]->layout().dim != given[0]->layout().dim)
        throw std::invalid_argument("the tables of a group must have the same dim, got " +
                                    std::to_string(given[0]->layout().dim) + " and " +
                                    std::to_string(given[k]->layout().dim));
      tables.push_back(given[k]);
      names.push_back(given_names[k]);
    }
    dim = given[0]->layout().dim;
  }

  // Per given table: the learning rates of its segments, the policy for bad gradients, whether it stamps rows by the
  // clock, and the address and number of its ids' scores (an empty list: no scores). Returns the occurrences skipped
  // per given table, or an empty list if none were.
  std::vector<int64_t> apply(std::vector<GradientPart>& parts, const std::vector<float>& rates, int64_t step,
                             uint32_t time, bool at_least, bool given_time, bool dedup, const std::vector<int>& bad,
                             const std::vector<bool>& clocked, const std::vector<int64_t>& scores) const {
    // Features name the given tables; gradients are joined by distinct table.
    std::vector<FeatureMap> maps;
    if (tables.size() < place.size()) {
      maps.reserve(parts.size());
      for (GradientPart& part : parts) {
        FeatureMap& map = maps.emplace_back(*part.features);
        for (int32_t& table : map.tables)
          if (table >= 0 && table < static_cast<int32_t>(place.size())) table = place[table];
        part.features = &map;
      }
    }
    const JoinedParts joined(parts, static_cast<int64_t>(tables.size()), dim);
    std::vector<Update> updates;
    std::vector<size_t> table_of;
    updates.reserve(tables.size());
    size_t rate = 0, seen = 0;
    bool checks = false;
    for (size_t k = 0; k < place.size(); ++k) {
      Table* table = tables[place[k]];
      const float* own = rates.data() + rate;
      rate += table->layout().segments.size();
      if (rate > rates.size()) break;
      if (static_cast<size_t>(place[k]) != seen) continue;
      ++seen;
      if (!joined.named(place[k])) continue;
      updates.push_back({table, joined.of(place[k]), own, step,
                         given_time || clocked[k] ? Stamp(time, at_least) : Stamp(0), dedup,
                         static_cast<BadGradient>(bad[k])});
      if (!scores.empty() && scores[2 * k]) {
        if (scores[2 * k + 1] != updates.back().gradients.n)
          throw std::invalid_argument("table " + names[place[k]] + ": scores must have one entry per id, " +
                                      std::to_string(updates.back().gradients.n) + ", got " +
                                      std::to_string(scores[2 * k + 1]));
        updates.back().scores = ptr<float>(static_cast<uintptr_t>(scores[2 * k]));
      }
      table_of.push_back(k);
      checks |= updates.back().bad != BadGradient::ignore;
    }
    if (rate != rates.size()) {
      size_t segments = 0;
      for (int32_t at : place) segments += tables[at]->layout().segments.size();
      throw std::invalid_argument("there must be one learning rate per segment of each table, " +
                                  std::to_string(segments) + ", got " + std::to_string(rates.size()));
    }
    const bool clean = !checks || joined.clean();
    for (Update& update : updates) update.clean = clean;
    try {
      Table::apply(updates);
    } catch (const NonFinite& e) {
      throw std::invalid_argument(
          "table " + names[place[table_of[e.update]]] + ": the gradient of id " + std::to_string(e.id) + " (row " +
          std::to_string(e.position) +
          ") holds NaN or infinity; nothing was applied. Clip it, or set on_bad_gradient='skip'");
    }
    std::vector<int64_t> skipped;
    for (size_t i = 0; i < updates.size(); ++i) {
      if (!updates[i].skipped) continue;
      skipped.resize(place.size(), 0);
      skipped[table_of[i]] = updates[i].skipped;
    }
    return skipped;
  }
};

void fused(nb::module_& m) {
  m.def(
      "fused_lookup",
      [](const std::vector<Table*>& tables, uintptr_t sizes, int64_t sources, uintptr_t ids, int64_t n, uintptr_t out,
         int64_t floats) {
        Blocks blocks(tables, ptr<int64_t>(sizes, static_cast<int64_t>(tables.size()) * sources), sources);
        check_equal("the number of ids", n, blocks.ids.back());
        check_equal("the number of floats of rows", floats, blocks.floats.back());
        fused_lookup(blocks, ptr<int64_t>(ids, n), ptr<float>(out, floats));
      },
      NoGil());
  m.def(
      "fused_apply_gradients",
      [](const std::vector<Table*>& tables, uintptr_t sizes, int64_t sources, uintptr_t ids, int64_t n, uintptr_t grads,
         int64_t floats, const std::vector<float>& rates, int64_t step, uint32_t time, bool dedup,
         const std::vector<int>& bad, bool at_least) {
        Blocks blocks(tables, ptr<int64_t>(sizes, static_cast<int64_t>(tables.size()) * sources), sources);
        check_equal("the number of ids", n, blocks.ids.back());
        check_equal("the number of floats of gradients", floats, blocks.floats.back());
        std::vector<BadGradient> policies;
        for (int policy : bad) policies.push_back(static_cast<BadGradient>(policy));
        try {
          return fused_apply_gradients(blocks, ptr<int64_t>(ids, n), ptr<float>(grads, floats), rates, step,
                                       Stamp(time, at_least), dedup, policies);
        } catch (const NonFinite& e) {
          throw std::invalid_argument("the gradient of id " + std::to_string(e.id) + " (position " +
                                      std::to_string(e.position) + ") holds NaN or infinity");
        }
      },
      nb::arg("tables"), nb::arg("sizes"), nb::arg("sources"), nb::arg("ids"), nb::arg("n"), nb::arg("grads"),
      nb::arg("floats"), nb::arg("rates"), nb::arg("step"), nb::arg("time"), nb::arg("dedup"), nb::arg("bad"),
      nb::arg("at_least") = false, NoGil());
}

}  // namespace

void update(nb::module_& m) {
  fused(m);
  nb::class_<FeatureMap>(m, "FeatureMap")
      .def(
          "__init__",
          [](FeatureMap* self, std::vector<int32_t> tables, std::vector<int32_t> combiners,
             std::vector<int64_t> columns, int64_t width, std::optional<int64_t> padding,
             std::vector<int64_t> lengths) {
            std::vector<Pool> pools;
            for (int32_t combiner : combiners) pools.push_back(static_cast<Pool>(combiner));
            new (self) FeatureMap{std::move(tables),   std::move(pools),    std::move(columns), width,
                                  padding.has_value(), padding.value_or(0), std::move(lengths)};
          },
          nb::arg("tables"), nb::arg("combiners"), nb::arg("columns"), nb::arg("width"), nb::arg("padding").none(),
          nb::arg("lengths") = std::vector<int64_t>());

  nb::class_<UpdateGroup>(m, "UpdateGroup")
      .def(nb::init<const std::vector<Table*>&, const std::vector<std::string>&>(), nb::arg("tables"), nb::arg("names"))
      .def("apply",
           // `numbers` of each part: addresses of ids, counts, grad, offsets and weights (0: none), then the numbers of
           // ids and of bags, the floats from one row of grad to the next, and the address of marks (0: none).
           [](const UpdateGroup& group, const std::vector<const FeatureMap*>& features,
              const std::vector<int64_t>& numbers, const std::vector<float>& rates, int64_t step, uint32_t time,
              bool at_least, bool given_time, bool dedup, const std::vector<int>& bad, const std::vector<bool>& clocked,
              const std::vector<int64_t>& scores) {
             constexpr size_t kNumbers = 9;
             const auto settings = static_cast<int64_t>(group.place.size());
             check_equal("the number of numbers of an update's parts", static_cast<int64_t>(numbers.size()),
                         static_cast<int64_t>(kNumbers * features.size()));
             check_equal("the length of bad", static_cast<int64_t>(bad.size()), settings);
             check_equal("the length of clocked", static_cast<int64_t>(clocked.size()), settings);
             if (!scores.empty())
               check_equal("the length of scores", static_cast<int64_t>(scores.size()), 2 * settings);
             std::vector<GradientPart> parts;
             for (size_t k = 0; k < features.size(); ++k) {
               const int64_t* of = numbers.data() + kNumbers * k;
               const int64_t n = of[5], bags = of[6];
               parts.push_back(
                   {features[k], ptr<int64_t>(static_cast<uintptr_t>(of[0]), n), n,
                    ptr<int64_t>(static_cast<uintptr_t>(of[1]), static_cast<int64_t>(features[k]->tables.size())),
                    ptr<float>(static_cast<uintptr_t>(of[2]), n), of[7], ptr<int64_t>(static_cast<uintptr_t>(of[3])),
                    bags, ptr<float>(static_cast<uintptr_t>(of[4])), ptr<uint8_t>(static_cast<uintptr_t>(of[8]))});
             }
             nb::gil_scoped_release release;
             return group.apply(parts, rates, step, time, at_least, given_time, dedup, bad, clocked, scores);
           });
}

}  // namespace shoal::bind
