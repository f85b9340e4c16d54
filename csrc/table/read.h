// The inner loops of reading, for each instruction set.
#pragma once
#include <cstdint>

#include "core/isa.h"

namespace shoal {

struct Bucket;

SHOAL_PER_ISA(
    // hash_id(ids[i] ^ salt) of each id.
    void hash_ids(const int64_t* ids, int64_t n, uint64_t salt, uint64_t* out);
    // The row number of each id in its home bucket; 0 if it is not there. Returns how many are not.
    int64_t probe_homes(const Bucket* const* homes, const int64_t* ids, int64_t n, uint32_t* numbers);
    // Rows of dim floats, one behind the other; a null row is zeros. With `stream` past the cache: out is aligned to 16
    // bytes then, and a fence has to follow.
    void copy_rows(const float* const* rows, int64_t n, int64_t dim, bool stream, float* out);)

}  // namespace shoal
