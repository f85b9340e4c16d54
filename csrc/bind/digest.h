// Digests of files as Python gets them: bytes and CRC-32C.
#pragma once
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "io/checkpoint.h"
#include "io/digest.h"

namespace shoal::bind {

using Digest = std::pair<int64_t, uint32_t>;
inline Digest as_pair(const FileDigest& digest) { return {digest.bytes, digest.crc}; }

// For each file of a save: its rows per source, and its digest.
inline std::vector<std::pair<std::vector<int64_t>, Digest>> as_pairs(const std::vector<SavedShard>& saved) {
  std::vector<std::pair<std::vector<int64_t>, Digest>> out;
  for (const SavedShard& shard : saved) out.emplace_back(shard.rows, as_pair(shard.digest));
  return out;
}

}  // namespace shoal::bind
