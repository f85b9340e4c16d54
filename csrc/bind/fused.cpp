// Fused operations over several tables.
#include "table/fused.h"

#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "bind/bind.h"
#include "bind/checks.h"

namespace shoal::bind {

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

}  // namespace shoal::bind
