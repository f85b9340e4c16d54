// Helpers of the binding files. Tensors arrive as addresses and sizes; Python has checked dtype, device and shape.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>
#include <string_view>
#include <type_traits>
#include <vector>

namespace shoal::bind {

namespace nb = nanobind;

template <class T>
T* ptr(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// The same for `n` elements. Tensors without memory, such as the fake ones of a tracing compiler, have address 0.
template <class T>
T* ptr(uintptr_t address, int64_t n) {
  if (address == 0 && n > 0)
    throw std::invalid_argument("a tensor without memory (a fake or meta tensor) cannot be read or written");
  return ptr<T>(address);
}

// Wraps a function or method for Python, which passes pointers as addresses and enumerators as numbers.
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

// Views of a list of bytes objects, which the list keeps alive.
inline std::vector<std::string_view> views_of(const nb::list& messages) {
  std::vector<std::string_view> views;
  for (nb::handle message : messages) {
    const auto bytes = nb::cast<nb::bytes>(message);
    views.emplace_back(bytes.c_str(), bytes.size());
  }
  return views;
}

void core(nb::module_& m);
void ops(nb::module_& m);
void filter(nb::module_& m);
void table(nb::module_& m);
void budget(nb::module_& m);
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
