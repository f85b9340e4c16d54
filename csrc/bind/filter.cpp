// Admission filters and touched keys.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "bind/bind.h"
#include "table/changes/touched.h"
#include "table/changes/tracker.h"
#include "table/filters/filter_block.h"
#include "table/filters/filter_probabilistic.h"
#include "table/filters/filter_sliding.h"

namespace shoal::bind {

namespace {

using Overrides = std::vector<std::pair<uint32_t, uint32_t>>;

void sliding(nb::module_& m) {
  nb::class_<SlidingFilter, Filter>(m, "SlidingFilter")
      .def(
          "__init__",
          [](SlidingFilter* self, int64_t capacity, int split_num, uint32_t default_threshold,
             const Overrides& of_slot) {
            new (self) SlidingFilter(capacity, split_num, Thresholds(default_threshold, of_slot));
          },
          nb::arg("capacity"), nb::arg("split_num"), nb::arg("default_threshold") = 0, nb::arg("of_slot") = Overrides{})
      .def("_add", &SlidingFilter::add, NoGil())
      .def("_get", &SlidingFilter::get, NoGil())
      .def("_split_num", &SlidingFilter::split_num)
      .def("_capacity", &SlidingFilter::capacity)
      .def("_elements", &SlidingFilter::elements, NoGil())
      .def("_meta",
           [](const SlidingFilter& f) {
             auto meta = f.meta();
             return std::make_tuple(meta.head, meta.head_increment, meta.failures);
           })
      .def("_set_meta", [](SlidingFilter& f, int64_t head, int64_t head_increment,
                           int64_t failures) { f.set_meta({head, head_increment, failures}); })
      .def("_block_meta",
           [](const SlidingFilter& f, int block) {
             auto meta = f.block_meta(block);
             return std::make_tuple(meta.total, meta.elements, meta.failures, meta.fill_rate);
           })
      .def("_read_block", raw<&SlidingFilter::read_block>, NoGil())
      .def(
          "_set_block",
          [](SlidingFilter& f, int block, int64_t total, int64_t elements, int64_t failures, double fill_rate,
             uintptr_t cells,
             int64_t n) { f.set_block(block, {total, elements, failures, fill_rate}, ptr<uint16_t>(cells), n); },
          NoGil());
}

nb::tuple steal(TouchedKeys& keys) {
  std::vector<int64_t> ids;
  std::vector<int32_t> tables;
  {
    nb::gil_scoped_release release;
    keys.steal(&ids, &tables);
  }
  return nb::make_tuple(nb::bytes(ids.data(), ids.size() * sizeof(int64_t)),
                        nb::bytes(tables.data(), tables.size() * sizeof(int32_t)));
}

nb::tuple take(Tracker& tracker) {
  Tracker::Taken taken;
  {
    nb::gil_scoped_release release;
    taken = tracker.take();
  }
  return nb::make_tuple(nb::bytes(taken.ids.data(), taken.ids.size() * sizeof(int64_t)), taken.all, taken.lost);
}

}  // namespace

void filter(nb::module_& m) {
  nb::class_<Filter>(m, "Filter")
      .def("_active", &Filter::active)
      .def("_threshold", &Filter::threshold)
      .def("_should_be_filtered", nb::overload_cast<int64_t, uint32_t, uint32_t>(&Filter::should_be_filtered), NoGil())
      .def(
          "_should_be_filtered_batch",
          [](Filter& f, uintptr_t ids, int64_t n, uintptr_t out) {
            const auto* asked = ptr<int64_t>(ids, n);
            auto* dropped = ptr<bool>(out, n);
            for (int64_t i = 0; i < n; ++i) dropped[i] = f.should_be_filtered(asked[i], 1);
          },
          NoGil());
  nb::class_<NoFilter, Filter>(m, "NoFilter").def(nb::init<>());
  sliding(m);
  nb::class_<ProbabilisticFilter, Filter>(m, "ProbabilisticFilter")
      .def(
          "__init__",
          [](ProbabilisticFilter* self, bool equal, uint32_t default_threshold, const Overrides& of_slot,
             uint64_t seed) { new (self) ProbabilisticFilter(equal, Thresholds(default_threshold, of_slot), seed); },
          nb::arg("equal_probability"), nb::arg("default_threshold") = 0, nb::arg("of_slot") = Overrides{},
          nb::arg("seed") = 0);
  nb::class_<FilterBlock>(m, "FilterBlock")
      .def(nb::init<int64_t, double>())
      .def("_add", &FilterBlock::add)
      .def("_get", &FilterBlock::get)
      .def("_full", &FilterBlock::full)
      .def("_clear", &FilterBlock::clear)
      .def("_capacity", &FilterBlock::capacity)
      .def("_total", &FilterBlock::total)
      .def("_elements", &FilterBlock::elements)
      .def("_failures", &FilterBlock::failures);
  nb::class_<TouchedKeys>(m, "TouchedKeys")
      .def(nb::init<int64_t>())
      .def(
          "_insert",
          [](TouchedKeys& keys, uintptr_t ids, int64_t n, int32_t table) {
            return keys.insert(ptr<int64_t>(ids, n), n, table);
          },
          NoGil())
      .def("_steal", &steal)
      .def("_size", &TouchedKeys::size, NoGil())
      .def("_dropped", &TouchedKeys::dropped, NoGil())
      .def("_capacity", &TouchedKeys::capacity);
  nb::class_<Tracker>(m, "Tracker")
      .def(nb::init<int64_t>())
      .def(
          "wrote", [](Tracker& t, uintptr_t ids, int64_t n) { t.wrote(ptr<int64_t>(ids, n), n); }, NoGil())
      .def(
          "removed", [](Tracker& t, uintptr_t ids, int64_t n) { t.removed(ptr<int64_t>(ids, n), n); }, NoGil())
      .def("replaced", &Tracker::replaced)
      .def("take", &take)
      .def("size", &Tracker::size, NoGil());
}

}  // namespace shoal::bind
