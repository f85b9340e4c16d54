#include "bind/bind.h"
#include "core/isa.h"
#include "core/thread_pool.h"

namespace shoal::bind {

void core(nb::module_& m) {
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads, nb::arg("n"));
  m.def("isa", [] { return isa() == Isa::avx512 ? "avx512" : isa() == Isa::avx2 ? "avx2" : "base"; });
}

}  // namespace shoal::bind

NB_MODULE(_core, m) {
  shoal::bind::core(m);
  shoal::bind::ops(m);
  shoal::bind::filter(m);  // before table, which takes filters
  shoal::bind::table(m);
  shoal::bind::fused(m);
  shoal::bind::gather(m);
  shoal::bind::io(m);
  shoal::bind::train(m);
}
