#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bind/bind.h"
#include "serving/messages.h"
#include "serving/varint.h"

namespace shoal::bind {
namespace {

nb::tuple pair(Span span) { return nb::make_tuple(span.begin, span.size); }

nb::list pairs(const std::vector<Span>& spans) {
  nb::list out;
  for (Span span : spans) out.append(pair(span));
  return out;
}

}  // namespace

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

  // (specs, [(key, value)], filters), each a (begin, size) in the message.
  m.def("predict_parts", [](nb::bytes data) {
    const PredictParts parts =
        predict_parts(static_cast<const uint8_t*>(data.data()), static_cast<int64_t>(data.size()));
    nb::list tensors;
    for (const MapEntry& entry : parts.tensors) tensors.append(nb::make_tuple(pair(entry.key), pair(entry.value)));
    return nb::make_tuple(pairs(parts.specs), tensors, pairs(parts.filters));
  });
  // (dtype, shape, unknown_rank, content, lists, their field numbers, whether an element stands alone)
  m.def("tensor_parts", [](nb::bytes data, int64_t begin, int64_t size) {
    if (begin < 0 || size < 0 || begin > static_cast<int64_t>(data.size()) - size)
      throw std::invalid_argument("a tensor lies outside of its message");
    const TensorParts parts = tensor_parts(static_cast<const uint8_t*>(data.data()), {begin, size});
    return nb::make_tuple(parts.dtype, parts.shape, parts.unknown_rank, pair(parts.content), pairs(parts.lists),
                          parts.list_fields, parts.unpacked);
  });
}

}  // namespace shoal::bind
