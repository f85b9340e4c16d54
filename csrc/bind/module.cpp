#include <nanobind/ndarray.h>

#include "bind/bind.h"
#include "core/buffers.h"
#include "core/isa.h"
#include "core/thread_pool.h"

namespace shoal::bind {

void core(nb::module_& m) {
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads, nb::arg("n"));
  m.def(
      "empty_rows",
      [](size_t rows, size_t columns) {
        auto* block = new Block(take_block(rows * columns * sizeof(float)));
        nb::capsule owner(block, [](void* p) noexcept {
          auto* held = static_cast<Block*>(p);
          give_block(*held);
          delete held;
        });
        return nb::ndarray<nb::pytorch, float, nb::ndim<2>>(block->data, {rows, columns}, owner);
      },
      nb::arg("rows"), nb::arg("columns"));
  m.def("set_buffer_cache_bytes", &set_buffer_cache_bytes, nb::arg("bytes"));
  m.def("buffer_cache_bytes", &buffer_cache_bytes);
  m.def("idle_buffer_bytes", &idle_buffer_bytes);
  m.def("isa", [] { return isa() == Isa::avx512 ? "avx512" : isa() == Isa::avx2 ? "avx2" : "base"; });
}

}  // namespace shoal::bind

NB_MODULE(_core, m) {
  // A table that an autograd graph or a compiled function still holds when the interpreter exits is not a leak.
  nanobind::set_leak_warnings(false);
  shoal::bind::core(m);
  shoal::bind::ops(m);
  shoal::bind::filter(m);  // before table, which takes filters and budgets
  shoal::bind::budget(m);
  shoal::bind::table(m);
  shoal::bind::update(m);
  shoal::bind::gather(m);
  shoal::bind::serving(m);
  shoal::bind::io(m);
  shoal::bind::train(m);
  shoal::bind::nn(m);
  shoal::bind::sharded(m);
  shoal::bind::data(m);
  shoal::bind::join(m);
  shoal::bind::front(m);
  shoal::bind::predict(m);
}
