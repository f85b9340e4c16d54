// Protobuf's wire format: a reader that checks every length, and functions to write fields.
#pragma once
#include <cstdint>
#include <cstring>

namespace shoal::wire {

enum Type : uint32_t { varint = 0, fixed64 = 1, bytes = 2, group = 3, end_group = 4, fixed32 = 5 };

constexpr uint32_t tag(uint32_t field, Type type) { return field << 3 | type; }

constexpr size_t varint_bytes(uint64_t v) {
  size_t n = 1;
  for (; v >= 128; v >>= 7) ++n;
  return n;
}

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

}  // namespace shoal::wire
