// The size and checksum that a manifest keeps of a file, to detect a changed file.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "io/crc32c.h"

namespace shoal {

struct FileDigest {
  int64_t bytes = 0;
  uint32_t crc = 0;  // CRC-32C of all of them

  void add(const void* data, size_t n) {
    bytes += static_cast<int64_t>(n);
    crc = crc32c_extend(crc, data, n);
  }
};

// Reads the file. Throws std::system_error.
FileDigest digest_file(const std::string& path);

}  // namespace shoal
