#include "serving/varint.h"

#include <bit>
#include <stdexcept>

namespace shoal {
namespace {

int64_t size_of(uint64_t v) { return v ? (std::bit_width(v) + 6) / 7 : 1; }

}  // namespace

int64_t varint_size(const int64_t* values, int64_t n) {
  int64_t total = 0;
  for (int64_t i = 0; i < n; ++i) total += size_of(static_cast<uint64_t>(values[i]));
  return total;
}

int64_t varint_encode(const int64_t* values, int64_t n, uint8_t* out) {
  uint8_t* p = out;
  for (int64_t i = 0; i < n; ++i) {
    auto v = static_cast<uint64_t>(values[i]);
    while (v >= 0x80) {
      *p++ = static_cast<uint8_t>(v) | 0x80;
      v >>= 7;
    }
    *p++ = static_cast<uint8_t>(v);
  }
  return p - out;
}

int64_t varint_count(const uint8_t* data, int64_t bytes) {
  if (bytes && (data[bytes - 1] & 0x80)) return -1;
  int64_t n = 0;
  for (int64_t i = 0; i < bytes; ++i) n += !(data[i] & 0x80);
  return n;
}

void varint_decode(const uint8_t* data, int64_t bytes, int64_t* out, int64_t n) {
  const uint8_t* p = data;
  const uint8_t* const end = data + bytes;
  for (int64_t i = 0; i < n; ++i) {
    uint64_t v = 0;
    for (int shift = 0;; shift += 7) {
      if (shift > 63 || p == end) throw std::invalid_argument("a varint is cut off or longer than ten bytes");
      const uint8_t byte = *p++;
      v |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (!(byte & 0x80)) break;
    }
    out[i] = static_cast<int64_t>(v);
  }
}

}  // namespace shoal
