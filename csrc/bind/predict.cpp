#include "bind/predict.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "bind/checks.h"

namespace shoal::bind {
namespace {

using Sizes = std::vector<int64_t>;
using View = std::tuple<int32_t, int64_t, Sizes, Sizes>;

RowView view_of(nb::handle given) {
  auto [buffer, at, sizes, strides] = nb::cast<View>(given);
  return {buffer, at, std::move(sizes), std::move(strides)};
}

// (kind, op, out, a, b or None, numbers, (constant, k, n, row, column), (chosen, before, size, after))
RowStep step_of(nb::handle given) {
  const auto fields = nb::cast<nb::tuple>(given);
  check_equal("row net: the number of fields of a step", static_cast<int64_t>(fields.size()), 8);
  RowStep step;
  step.kind = choice("row net: the kind of a step", nb::cast<int>(fields[0]), RowStep::Kind::select);
  step.op = choice("row net: the operation of a step", nb::cast<int>(fields[1]), static_cast<Op>(kOps - 1));
  step.out = view_of(fields[2]);
  step.a = view_of(fields[3]);
  step.has_b = !fields[4].is_none();
  if (step.has_b) step.b = view_of(fields[4]);
  std::tie(step.number, step.other) = nb::cast<std::pair<float, float>>(fields[5]);
  std::tie(step.constant, step.k, step.n, step.row, step.column) =
      nb::cast<std::tuple<int32_t, int64_t, int64_t, int64_t, int64_t>>(fields[6]);
  std::tie(step.chosen, step.before, step.size, step.after) =
      nb::cast<std::tuple<Sizes, int64_t, int64_t, int64_t>>(fields[7]);
  return step;
}

std::vector<RowSource> sources_of(const std::vector<std::vector<Table*>>& given) {
  std::vector<RowSource> sources;
  size_t first = 0;
  for (const auto& tables : given) {
    sources.push_back({{tables.begin(), tables.end()}, first});
    first += tables.size();
  }
  return sources;
}

// (source, pool, length, padding, apart, input, column)
using FeatureFields = std::tuple<size_t, int, int64_t, std::optional<int64_t>, bool, size_t, int64_t>;
// (alias, dtype, shape, feature, input)
using InputFields = std::tuple<std::string, int64_t, Sizes, int64_t, size_t>;

Predictor::Parts parts_of(const std::vector<std::vector<Table*>>& sources, const std::vector<FeatureFields>& features,
                          const std::vector<std::pair<std::string, Sizes>>& outputs) {
  Predictor::Parts parts;
  parts.sources = sources_of(sources);
  for (const auto& [source, pool, length, padding, apart, input, column] : features) {
    parts.features.push_back({source, {choice("a combiner", pool, Pool::max), length, padding}, apart, input, column});
  }
  for (const auto& [alias, shape] : outputs) parts.outputs.push_back({alias, shape});
  return parts;
}

}  // namespace

void predict(nb::module_& m) {
  nb::class_<PlanHandle>(m, "RowPlan")
      .def("__init__",
           [](PlanHandle* self, Sizes floats, int64_t inputs, int64_t outputs, Sizes constants, const nb::list& given) {
             std::vector<RowStep> steps;
             for (nb::handle each : given) steps.push_back(step_of(each));
             new (self) PlanHandle{std::make_shared<const RowPlan>(std::move(floats), inputs, outputs,
                                                                   std::move(constants), std::move(steps))};
           })
      .def_prop_ro("multiplications", [](const PlanHandle& self) { return self.plan->multiplications(); });
  nb::class_<NetHandle>(m, "RowNet")
      .def("__init__",
           [](NetHandle* self, const PlanHandle& plan, const std::vector<std::pair<uintptr_t, int64_t>>& given) {
             std::vector<std::pair<const float*, int64_t>> constants;
             for (const auto& [address, n] : given) constants.emplace_back(ptr<float>(address, n), n);
             new (self) NetHandle{std::make_shared<const RowNet>(plan.plan, constants)};
           })
      .def(
          "run",
          [](const NetHandle& self, const std::vector<uintptr_t>& inputs, int64_t rows,
             const std::vector<uintptr_t>& outputs) {
            std::vector<const float*> in;
            std::vector<float*> out;
            for (uintptr_t each : inputs) in.push_back(ptr<float>(each));
            for (uintptr_t each : outputs) out.push_back(ptr<float>(each));
            self.net->run(in, rows, out, true);
          },
          NoGil());

  nb::class_<Generation>(m, "Generation")
      .def(nb::init<>())
      .def_prop_ro("number", [](const Generation& self) { return self.number->load(); })
      .def("next", [](Generation& self) { ++*self.number; });
  // The caller must keep the tables and the reader alive until the predictor is closed.
  nb::class_<PredictorHandle>(m, "Predictor")
      .def_static(
          "of_samples",
          [](const NetHandle& net, const std::vector<std::vector<Table*>>& sources,
             const std::vector<FeatureFields>& features, const std::vector<std::pair<std::string, Sizes>>& outputs,
             const RequestReader& reader, size_t numbers) {
            Predictor::Parts parts = parts_of(sources, features, outputs);
            parts.reader = &reader;
            parts.numbers = numbers;
            return PredictorHandle{std::make_shared<Predictor>(std::move(parts), net.net)};
          })
      .def_static(
          "of_tensors",
          [](const NetHandle& net, const std::vector<std::vector<Table*>>& sources,
             const std::vector<FeatureFields>& features, const std::vector<std::pair<std::string, Sizes>>& outputs,
             const std::vector<InputFields>& inputs) {
            Predictor::Parts parts = parts_of(sources, features, outputs);
            for (const auto& [alias, dtype, shape, feature, input] : inputs)
              parts.inputs.push_back({alias, dtype, shape, feature, input});
            return PredictorHandle{std::make_shared<Predictor>(std::move(parts), net.net)};
          })
      // fresh: (number of the table among those of all sources, ids, number of ids, values)
      .def(
          "switch",
          [](PredictorHandle& self, const NetHandle* net,
             const std::vector<std::tuple<size_t, uintptr_t, int64_t, uintptr_t>>& given, double timeout_s) {
            Fresh fresh;
            std::vector<int64_t> dims;
            for (const RowSource& source : self.predictor->parts().sources)
              dims.insert(dims.end(), source.tables.size(), source.dim());
            for (const auto& [number, ids, n, values] : given) {
              in_range("the number of a table", static_cast<int64_t>(number), 0, static_cast<int64_t>(dims.size()) - 1);
              fresh.resize(std::max(fresh.size(), number + 1));
              fresh[number] =
                  std::make_shared<const FreshRows>(ptr<int64_t>(ids, n), n, ptr<float>(values, n), dims[number]);
            }
            return self.predictor->switch_to(net ? net->net : nullptr, std::move(fresh), timeout_s);
          },
          nb::arg("net").none(), nb::arg("fresh"), nb::arg("timeout_s"), NoGil())
      .def("close", [](PredictorHandle& self, double timeout_s) { return self.predictor->close(timeout_s); }, NoGil());
}

}  // namespace shoal::bind
