// The CRC-32 of zlib and of the TPK1 format, at memory speed on CPUs with carry-less multiplication.
// zlib's crc32 takes four to five times as long for payloads of 64 KiB and more.
#pragma once
#include <cstdint>

namespace shoal {

uint32_t crc32(const uint8_t* data, int64_t n, uint32_t crc = 0);

}  // namespace shoal
