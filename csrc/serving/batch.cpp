#include "serving/batch.h"

#include <cstring>
#include <stdexcept>

#include "serving/varint.h"

namespace shoal {
namespace {

constexpr ValueKind kKinds[] = {
    {1, 5, 4, false},   // float
    {2, 6, 8, false},   // double
    {3, 7, 4, true},    // int32
    {9, 10, 8, true},   // int64
    {10, 11, 1, true},  // bool
};
constexpr int64_t kMaxValues = int64_t{1} << 31;

bool plan_part(const Part& part, const ValueKind& kind, Joined* joined) {
  const TensorParts parts = tensor_parts(part.data, part.span);
  if (parts.dtype != kind.dtype || parts.unknown_rank || parts.unpacked || parts.shape.empty()) return false;
  const std::vector<int64_t> tail(parts.shape.begin() + 1, parts.shape.end());
  if (joined->rows.empty()) joined->tail = tail;
  if (tail != joined->tail) return false;
  int64_t count = 1;
  for (int64_t length : parts.shape) {
    if (length < 0 || __builtin_mul_overflow(count, length, &count) || count > kMaxValues) return false;
  }
  Span values = parts.content;
  bool packed = false;
  for (size_t i = 0; i < parts.lists.size(); ++i) {
    if (parts.list_fields[i] != kind.list_field) continue;
    if (values.size) return false;  // the values are in several lists, or also in the content
    values = parts.lists[i];
    packed = kind.varint;
  }
  const int64_t found = packed ? varint_count(part.data + values.begin, values.size) : values.size / kind.width;
  if (found != count || (!packed && values.size % kind.width)) return false;
  joined->rows.push_back(parts.shape[0]);
  joined->values.push_back(values);
  joined->packed.push_back(packed);
  joined->bytes += count * kind.width;
  return true;
}

int64_t size_of(int64_t value) { return varint_size(&value, 1); }

class Writer {
 public:
  explicit Writer(uint8_t* out) : at_(out) {}
  void varint(int64_t value) { at_ += varint_encode(&value, 1, at_); }
  void bytes(const void* data, int64_t size) {
    if (size) std::memcpy(at_, data, static_cast<size_t>(size));
    at_ += size;
  }
  void field(int32_t number, std::string_view payload) {
    head(number, static_cast<int64_t>(payload.size()));
    bytes(payload.data(), static_cast<int64_t>(payload.size()));
  }
  void head(int32_t number, int64_t size) {
    varint(number << 3 | 2);
    varint(size);
  }
  uint8_t* at() { return at_; }

 private:
  uint8_t* at_;
};

int64_t field_size(int32_t number, int64_t payload) { return size_of(number << 3 | 2) + size_of(payload) + payload; }

int64_t dim_size(int64_t length) { return length ? 1 + size_of(length) : 0; }  // a proto3 zero is not written

int64_t value_at(const ValueKind& kind, const uint8_t* values, int64_t i) {
  if (kind.width == 1) return values[i] != 0;
  if (kind.width == 8) {
    int64_t value;
    std::memcpy(&value, values + 8 * i, 8);
    return value;
  }
  int32_t value;
  std::memcpy(&value, values + 4 * i, 4);
  return value;
}

// One output of a response: the sizes of its nested messages.
struct Sizes {
  Sizes(const Output& output, int64_t begin, int64_t rows) {
    int64_t each = 1;
    for (int64_t length : output.tail) each *= length;
    count = rows * each;
    first = output.values + begin * each * output.kind->width;
    dims = field_size(2, dim_size(rows));
    for (int64_t length : output.tail) dims += field_size(2, dim_size(length));
    if (output.kind->varint) {
      for (int64_t i = 0; i < count; ++i) values += size_of(value_at(*output.kind, first, i));
    } else {
      values = count * output.kind->width;
    }
    tensor = 1 + size_of(output.kind->dtype) + field_size(2, dims);
    if (count) tensor += field_size(output.kind->list_field, values);
    entry = field_size(1, static_cast<int64_t>(output.alias.size())) + field_size(2, tensor);
  }
  const uint8_t* first;
  int64_t count = 0, dims = 0, values = 0, tensor = 0, entry = 0;
};

void write_dim(Writer* writer, int64_t length) {
  writer->head(2, dim_size(length));
  if (!length) return;
  writer->varint(8);
  writer->varint(length);
}

}  // namespace

const ValueKind* value_kind(int64_t dtype) {
  for (const ValueKind& kind : kKinds)
    if (kind.dtype == dtype) return &kind;
  return nullptr;
}

const ValueKind& checked_kind(int64_t dtype) {
  if (const ValueKind* kind = value_kind(dtype)) return *kind;
  throw std::invalid_argument(
      "dtype must be 1 (float), 2 (double), 3 (int32), 9 (int64) or 10 (bool) of TensorFlow's DataType, got " +
      std::to_string(dtype));
}

bool plan_join(const std::vector<Part>& parts, const ValueKind& kind, Joined* joined) {
  for (const Part& part : parts)
    if (!plan_part(part, kind, joined)) return false;
  return !parts.empty();
}

void join(const std::vector<Part>& parts, const ValueKind& kind, const Joined& joined, uint8_t* out) {
  std::vector<int64_t> wide;
  for (size_t i = 0; i < parts.size(); ++i) {
    const uint8_t* from = parts[i].data + joined.values[i].begin;
    const int64_t size = joined.values[i].size;
    if (!joined.packed[i]) {
      if (size) std::memcpy(out, from, static_cast<size_t>(size));
      if (kind.dtype == 10)
        for (int64_t k = 0; k < size; ++k) out[k] = out[k] != 0;
      out += size;
      continue;
    }
    const int64_t count = varint_count(from, size);
    wide.resize(static_cast<size_t>(count));
    varint_decode(from, size, wide.data(), count);
    for (int64_t k = 0; k < count; ++k, out += kind.width) {
      if (kind.width == 8) {
        std::memcpy(out, &wide[k], 8);
      } else if (kind.width == 4) {
        const auto narrow = static_cast<int32_t>(wide[k]);
        std::memcpy(out, &narrow, 4);
      } else {
        *out = wide[k] != 0;
      }
    }
  }
}

// An entry of a map of tensors.
static void write_tensor(Writer* writer, int field, const Output& output, int64_t begin, int64_t rows) {
  const Sizes sizes(output, begin, rows);
  writer->head(field, sizes.entry);
  writer->field(1, output.alias);
  writer->head(2, sizes.tensor);
  writer->varint(8);
  writer->varint(output.kind->dtype);
  writer->head(2, sizes.dims);
  write_dim(writer, rows);
  for (int64_t length : output.tail) write_dim(writer, length);
  if (!sizes.count) return;
  writer->head(output.kind->list_field, sizes.values);
  if (output.kind->varint) {
    for (int64_t i = 0; i < sizes.count; ++i) writer->varint(value_at(*output.kind, sizes.first, i));
  } else {
    writer->bytes(sizes.first, sizes.values);
  }
}

int64_t response_size(std::string_view spec, const std::vector<Output>& outputs, int64_t begin, int64_t rows) {
  int64_t size = field_size(2, static_cast<int64_t>(spec.size()));
  for (const Output& output : outputs) size += field_size(1, Sizes(output, begin, rows).entry);
  return size;
}

void write_response(std::string_view spec, const std::vector<Output>& outputs, int64_t begin, int64_t rows,
                    uint8_t* out) {
  Writer writer(out);
  for (const Output& output : outputs) write_tensor(&writer, 1, output, begin, rows);
  writer.field(2, spec);
}

std::string write_request(std::string_view spec, const std::vector<Output>& tensors, const std::vector<int64_t>& rows,
                          std::string_view filters) {
  int64_t size = field_size(1, static_cast<int64_t>(spec.size())) + static_cast<int64_t>(filters.size());
  for (size_t i = 0; i < tensors.size(); ++i) size += field_size(2, Sizes(tensors[i], 0, rows[i]).entry);
  std::string out(static_cast<size_t>(size), '\0');
  Writer writer(reinterpret_cast<uint8_t*>(out.data()));
  writer.field(1, spec);
  for (size_t i = 0; i < tensors.size(); ++i) write_tensor(&writer, 2, tensors[i], 0, rows[i]);
  writer.bytes(reinterpret_cast<const uint8_t*>(filters.data()), static_cast<int64_t>(filters.size()));
  return out;
}

}  // namespace shoal
