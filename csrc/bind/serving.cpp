#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <tuple>

#include "bind/bind.h"
#include "core/rates.h"
#include "serving/batch.h"
#include "serving/messages.h"
#include "serving/push_codes.h"
#include "serving/raw_requests.h"
#include "serving/varint.h"

namespace shoal::bind {
namespace {

nb::tuple pair(Span span) { return nb::make_tuple(span.begin, span.size); }

nb::list pairs(const std::vector<Span>& spans) {
  nb::list out;
  for (Span span : spans) out.append(pair(span));
  return out;
}

constexpr int64_t kHoldGil = 1 << 16;  // bytes; smaller work ends before another thread could take the GIL

const uint8_t* bytes_of(const nb::bytes& data) { return static_cast<const uint8_t*>(data.data()); }

// A new bytes object, which the caller fills before anyone else sees it.
nb::bytes fresh_bytes(int64_t size, uint8_t** out) {
  PyObject* made = PyBytes_FromStringAndSize(nullptr, size);
  if (!made) throw nb::python_error();
  *out = reinterpret_cast<uint8_t*>(PyBytes_AsString(made));
  return nb::steal<nb::bytes>(made);
}

Part part_of(const nb::bytes& data, int64_t begin, int64_t size) {
  if (begin < 0 || size < 0 || begin > static_cast<int64_t>(data.size()) - size)
    throw std::invalid_argument("a tensor must be within its message of " + std::to_string(data.size()) +
                                " bytes, got begin " + std::to_string(begin) + " and size " + std::to_string(size));
  return {bytes_of(data), {begin, size}};
}

nb::object join_tensors(const nb::list& given, int64_t dtype) {
  const ValueKind* kind = value_kind(dtype);
  if (!kind) return nb::none();
  std::vector<Part> parts;
  int64_t total = 0;
  for (nb::handle each : given) {
    const auto [data, begin, size] = nb::cast<std::tuple<nb::bytes, int64_t, int64_t>>(each);
    parts.push_back(part_of(data, begin, size));
    total += size;
  }
  Joined joined;
  bool fits;
  const auto plan = [&] { fits = plan_join(parts, *kind, &joined); };
  if (total > kHoldGil) {
    nb::gil_scoped_release release;
    plan();
  } else {
    plan();
  }
  if (!fits) return nb::none();
  uint8_t* out;
  nb::bytes values = fresh_bytes(joined.bytes, &out);
  if (total > kHoldGil) {
    nb::gil_scoped_release release;
    join(parts, *kind, joined, out);
  } else {
    join(parts, *kind, joined, out);
  }
  return nb::make_tuple(values, joined.rows, joined.tail);
}

nb::list split_responses(const nb::bytes& spec_bytes, const nb::list& given, const std::vector<int64_t>& rows) {
  const std::string_view spec(static_cast<const char*>(spec_bytes.data()), spec_bytes.size());
  std::vector<Output> outputs;
  for (nb::handle each : given) {
    auto [alias, dtype, tail, values] =
        nb::cast<std::tuple<std::string_view, int64_t, std::vector<int64_t>, uintptr_t>>(each);
    outputs.push_back({alias, &checked_kind(dtype), std::move(tail), ptr<const uint8_t>(values)});
  }
  nb::list answers;
  int64_t begin = 0;
  for (int64_t count : rows) {
    uint8_t* out;
    nb::bytes answer = fresh_bytes(response_size(spec, outputs, begin, count), &out);
    write_response(spec, outputs, begin, count, out);
    answers.append(std::move(answer));
    begin += count;
  }
  return answers;
}

// (name, features, numbers, place of its lengths or of its list or -1, listed, takes text, takes fractions, is lengths)
using InputTuple = std::tuple<std::string, std::vector<int64_t>, std::vector<int64_t>, int64_t, bool, bool, bool, bool>;

RawBatch read_requests(const RequestReader& reader, const nb::list& messages) {
  const std::vector<std::string_view> views = views_of(messages);
  size_t total = 0;
  for (std::string_view view : views) total += view.size();
  if (total <= kHoldGil) return reader.read(views);
  const nb::gil_scoped_release release;
  return reader.read(views);
}

// Copies to dense [total, numbers], ids and, if features have lists, offsets [samples * features + 1].
void copy_batch(const RawBatch& batch, uintptr_t dense, uintptr_t ids, uintptr_t offsets) {
  std::copy(batch.dense.begin(), batch.dense.end(), ptr<float>(dense));
  std::copy(batch.ids.begin(), batch.ids.end(), ptr<int64_t>(ids));
  if (!offsets) return;
  auto* out = ptr<int64_t>(offsets);
  int64_t at = *out++ = 0;
  for (int64_t length : batch.lengths) *out++ = at += length;
}

}  // namespace

void serving(nb::module_& m) {
  nb::class_<Rates>(m, "Rates")
      .def(nb::init<double>(), nb::arg("per_second"))
      .def("set", &Rates::set)
      .def("admit",
           [](Rates& rates, const std::string& caller) {
             const auto now = std::chrono::steady_clock::now().time_since_epoch();
             return rates.admit(caller, std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
           })
      .def_prop_ro("refused", &Rates::refused);
  nb::class_<RawBatch>(m, "RawBatch")
      .def_ro("rows", &RawBatch::rows)
      .def_ro("total", &RawBatch::total)
      .def_prop_ro("ids", [](const RawBatch& batch) { return batch.ids.size(); })
      .def_prop_ro("lengths", [](const RawBatch& batch) { return batch.lengths.size(); })
      .def("copy", copy_batch);
  nb::class_<RequestReader>(m, "RequestReader")
      .def("__init__",
           [](RequestReader* self, const FeatureSet& set, const std::vector<InputTuple>& given, bool ready) {
             std::vector<std::pair<std::string, RawInput>> inputs;
             for (const auto& [name, features, numbers, lengths, listed, text, real, is_lengths] : given)
               inputs.emplace_back(name, RawInput{features, numbers, lengths, listed, text, real, is_lengths});
             new (self) RequestReader(set, std::move(inputs), ready);
           })
      .def("read", read_requests);
  m.def("varint_size", raw<&varint_size>, NoGil());
  m.def("varint_encode", raw<&varint_encode>, NoGil());
  m.def("varint_count", raw<&varint_count>, NoGil());
  m.def("varint_decode", raw<&varint_decode>, NoGil());
  nb::class_<PushCodes>(m, "PushCodes")
      .def(nb::init<>())
      .def("set", raw<&PushCodes::set>, NoGil())
      .def("find", raw<&PushCodes::find>, NoGil())
      .def("copy", raw<&PushCodes::copy>, NoGil())
      .def("mark_used", raw<&PushCodes::mark_used>, NoGil())
      .def("renumber", raw<&PushCodes::renumber>, NoGil())
      .def("size", &PushCodes::size);

  // (specs, [(key, value)], filters), each a (begin, size) in the message.
  m.def("predict_parts", [](nb::bytes data) {
    const PredictParts parts =
        predict_parts(static_cast<const uint8_t*>(data.data()), static_cast<int64_t>(data.size()));
    nb::list tensors;
    for (const MapEntry& entry : parts.tensors) tensors.append(nb::make_tuple(pair(entry.key), pair(entry.value)));
    return nb::make_tuple(pairs(parts.specs), tensors, pairs(parts.filters));
  });
  // (dtype, shape, unknown_rank, content, lists, their field numbers, whether some element is not in a list)
  m.def("tensor_parts", [](nb::bytes data, int64_t begin, int64_t size) {
    const Part part = part_of(data, begin, size);
    const TensorParts parts = tensor_parts(part.data, part.span);
    return nb::make_tuple(parts.dtype, parts.shape, parts.unknown_rank, pair(parts.content), pairs(parts.lists),
                          parts.list_fields, parts.unpacked);
  });
  // The values of one list, at most `limit`, as bytes: words of `width` bytes, or int64 for varints (width 0).
  m.def("tensor_values", [](nb::bytes data, int64_t begin, int64_t size, int64_t field, int64_t width, int64_t limit) {
    const Part part = part_of(data, begin, size);
    std::vector<uint8_t> values;
    {
      nb::gil_scoped_release release;
      values = tensor_values(part.data, part.span, field, width, limit);
    }
    return nb::bytes(values.data(), values.size());
  });
  // The elements of a list of strings, at most `limit`.
  m.def("tensor_strings", [](nb::bytes data, int64_t begin, int64_t size, int64_t field, int64_t limit) {
    const Part part = part_of(data, begin, size);
    nb::list out;
    for (const Span& each : tensor_strings(part.data, part.span, field, limit))
      out.append(nb::bytes(part.data + each.begin, static_cast<size_t>(each.size)));
    return out;
  });
  // Joins one input of several requests, [(message, begin, size)]; returns (values, rows of each, the other
  // dimensions), or None if the requests must be read one by one.
  m.def("join_tensors", join_tensors);
  // A PredictResponse for the next rows[0] rows, then for rows[1], ...; outputs are [(alias, dtype, the other
  // dimensions, address)].
  m.def("split_responses", split_responses);
}

}  // namespace shoal::bind
