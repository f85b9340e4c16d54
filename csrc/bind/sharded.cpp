#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "sharded/parts.h"

namespace shoal::bind {

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
}

}  // namespace shoal::bind
