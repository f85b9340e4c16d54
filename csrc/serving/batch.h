// Requests that run together: joining one tensor from many messages, and writing many messages from one tensor.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "serving/messages.h"

namespace shoal {

// How messages hold the values of a dtype: in which list, and as words of `width` bytes or as varints.
struct ValueKind {
  int64_t dtype;  // TensorFlow's DataType
  int32_t list_field;
  int32_t width;
  bool varint;
};
// Null for dtypes that are not joined here.
const ValueKind* value_kind(int64_t dtype);
// The same; throws std::invalid_argument for such dtypes.
const ValueKind& checked_kind(int64_t dtype);

struct Part {
  const uint8_t* data;
  Span span;  // of a TensorProto in data
};
struct Joined {
  std::vector<int64_t> rows;    // first dimension of each part
  std::vector<int64_t> tail;    // the other dimensions, which all parts share
  std::vector<Span> values;     // where each part's values are
  std::vector<uint8_t> packed;  // 1: as varints
  int64_t bytes = 0;            // of the joined tensor
};
// Plans joining the parts along their first dimension. False if one of them has another dtype or shape, or does not
// have each of its values exactly once: then another reader must report what is wrong.
bool plan_join(const std::vector<Part>& parts, const ValueKind& kind, Joined* joined);
// Writes joined.bytes to out. Throws std::invalid_argument for a varint of more than ten bytes.
void join(const std::vector<Part>& parts, const ValueKind& kind, const Joined& joined, uint8_t* out);

struct Output {
  std::string_view alias;
  const ValueKind* kind;
  std::vector<int64_t> tail;
  const uint8_t* values;  // of the first row
};
// A PredictResponse with `rows` rows of each output, from row `begin` on: its size, and its bytes.
int64_t response_size(std::string_view spec, const std::vector<Output>& outputs, int64_t begin, int64_t rows);
void write_response(std::string_view spec, const std::vector<Output>& outputs, int64_t begin, int64_t rows,
                    uint8_t* out);
// A PredictRequest with these tensors, of rows[i] rows each; `filters` are its serialised output filters.
std::string write_request(std::string_view spec, const std::vector<Output>& tensors, const std::vector<int64_t>& rows,
                          std::string_view filters);

}  // namespace shoal
