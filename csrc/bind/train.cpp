#include "train/topk.h"

#include "bind/bind.h"

namespace shoal::bind {

void train(nb::module_& m) {
  m.def(
      "topk_magnitude",
      [](uintptr_t x, int64_t n, int64_t k, bool by_index, bool stop_on_nonfinite, uintptr_t indices) {
        return topk_magnitude(ptr<const float>(x), n, k, by_index, stop_on_nonfinite, ptr<int64_t>(indices));
      },
      nb::arg("x"), nb::arg("n"), nb::arg("k"), nb::arg("by_index"), nb::arg("stop_on_nonfinite"), nb::arg("indices"),
      NoGil());
}

}  // namespace shoal::bind
