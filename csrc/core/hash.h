// The fixed hash of an id: the same in every process, run and version, since files depend on it.
#pragma once
#include <cstdint>

namespace shoal {

[[gnu::always_inline]] inline uint64_t hash_id(uint64_t x) {
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ULL;
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ULL;
  x ^= x >> 32;
  return x;
}

}  // namespace shoal
