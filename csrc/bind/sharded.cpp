#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "bind/digest.h"
#include "nn/pooling.h"
#include "sharded/parts.h"
#include "sharded/rings.h"
#include "sharded/snapshot.h"

namespace shoal::bind {
namespace {

BagsAt bags_at(uintptr_t at, int64_t ids, uintptr_t offsets, int64_t bags, int64_t dim, int64_t width, int64_t floats,
               const std::vector<int32_t>& combiners, const std::vector<int64_t>& columns,
               const std::vector<int64_t>& lengths, uintptr_t weights, uintptr_t marks) {
  BagsAt made{.at = ptr<const int32_t>(at),
              .offsets = ptr<const int64_t>(offsets),
              .ids = ids,
              .features = static_cast<int64_t>(combiners.size()),
              .bags = bags,
              .dim = dim,
              .width = width,
              .floats = floats,
              .combiners = {},
              .columns = columns,
              .lengths = lengths,
              .weights = ptr<const float>(weights),
              .marks = ptr<uint8_t>(marks)};
  for (int32_t combiner : combiners) made.combiners.push_back(static_cast<Pool>(combiner));
  return made;
}

// Defines a function over bags in a flat buffer; call(bags, flat, pooled) gets the addresses of the buffer and of the
// pooled rows or their gradient.
template <class Call>
void def_at(nb::module_& m, const char* name, Call call) {
  m.def(
      name,
      [call](uintptr_t flat, int64_t floats, uintptr_t at, int64_t ids, uintptr_t offsets, int64_t bags, int64_t dim,
             const std::vector<int32_t>& combiners, const std::vector<int64_t>& columns,
             const std::vector<int64_t>& lengths, uintptr_t weights, uintptr_t marks, uintptr_t pooled, int64_t width) {
        call(bags_at(at, ids, offsets, bags, dim, width, floats, combiners, columns, lengths, weights, marks), flat,
             pooled);
      },
      NoGil());
}

// Bags of one feature, whose rows are one after another.
BagsAt bags_in_order(int64_t ids, int64_t dim, uintptr_t keys, const std::optional<int64_t>& padding, uintptr_t offsets,
                     int64_t bags, int32_t combiner, int64_t length, uintptr_t weights, uintptr_t marks) {
  const int64_t width = static_cast<Pool>(combiner) == Pool::firstn ? length * dim : dim;
  BagsAt made = bags_at(0, ids, offsets, bags, dim, width, ids * dim, {combiner}, {0}, {length}, weights, marks);
  made.in_order = true;
  made.keys = ptr<const int64_t>(keys);
  made.padding = padding ? &*padding : nullptr;
  return made;
}

}  // namespace

void sharded(nb::module_& m) {
  m.def(
      "gather_from_parts",
      [](const std::vector<uintptr_t>& parts, const std::vector<int64_t>& edges, uintptr_t offsets, int64_t n,
         int64_t width, uintptr_t rows) {
        std::vector<const float*> pointers;
        for (uintptr_t p : parts) pointers.push_back(ptr<const float>(p));
        gather_from_parts(pointers, edges, ptr<const int32_t>(offsets), n, width, ptr<float>(rows));
      },
      NoGil());
  def_at(m, "pool_at", [](const BagsAt& bags, uintptr_t flat, uintptr_t out) {
    pool_at(bags, ptr<const float>(flat), ptr<float>(out));
  });
  def_at(m, "add_pooled_at", [](const BagsAt& bags, uintptr_t flat, uintptr_t grad) {
    add_pooled_at(bags, ptr<const float>(grad), ptr<float>(flat));
  });
  m.def(
      "pool_rows",
      [](uintptr_t rows, int64_t ids, int64_t dim, uintptr_t keys, std::optional<int64_t> padding, uintptr_t offsets,
         int64_t bags, int32_t combiner, int64_t length, uintptr_t weights, uintptr_t marks, uintptr_t out) {
        pool_at(bags_in_order(ids, dim, keys, padding, offsets, bags, combiner, length, weights, marks),
                ptr<const float>(rows), ptr<float>(out));
      },
      nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
      nb::arg(), nb::arg(), nb::arg(), NoGil());
  // Adds the gradients of rows to `of_rows`, which must be zeros, and writes those of weights; either address may be 0.
  m.def(
      "pool_rows_gradient",
      [](uintptr_t rows, int64_t ids, int64_t dim, uintptr_t keys, std::optional<int64_t> padding, uintptr_t offsets,
         int64_t bags, int32_t combiner, int64_t length, uintptr_t weights, uintptr_t marks, uintptr_t grad,
         uintptr_t of_rows, uintptr_t of_weights) {
        const BagsAt made = bags_in_order(ids, dim, keys, padding, offsets, bags, combiner, length, weights, marks);
        if (of_rows) add_pooled_at(made, ptr<const float>(grad), ptr<float>(of_rows));
        if (of_weights) weigh_pooled_at(made, ptr<const float>(grad), ptr<const float>(rows), ptr<float>(of_weights));
      },
      nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
      nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), NoGil());

  nb::class_<Snapshot>(m, "Snapshot")
      .def(nb::init<Table&>(), nb::arg("table"), nb::keep_alive<1, 2>())
      .def("before_write", raw<&Snapshot::before_write>, NoGil())
      .def(
          "save",
          [](Snapshot& s, const std::vector<std::string>& temporary, const std::vector<std::string>& paths,
             Progress* progress) { return as_pairs(s.save({.temporary = temporary, .path = paths}, progress)); },
          nb::arg("temporary"), nb::arg("paths"), nb::arg("progress").none(), NoGil());

  nb::class_<Rings>(m, "Rings")
      .def(
          "__init__",
          [](Rings* self, uintptr_t memory, int rank, int ranks, int64_t ring_bytes) {
            new (self) Rings(ptr<char>(memory), rank, ranks, ring_bytes);
          },
          nb::arg("memory"), nb::arg("rank"), nb::arg("ranks"), nb::arg("ring_bytes"))
      .def_static("bytes", &Rings::bytes, nb::arg("ranks"), nb::arg("ring_bytes"))
      .def("start", raw<&Rings::start>, nb::arg("data"), nb::arg("send"), nb::arg("out"), nb::arg("recv"),
           nb::arg("head") = 0, NoGil())
      .def("differences",
           [](const Rings& r) {
             std::vector<std::tuple<int, int64_t, int64_t>> found;
             for (const Rings::Difference& d : r.differences()) found.emplace_back(d.rank, d.sent, d.awaited);
             return found;
           })
      .def("heads", raw<&Rings::heads>, nb::arg("out"))
      .def("run", &Rings::run, nb::arg("seconds"), NoGil())
      .def("open", &Rings::open);
}

}  // namespace shoal::bind
