// Protobuf's wire format: readers that check every length, and functions to write fields.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace shoal::wire {

enum Type : uint32_t { varint = 0, fixed64 = 1, bytes = 2, group = 3, end_group = 4, fixed32 = 5 };

constexpr uint32_t tag(uint32_t field, Type type) { return field << 3 | type; }

constexpr size_t varint_bytes(uint64_t v) { return (static_cast<size_t>(std::bit_width(v | 1)) + 6) / 7; }

inline char* put_varint(uint64_t v, char* out) {
  for (; v >= 128; v >>= 7) *out++ = static_cast<char>(v | 128);
  *out++ = static_cast<char>(v);
  return out;
}

// A message that is being read. Each function returns false for malformed bytes and never reads past the end.
struct Reader {
  const uint8_t* p;
  const uint8_t* end;

  bool done() const { return p == end; }
  size_t left() const { return end - p; }

  bool number(uint64_t* v) {
    *v = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      if (p == end) return false;
      const uint8_t byte = *p++;
      *v |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if (byte < 128) return true;
    }
    return false;
  }

  bool field(uint32_t* tag_out) {
    uint64_t v;
    if (!number(&v) || v > 0xFFFFFFFFu || v >> 3 == 0 || (v & 7) > fixed32) return false;
    *tag_out = static_cast<uint32_t>(v);
    return true;
  }

  bool span(Reader* out) {
    uint64_t n;
    if (!number(&n) || n > left()) return false;
    *out = {p, p + n};
    p += n;
    return true;
  }

  template <class T>
  bool fixed(T* v) {
    if (left() < sizeof(T)) return false;
    std::memcpy(v, p, sizeof(T));
    p += sizeof(T);
    return true;
  }

  // Skips the value of an unknown field.
  bool skip(uint32_t field_tag, int depth = 0) {
    uint64_t v;
    Reader inner{};
    switch (field_tag & 7) {
      case varint:
        return number(&v);
      case fixed64:
        return fixed(&v);
      case bytes:
        return span(&inner);
      case fixed32: {
        uint32_t w;
        return fixed(&w);
      }
      case group:
        for (uint32_t inside; depth < 64;) {
          if (!field(&inside)) return false;
          if ((inside & 7) == end_group) return inside >> 3 == field_tag >> 3;
          if (!skip(inside, depth + 1)) return false;
        }
        return false;
      default:
        return false;
    }
  }
};

// The fields of a message one after another, for callers that throw. `Fail` is called with the reason and must throw:
// the caller knows the message's name.
template <class Fail>
class Fields {
 public:
  explicit Fields(std::string_view message)
      : rest_{reinterpret_cast<const uint8_t*>(message.data()),
              reinterpret_cast<const uint8_t*>(message.data()) + message.size()} {}

  bool done() const { return rest_.done(); }

  // Moves to the next field; false at the end.
  bool next() {
    if (done()) return false;
    const uint64_t key = number_left();
    if (key >> 32 || key >> 3 == 0) fail("has field number " + std::to_string(key >> 3));
    field = static_cast<int>(key >> 3);
    type = static_cast<int>(key & 7);
    switch (type) {
      case varint:
        number = number_left();
        return true;
      case fixed64:
        take(8);
        return true;
      case Type::bytes:
        take(number_left());
        return true;
      case fixed32:
        take(4);
        return true;
      default:
        fail("has a field of wire type " + std::to_string(type) + "; only 0, 1, 2 and 5 are supported");
    }
  }

  uint64_t number_left() {
    uint64_t v;
    if (!rest_.number(&v)) fail(done() ? "is cut off inside a number" : "holds a number of more than 64 bits");
    return v;
  }

  int field = 0, type = 0;
  uint64_t number = 0;
  std::string_view bytes;

 private:
  void take(uint64_t size) {
    if (size > rest_.left())
      fail("is cut off: " + std::to_string(size) + " bytes promised, " + std::to_string(rest_.left()) + " left");
    bytes = {reinterpret_cast<const char*>(rest_.p), static_cast<size_t>(size)};
    rest_.p += size;
  }
  [[noreturn]] static void fail(const std::string& what) {
    Fail{}(what);
    __builtin_unreachable();
  }

  Reader rest_;
};

}  // namespace shoal::wire
