#include "serving/messages.h"

#include <stdexcept>
#include <string>

namespace shoal {
namespace {

struct Field {
  uint64_t number;
  int wire;
  uint64_t value;  // wire type 0
  Span span;       // the others
};

// Reads fields one after another; positions count from the start of the whole message.
class Reader {
 public:
  Reader(const uint8_t* data, Span span) : data_(data), at_(span.begin), end_(span.begin + span.size) {}

  bool next(Field* field) {
    if (at_ >= end_) return false;
    const uint64_t tag = varint();
    field->number = tag >> 3;
    field->wire = static_cast<int>(tag & 7);
    field->value = 0;
    uint64_t size;
    switch (field->wire) {
      case 0:
        field->value = varint();
        field->span = {at_, 0};
        break;
      case 1:
        take(field, 8);
        break;
      case 2:
        size = varint();
        take(field, size);
        break;
      case 5:
        take(field, 4);
        break;
      default:
        fail("it has wire type " + std::to_string(field->wire));
    }
    if (field->number == 0) fail("it has a field of number 0");
    return true;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::invalid_argument("the message is cut off or not protobuf: " + what + " at byte " + std::to_string(at_));
  }
  void take(Field* field, uint64_t size) {
    if (size > static_cast<uint64_t>(end_ - at_))
      fail("field " + std::to_string(field->number) + " wants " + std::to_string(size) + " bytes");
    field->span = {at_, static_cast<int64_t>(size)};
    at_ += static_cast<int64_t>(size);
  }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      if (at_ >= end_) fail("a varint has no end");
      const uint8_t byte = data_[at_++];
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (!(byte & 0x80)) return value;
    }
    fail("a varint is too long");
  }

  const uint8_t* data_;
  int64_t at_;
  const int64_t end_;
};

constexpr size_t kMaxDims = 64;

}  // namespace

PredictParts predict_parts(const uint8_t* data, int64_t size) {
  PredictParts parts;
  Field field, inner;
  for (Reader reader(data, {0, size}); reader.next(&field);) {
    if (field.wire != 2) continue;
    if (field.number == 1) parts.specs.push_back(field.span);
    if (field.number == 3) parts.filters.push_back(field.span);
    if (field.number != 2) continue;
    MapEntry entry{{field.span.begin, 0}, {field.span.begin, 0}};
    for (Reader map(data, field.span); map.next(&inner);) {
      if (inner.wire != 2) continue;
      if (inner.number == 1) entry.key = inner.span;
      if (inner.number == 2) entry.value = inner.span;
    }
    parts.tensors.push_back(entry);
  }
  return parts;
}

TensorParts tensor_parts(const uint8_t* data, Span span) {
  TensorParts parts;
  Field field, inner, dim;
  for (Reader reader(data, span); reader.next(&field);) {
    if (field.number == 1 && field.wire == 0) {
      parts.dtype = static_cast<int64_t>(field.value);
    } else if (field.number == 2 && field.wire == 2) {
      parts.shape.clear();
      for (Reader shape(data, field.span); shape.next(&inner);) {
        if (inner.number == 3 && inner.wire == 0 && inner.value) parts.unknown_rank = true;
        if (inner.number != 2 || inner.wire != 2) continue;
        if (parts.shape.size() == kMaxDims) throw std::invalid_argument("a tensor has more than 64 dimensions");
        int64_t length = 0;
        for (Reader reads(data, inner.span); reads.next(&dim);)
          if (dim.number == 1 && dim.wire == 0) length = static_cast<int64_t>(dim.value);
        parts.shape.push_back(length);
      }
    } else if (field.number == 4 && field.wire == 2) {
      parts.content = field.span;
    } else if (field.number >= 5 && field.number <= 17) {
      parts.unpacked |= field.wire != 2;
      parts.lists.push_back(field.span);
      parts.list_fields.push_back(static_cast<int32_t>(field.number));
    }
  }
  return parts;
}

}  // namespace shoal
