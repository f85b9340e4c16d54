// CRC-32C (Castagnoli), by the CPU's instruction if it has one, and its mask in the TFRecord format.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shoal {

uint32_t crc32c(const void* data, size_t n);
// The CRC of bytes whose CRC is `crc`, followed by `n` more bytes; the CRC of no bytes is 0.
uint32_t crc32c_extend(uint32_t crc, const void* data, size_t n);

// Masks a checksum that is stored next to its data: a CRC of data that contains CRCs would be weak.
inline uint32_t mask_crc(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u; }

// The portable implementation, for CPUs without the instruction and for tests.
uint32_t crc32c_portable(const void* data, size_t n, uint32_t crc = 0);

}  // namespace shoal
