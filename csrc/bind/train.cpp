#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "bind/bind.h"
#include "train/crc32.h"
#include "train/topk.h"

namespace shoal::bind {
namespace {

// A bytes object of n bytes, which the caller fills before anyone else sees it. Large ones ask for huge
// pages: with small ones the page faults of fresh memory take longer than the copy into it.
nb::bytes new_bytes(int64_t n) {
  if (n < 0) throw std::invalid_argument("new_bytes: n must be >= 0, got " + std::to_string(n));
  PyObject* object = PyBytes_FromStringAndSize(nullptr, n);
  if (object == nullptr) throw nb::python_error();
#if defined(__linux__)
  constexpr uintptr_t kHuge = uintptr_t{2} << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(PyBytes_AsString(object));
  const uintptr_t first = (begin + kHuge - 1) & ~(kHuge - 1), last = (begin + n) & ~(kHuge - 1);
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  return nb::steal<nb::bytes>(object);
}

}  // namespace

void train(nb::module_& m) {
  m.def("topk_magnitude", raw<&topk_magnitude>, nb::arg("x"), nb::arg("n"), nb::arg("k"), nb::arg("by_index"),
        nb::arg("stop_on_nonfinite"), nb::arg("indices"), NoGil());
  m.def("crc32", raw<&crc32>, nb::arg("data"), nb::arg("n"), nb::arg("crc") = 0, NoGil());
  m.def("new_bytes", &new_bytes, nb::arg("n"));
  m.def("bytes_address", [](nb::bytes b) { return reinterpret_cast<uintptr_t>(b.c_str()); }, nb::arg("data"));
}

}  // namespace shoal::bind
