#include "serving/varint.h"

#include <stdexcept>

#include "core/wire.h"

namespace shoal {

int64_t varint_size(const int64_t* values, int64_t n) {
  size_t total = 0;
  for (int64_t i = 0; i < n; ++i) total += wire::varint_bytes(static_cast<uint64_t>(values[i]));
  return static_cast<int64_t>(total);
}

int64_t varint_encode(const int64_t* values, int64_t n, uint8_t* out) {
  char* const begin = reinterpret_cast<char*>(out);
  char* at = begin;
  for (int64_t i = 0; i < n; ++i) at = wire::put_varint(static_cast<uint64_t>(values[i]), at);
  return at - begin;
}

int64_t varint_count(const uint8_t* data, int64_t bytes) {
  if (bytes && (data[bytes - 1] & 0x80)) return -1;
  int64_t n = 0;
  for (int64_t i = 0; i < bytes; ++i) n += !(data[i] & 0x80);
  return n;
}

void varint_decode(const uint8_t* data, int64_t bytes, int64_t* out, int64_t n) {
  wire::Reader from{data, data + bytes};
  for (int64_t i = 0; i < n; ++i) {
    uint64_t v;
    if (!from.number(&v)) throw std::invalid_argument("a varint is cut off or longer than ten bytes");
    out[i] = static_cast<int64_t>(v);
  }
}

}  // namespace shoal
