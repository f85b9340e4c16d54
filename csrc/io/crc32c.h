// CRC-32C (Castagnoli), by the CPU's own instruction where it has one, and its mask of the TFRecord format.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shoal {

uint32_t crc32c(const void* data, size_t n);
// The CRC of bytes whose CRC is `crc` followed by `n` more; that of no bytes is 0.
uint32_t crc32c_extend(uint32_t crc, const void* data, size_t n);

// A checksum stored next to the data that it covers is masked, so that the CRC of both together is not degenerate.
inline uint32_t mask_crc(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u; }

// The portable way, always there; for tests and for CPUs without the instruction.
uint32_t crc32c_portable(const void* data, size_t n, uint32_t crc = 0);

}  // namespace shoal
