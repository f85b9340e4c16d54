#include <cstring>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "serving/touched_pairs.h"
#include "serving/varint.h"

namespace shoal::bind {
namespace {

// What steal moved out, kept until Python has copied it into arrays of its own.
struct StolenPairs {
  std::vector<int64_t> ids;
  std::vector<int32_t> tables;
};

}  // namespace

void serving(nb::module_& m) {
  m.def("varint_size", [](uintptr_t values, int64_t n) { return varint_size(ptr<const int64_t>(values), n); }, NoGil());
  m.def(
      "varint_encode",
      [](uintptr_t values, int64_t n, uintptr_t out) {
        return varint_encode(ptr<const int64_t>(values), n, ptr<uint8_t>(out));
      },
      NoGil());
  m.def(
      "varint_count", [](uintptr_t data, int64_t bytes) { return varint_count(ptr<const uint8_t>(data), bytes); },
      NoGil());
  m.def(
      "varint_decode",
      [](uintptr_t data, int64_t bytes, uintptr_t out, int64_t n) {
        varint_decode(ptr<const uint8_t>(data), bytes, ptr<int64_t>(out), n);
      },
      NoGil());

  nb::class_<StolenPairs>(m, "StolenPairs")
      .def("__len__", [](const StolenPairs& s) { return s.ids.size(); })
      .def("copy_to", [](const StolenPairs& s, uintptr_t ids, uintptr_t tables) {
        if (s.ids.empty()) return;
        std::memcpy(ptr<int64_t>(ids), s.ids.data(), s.ids.size() * sizeof(int64_t));
        std::memcpy(ptr<int32_t>(tables), s.tables.data(), s.tables.size() * sizeof(int32_t));
      });
  nb::class_<TouchedPairs>(m, "TouchedPairs")
      .def(nb::init<int64_t>(), nb::arg("capacity"))
      .def(
          "insert",
          [](TouchedPairs& self, uintptr_t ids, int64_t n, int32_t table) {
            return self.insert(ptr<const int64_t>(ids), n, table);
          },
          NoGil())
      .def(
          "steal",
          [](TouchedPairs& self) {
            StolenPairs out;
            self.steal(out.ids, out.tables);
            return out;
          },
          NoGil())
      .def("__len__", &TouchedPairs::size)
      .def_prop_ro("capacity", &TouchedPairs::capacity);
}

}  // namespace shoal::bind
