// Raw Snappy blocks: a greedy compressor, and a decompressor that checks everything it reads.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shoal {

// The most bytes that `n` bytes can become, including the header.
constexpr size_t snappy_bound(size_t n) { return 32 + n + n / 6; }
// The most bytes that `n` compressed bytes can become: 64 for each 3-byte copy.
constexpr uint64_t snappy_expanded_bound(uint64_t n) { return n / 3 * 64 + 64; }

// Writes at most snappy_bound(n) bytes to `out` and returns how many. n < 2^32.
size_t snappy_compress(const char* data, size_t n, char* out);

// The length that a block claims to have when decompressed, no more than snappy_expanded_bound(n). Throws DataError.
uint64_t snappy_length(const char* data, size_t n);
// Fills exactly the `length` bytes that snappy_length() returned. Throws DataError.
void snappy_decompress(const char* data, size_t n, char* out, uint64_t length);

}  // namespace shoal
