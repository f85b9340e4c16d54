// What the binding files share. Tensors arrive as addresses and sizes; Python has checked dtype, device and shape.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>

namespace shoal::bind {

namespace nb = nanobind;

template <class T>
T* ptr(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// The same of `n` elements. What holds no numbers, as the fake tensors of a tracing compiler, lies at address 0.
template <class T>
T* ptr(uintptr_t address, int64_t n) {
  if (address == 0 && n > 0)
    throw std::invalid_argument("a tensor without memory, such as a fake one, holds no numbers");
  return ptr<T>(address);
}

using NoGil = nb::call_guard<nb::gil_scoped_release>;

void core(nb::module_& m);
void ops(nb::module_& m);
void filter(nb::module_& m);
void table(nb::module_& m);
void fused(nb::module_& m);
void update(nb::module_& m);
void gather(nb::module_& m);
void serving(nb::module_& m);
void io(nb::module_& m);
void train(nb::module_& m);
void nn(nb::module_& m);
void sharded(nb::module_& m);
void data(nb::module_& m);

}  // namespace shoal::bind
