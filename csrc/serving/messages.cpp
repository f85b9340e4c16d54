#include "serving/messages.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "serving/varint.h"

namespace shoal {
namespace {

struct Field {
  uint64_t number;
  int wire;
  uint64_t value;  // wire type 0
  Span span;       // the others
};

// Reads fields one after another; positions are counted from the start of the message.
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
        fail("field " + std::to_string(field->number) + " has wire type " + std::to_string(field->wire) +
             "; only 0, 1, 2 and 5 are supported");
    }
    if (field->number == 0) fail("a field has number 0");
    return true;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::invalid_argument("the message is cut off or not protobuf: " + what + " at byte " + std::to_string(at_));
  }
  void take(Field* field, uint64_t size) {
    if (size > static_cast<uint64_t>(end_ - at_))
      fail("field " + std::to_string(field->number) + " needs " + std::to_string(size) + " bytes, but " +
           std::to_string(end_ - at_) + " are left");
    field->span = {at_, static_cast<int64_t>(size)};
    at_ += static_cast<int64_t>(size);
  }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      if (at_ >= end_) fail("a varint does not end");
      const uint8_t byte = data_[at_++];
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (!(byte & 0x80)) return value;
    }
    fail("a varint has more than ten bytes");
  }

  const uint8_t* data_;
  int64_t at_;
  const int64_t end_;
};

constexpr uint64_t kStrings = 8;  // of a tensor: one field per value
constexpr size_t kMaxDims = 64;
constexpr size_t kMaxLists = 16;        // writers use one; a tensor in more of them is read by tensor_values
constexpr size_t kMaxFields = 1 << 17;  // inputs and output filters of a request
constexpr const char* kTooMany = "a list does not fit its shape, which holds ";

void too_many_fields() {
  throw std::invalid_argument("a message must have at most 131072 tensors, filters and specs, got more");
}

}  // namespace

static MapEntry map_entry(const uint8_t* data, Span span) {
  MapEntry entry{{span.begin, 0}, {span.begin, 0}};
  Field field;
  for (Reader reader(data, span); reader.next(&field);) {
    if (field.wire != 2) continue;
    if (field.number == 1) entry.key = field.span;
    if (field.number == 2) entry.value = field.span;
  }
  return entry;
}

PredictParts predict_parts(const uint8_t* data, int64_t size) {
  PredictParts parts;
  Field field;
  for (Reader reader(data, {0, size}); reader.next(&field);) {
    if (field.wire != 2) continue;
    if (parts.specs.size() + parts.filters.size() + parts.tensors.size() == kMaxFields) too_many_fields();
    if (field.number == 1) parts.specs.push_back(field.span);
    if (field.number == 3) parts.filters.push_back(field.span);
    if (field.number == 2) parts.tensors.push_back(map_entry(data, field.span));
  }
  return parts;
}

std::vector<MapEntry> response_tensors(const uint8_t* data, int64_t size) {
  std::vector<MapEntry> found;
  Field field;
  for (Reader reader(data, {0, size}); reader.next(&field);) {
    if (field.wire != 2 || field.number != 1) continue;
    if (found.size() == kMaxFields) too_many_fields();
    found.push_back(map_entry(data, field.span));
  }
  return found;
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
        if (parts.shape.size() == kMaxDims)
          throw std::invalid_argument("a tensor must have at most 64 dimensions, got more");
        int64_t length = 0;
        for (Reader reads(data, inner.span); reads.next(&dim);)
          if (dim.number == 1 && dim.wire == 0) length = static_cast<int64_t>(dim.value);
        parts.shape.push_back(length);
      }
    } else if (field.number == 4 && field.wire == 2) {
      parts.content = field.span;
    } else if (field.number >= 5 && field.number <= 17 && field.number != kStrings) {
      parts.unpacked |= field.wire != 2 || parts.lists.size() == kMaxLists;
      if (parts.unpacked) continue;
      parts.lists.push_back(field.span);
      parts.list_fields.push_back(static_cast<int32_t>(field.number));
    }
  }
  return parts;
}

std::vector<uint8_t> tensor_values(const uint8_t* data, Span span, int64_t field, int64_t width, int64_t limit) {
  std::vector<uint8_t> out;
  std::vector<int64_t> wide;
  int64_t count = 0;
  const auto room = [&](int64_t more) {
    if (more > limit - count) throw std::invalid_argument(kTooMany + std::to_string(limit));
    count += more;
  };
  const auto append = [&](const void* from, int64_t size) {
    const auto* bytes = static_cast<const uint8_t*>(from);
    out.insert(out.end(), bytes, bytes + size);
  };
  Field found;
  for (Reader reader(data, span); reader.next(&found);) {
    if (static_cast<int64_t>(found.number) != field) continue;
    const uint8_t* from = data + found.span.begin;
    const int64_t size = found.span.size;
    if (width && (found.wire == 0 || size % width)) {
      throw std::invalid_argument("the bytes of a list must be a multiple of " + std::to_string(width) + ", got " +
                                  std::to_string(size));
    }
    if (width) {
      room(size / width);
      append(from, size);
    } else if (found.wire == 0) {
      room(1);
      append(&found.value, 8);
    } else if (found.wire == 2) {
      const int64_t more = varint_count(from, size);
      if (more < 0) throw std::invalid_argument("a packed list of integers is cut off");
      room(more);
      wide.resize(static_cast<size_t>(more));
      varint_decode(from, size, wide.data(), more);
      append(wide.data(), 8 * more);
    } else {
      throw std::invalid_argument("an integer must have wire type 0 or 2, got " + std::to_string(found.wire));
    }
  }
  return out;
}

std::vector<Span> tensor_strings(const uint8_t* data, Span span, int64_t field, int64_t limit) {
  std::vector<Span> out;
  out.reserve(static_cast<size_t>(std::min(limit, span.size / 2)));  // a string takes at least two bytes
  Field found;
  for (Reader reader(data, span); reader.next(&found);) {
    if (static_cast<int64_t>(found.number) != field) continue;
    if (found.wire != 2)
      throw std::invalid_argument("a string must have wire type 2, got " + std::to_string(found.wire));
    if (static_cast<int64_t>(out.size()) == limit) throw std::invalid_argument(kTooMany + std::to_string(limit));
    out.push_back(found.span);
  }
  return out;
}

}  // namespace shoal
