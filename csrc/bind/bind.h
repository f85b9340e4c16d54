// What the binding files share. Tensors arrive as addresses and sizes; Python has checked dtype, device and shape.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>
#include <type_traits>

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

// A function, or a method, as Python calls it: its pointers come as addresses, its choices as numbers.
template <class T>
struct Given {
  using Type = T;
  static T&& pass(std::remove_reference_t<T>& value) { return static_cast<T&&>(value); }
};
template <class T>
struct Given<T*> {
  using Type = uintptr_t;
  static T* pass(uintptr_t address) { return ptr<T>(address); }
};

template <class T>
  requires std::is_enum_v<T>
struct Given<T> {
  using Type = int;
  static T pass(int value) { return static_cast<T>(value); }
};

template <class F, F function>
struct Raw;
template <class R, class... A, R (*function)(A...)>
struct Raw<R (*)(A...), function> {
  static R call(typename Given<A>::Type... given) { return function(Given<A>::pass(given)...); }
};
template <class R, class C, class... A, R (C::*method)(A...)>
struct Raw<R (C::*)(A...), method> {
  static R call(C& self, typename Given<A>::Type... given) { return (self.*method)(Given<A>::pass(given)...); }
};
template <class R, class C, class... A, R (C::*method)(A...) const>
struct Raw<R (C::*)(A...) const, method> {
  static R call(const C& self, typename Given<A>::Type... given) { return (self.*method)(Given<A>::pass(given)...); }
};
template <auto function>
constexpr auto raw = &Raw<decltype(function), function>::call;

using NoGil = nb::call_guard<nb::gil_scoped_release>;

void core(nb::module_& m);
void ops(nb::module_& m);
void filter(nb::module_& m);
void table(nb::module_& m);
void budget(nb::module_& m);
void fused(nb::module_& m);
void update(nb::module_& m);
void gather(nb::module_& m);
void serving(nb::module_& m);
void io(nb::module_& m);
void train(nb::module_& m);
void nn(nb::module_& m);
void sharded(nb::module_& m);
void data(nb::module_& m);
void join(nb::module_& m);
void front(nb::module_& m);
void predict(nb::module_& m);

}  // namespace shoal::bind
