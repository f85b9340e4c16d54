#include "io/snappy.h"

#include <bit>
#include <cstring>

#include "io/error.h"

namespace shoal {

namespace {

constexpr size_t kFragment = size_t{1} << 16;  // offsets fit 16 bits inside a fragment
constexpr int kHashBits = 14;

uint32_t load32(const char* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

uint64_t load64(const char* p) {
  uint64_t v;
  std::memcpy(&v, p, 8);
  return v;
}

uint32_t hash32(uint32_t v) { return (v * 0x1E35A7BDu) >> (32 - kHashBits); }

char* emit_literal(const char* from, size_t n, char* out) {
  const size_t code = n - 1;
  if (code < 60) {
    *out++ = static_cast<char>(code << 2);
  } else if (code < 256) {
    *out++ = static_cast<char>(60 << 2);
    *out++ = static_cast<char>(code);
  } else {  // a fragment holds at most 65536 bytes
    *out++ = static_cast<char>(61 << 2);
    *out++ = static_cast<char>(code);
    *out++ = static_cast<char>(code >> 8);
  }
  std::memcpy(out, from, n);
  return out + n;
}

char* emit_copy(size_t offset, size_t n, char* out) {
  const auto wide = [&](size_t length) {
    *out++ = static_cast<char>((length - 1) << 2 | 2);
    *out++ = static_cast<char>(offset);
    *out++ = static_cast<char>(offset >> 8);
  };
  for (; n >= 68; n -= 64) wide(64);
  if (n > 64) {  // leaves at least 4, so that the rest may take the short form
    wide(60);
    n -= 60;
  }
  if (n >= 12 || offset >= 2048) {
    wide(n);
  } else {
    *out++ = static_cast<char>(offset >> 8 << 5 | (n - 4) << 2 | 1);
    *out++ = static_cast<char>(offset);
  }
  return out;
}

size_t match_length(const char* a, const char* b, const char* end) {  // a < b; b runs up to end
  const char* start = b;
  for (; end - b >= 8; a += 8, b += 8) {
    const uint64_t difference = load64(a) ^ load64(b);
    if (difference) return b - start + (std::countr_zero(difference) >> 3);
  }
  for (; b < end && *a == *b; ++a, ++b) {
  }
  return b - start;
}

char* compress_fragment(const char* data, size_t n, char* out) {
  uint16_t seen[1 << kHashBits] = {};
  const char* const end = data + n;
  const char* literal = data;
  if (n >= 16) {
    const char* const limit = end - 8;
    const char* p = data + 1;
    uint32_t misses = 32;  // after 32 misses look at every second byte, after 64 at every third, ...
    while (p < limit) {
      const uint32_t word = load32(p);
      uint16_t& place = seen[hash32(word)];
      const char* candidate = data + place;
      place = static_cast<uint16_t>(p - data);
      if (load32(candidate) != word || candidate >= p) {
        p += misses++ >> 5;
        continue;
      }
      if (p > literal) out = emit_literal(literal, p - literal, out);
      const size_t matched = 4 + match_length(candidate + 4, p + 4, end);
      out = emit_copy(p - candidate, matched, out);
      p += matched;
      literal = p;
      misses = 32;
      if (p < limit) seen[hash32(load32(p - 1))] = static_cast<uint16_t>(p - 1 - data);
    }
  }
  if (literal < end) out = emit_literal(literal, end - literal, out);
  return out;
}

size_t read_length(const char* data, size_t n, uint64_t* length) {
  *length = 0;
  for (size_t i = 0; i < n && i < 5; ++i) {
    const uint8_t byte = static_cast<uint8_t>(data[i]);
    *length |= static_cast<uint64_t>(byte & 0x7F) << (7 * i);
    if (byte < 128) {
      if (*length > 0xFFFFFFFFu) break;
      return i + 1;
    }
  }
  throw DataError("a Snappy block does not begin with a valid length");
}

}  // namespace

size_t snappy_compress(const char* data, size_t n, char* out) {
  char* const start = out;
  uint64_t rest = n;
  for (; rest >= 128; rest >>= 7) *out++ = static_cast<char>(rest | 128);
  *out++ = static_cast<char>(rest);
  for (size_t done = 0; done < n; done += kFragment) {
    out = compress_fragment(data + done, n - done < kFragment ? n - done : kFragment, out);
  }
  return out - start;
}

uint64_t snappy_length(const char* data, size_t n) {
  uint64_t length;
  read_length(data, n, &length);
  if (length > snappy_expanded_bound(n)) throw DataError("a Snappy block claims more bytes than it can hold");
  return length;
}

void snappy_decompress(const char* data, size_t n, char* out, uint64_t length) {
  uint64_t claimed;
  const uint8_t* p = reinterpret_cast<const uint8_t*>(data) + read_length(data, n, &claimed);
  const uint8_t* const end = reinterpret_cast<const uint8_t*>(data) + n;
  char* const start = out;
  char* const limit = out + length;
  const auto corrupt = [] { return DataError("a Snappy block is corrupt"); };
  if (claimed != length) throw corrupt();
  while (p < end) {
    const uint8_t tag = *p++;
    size_t size, offset;
    if ((tag & 3) == 0) {
      size = tag >> 2;
      if (size >= 60) {
        const int bytes = static_cast<int>(size) - 59;
        if (end - p < bytes) throw corrupt();
        size = 0;
        for (int i = 0; i < bytes; ++i) size |= static_cast<size_t>(*p++) << (8 * i);
      }
      ++size;
      if (size > static_cast<size_t>(end - p) || size > static_cast<size_t>(limit - out)) throw corrupt();
      if (size <= 16 && end - p >= 16 && limit - out >= 16) {
        std::memcpy(out, p, 16);
      } else {
        std::memcpy(out, p, size);
      }
      p += size;
      out += size;
      continue;
    }
    if ((tag & 3) == 1) {
      if (end - p < 1) throw corrupt();
      size = 4 + ((tag >> 2) & 7);
      offset = static_cast<size_t>(tag >> 5) << 8 | p[0];
      p += 1;
    } else if ((tag & 3) == 2) {
      if (end - p < 2) throw corrupt();
      size = 1 + (tag >> 2);
      offset = p[0] | static_cast<size_t>(p[1]) << 8;
      p += 2;
    } else {
      if (end - p < 4) throw corrupt();
      size = 1 + (tag >> 2);
      offset = load32(reinterpret_cast<const char*>(p));
      p += 4;
    }
    if (offset == 0 || offset > static_cast<size_t>(out - start) || size > static_cast<size_t>(limit - out)) {
      throw corrupt();
    }
    const char* from = out - offset;
    if (offset >= 8 && static_cast<size_t>(limit - out) >= size + 8) {  // copies words, so it may write past `size`
      for (size_t i = 0; i < size; i += 8) std::memcpy(out + i, from + i, 8);
    } else {
      for (size_t i = 0; i < size; ++i) out[i] = from[i];
    }
    out += size;
  }
  if (out != limit) throw corrupt();
}

}  // namespace shoal
