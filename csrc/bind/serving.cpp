#include "bind/bind.h"
#include "serving/varint.h"

namespace shoal::bind {
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
}

}  // namespace shoal::bind
