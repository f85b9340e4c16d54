// Packed protobuf varints to and from int64 arrays.
#pragma once
#include <cstdint>

namespace shoal {

// The number of bytes that the values take.
int64_t varint_size(const int64_t* values, int64_t n);

// Writes the values to `out`, which holds at least varint_size(values, n) bytes; returns the bytes written.
int64_t varint_encode(const int64_t* values, int64_t n, uint8_t* out);

// The number of varints in `data`, or -1 if the last one is cut off.
int64_t varint_count(const uint8_t* data, int64_t bytes);

// Reads exactly n varints, which varint_count found; throws std::invalid_argument for one of more than ten bytes.
void varint_decode(const uint8_t* data, int64_t bytes, int64_t* out, int64_t n);

}  // namespace shoal
