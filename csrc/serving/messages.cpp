#include "serving/messages.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/wire.h"
#include "serving/varint.h"

namespace shoal {
namespace {

struct FailMessage {
  [[noreturn]] void operator()(const std::string& what) const { throw std::invalid_argument("the message " + what); }
};

// The fields of the message in a span; positions are counted from `data`.
class Reader : public wire::Fields<FailMessage> {
 public:
  Reader(const uint8_t* data, Span span)
      : Fields({reinterpret_cast<const char*>(data) + span.begin, static_cast<size_t>(span.size)}), data_(data) {}

  bool is_bytes(int number) const { return field == number && type == wire::bytes; }
  bool is_number(int number) const { return field == number && type == wire::varint; }
  Span span() const {
    return {reinterpret_cast<const uint8_t*>(bytes.data()) - data_, static_cast<int64_t>(bytes.size())};
  }

 private:
  const uint8_t* data_;
};

constexpr int kStrings = 8;  // of a tensor: one field per value
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
  for (Reader reader(data, span); reader.next();) {
    if (reader.is_bytes(1)) entry.key = reader.span();
    if (reader.is_bytes(2)) entry.value = reader.span();
  }
  return entry;
}

PredictParts predict_parts(const uint8_t* data, int64_t size) {
  PredictParts parts;
  for (Reader reader(data, {0, size}); reader.next();) {
    if (reader.type != wire::bytes) continue;
    if (parts.specs.size() + parts.filters.size() + parts.tensors.size() == kMaxFields) too_many_fields();
    if (reader.field == 1) parts.specs.push_back(reader.span());
    if (reader.field == 3) parts.filters.push_back(reader.span());
    if (reader.field == 2) parts.tensors.push_back(map_entry(data, reader.span()));
  }
  return parts;
}

std::vector<MapEntry> response_tensors(const uint8_t* data, int64_t size) {
  std::vector<MapEntry> found;
  for (Reader reader(data, {0, size}); reader.next();) {
    if (!reader.is_bytes(1)) continue;
    if (found.size() == kMaxFields) too_many_fields();
    found.push_back(map_entry(data, reader.span()));
  }
  return found;
}

TensorParts tensor_parts(const uint8_t* data, Span span) {
  TensorParts parts;
  for (Reader reader(data, span); reader.next();) {
    if (reader.is_number(1)) {
      parts.dtype = static_cast<int64_t>(reader.number);
    } else if (reader.is_bytes(2)) {
      parts.shape.clear();
      for (Reader shape(data, reader.span()); shape.next();) {
        if (shape.is_number(3) && shape.number) parts.unknown_rank = true;
        if (!shape.is_bytes(2)) continue;
        if (parts.shape.size() == kMaxDims)
          throw std::invalid_argument("a tensor must have at most 64 dimensions, got more");
        int64_t length = 0;
        for (Reader dim(data, shape.span()); dim.next();)
          if (dim.is_number(1)) length = static_cast<int64_t>(dim.number);
        parts.shape.push_back(length);
      }
    } else if (reader.is_bytes(4)) {
      parts.content = reader.span();
    } else if (reader.field >= 5 && reader.field <= 17 && reader.field != kStrings) {
      parts.unpacked |= reader.type != wire::bytes || parts.lists.size() == kMaxLists;
      if (parts.unpacked) continue;
      parts.lists.push_back(reader.span());
      parts.list_fields.push_back(reader.field);
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
  for (Reader reader(data, span); reader.next();) {
    if (reader.field != field) continue;
    const auto [begin, size] = reader.type == wire::varint ? Span{} : reader.span();
    const uint8_t* from = data + begin;
    if (width && reader.type == wire::varint) throw std::invalid_argument("numbers of this type must not be varints");
    if (width && size % width) {
      throw std::invalid_argument("the bytes of a list must be a multiple of " + std::to_string(width) + ", got " +
                                  std::to_string(size));
    }
    if (width) {
      room(size / width);
      append(from, size);
    } else if (reader.type == wire::varint) {
      room(1);
      append(&reader.number, 8);
    } else if (reader.type == wire::bytes) {
      const int64_t more = varint_count(from, size);
      if (more < 0) throw std::invalid_argument("a packed list of integers is cut off");
      room(more);
      wide.resize(static_cast<size_t>(more));
      varint_decode(from, size, wide.data(), more);
      append(wide.data(), 8 * more);
    } else {
      throw std::invalid_argument("an integer must have wire type 0 or 2, got " + std::to_string(reader.type));
    }
  }
  return out;
}

std::vector<Span> tensor_strings(const uint8_t* data, Span span, int64_t field, int64_t limit) {
  std::vector<Span> out;
  out.reserve(static_cast<size_t>(std::min(limit, span.size / 2)));  // a string takes at least two bytes
  for (Reader reader(data, span); reader.next();) {
    if (reader.field != field) continue;
    if (reader.type != wire::bytes)
      throw std::invalid_argument("a string must have wire type 2, got " + std::to_string(reader.type));
    if (static_cast<int64_t>(out.size()) == limit) throw std::invalid_argument(kTooMany + std::to_string(limit));
    out.push_back(reader.span());
  }
  return out;
}

}  // namespace shoal
