// Finding the parts of a Predict message and of its tensors, without building message objects.
#pragma once
#include <cstdint>
#include <vector>

namespace shoal {

struct Span {
  int64_t begin = 0, size = 0;
};

// The length-delimited fields of a message. Throws std::invalid_argument for bytes that are not protobuf, and for more
// fields than any request needs, since the result takes more memory than the message.
struct MapEntry {
  Span key, value;
};
struct PredictParts {
  std::vector<Span> specs;        // field 1, usually one
  std::vector<MapEntry> tensors;  // field 2
  std::vector<Span> filters;      // field 3
};
PredictParts predict_parts(const uint8_t* data, int64_t size);
// The tensors of a PredictResponse.
std::vector<MapEntry> response_tensors(const uint8_t* data, int64_t size);

struct TensorParts {
  int64_t dtype = 0;
  std::vector<int64_t> shape;
  bool unknown_rank = false;
  Span content;             // field 4
  std::vector<Span> lists;  // packed lists, with their field numbers; not of strings
  std::vector<int32_t> list_fields;
  bool unpacked = false;  // some element is not in a list, or there are more lists than these
};
// The parts of the tensor in `span`; positions are counted from `data`.
TensorParts tensor_parts(const uint8_t* data, Span span);

// The values of list `field`, in any mix of packed lists and single elements: little-endian words of `width` bytes, or
// with width 0 varints as int64. Throws std::invalid_argument for more than `limit` values.
std::vector<uint8_t> tensor_values(const uint8_t* data, Span span, int64_t field, int64_t width, int64_t limit);
// Where the elements of a list of strings are.
std::vector<Span> tensor_strings(const uint8_t* data, Span span, int64_t field, int64_t limit);

}  // namespace shoal
