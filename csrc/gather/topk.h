// The sender's side: the k largest magnitudes of every chunk, including the remainder of earlier rounds.
#pragma once
#include <cstdint>

#include "core/isa.h"

namespace shoal::gather {

struct ChunkGrid {
  int64_t rows, across, height, width;  // rows: grid rows; the parameter is (rows*height, across*width), contiguous
  int64_t columns() const { return across * width; }
};

// For each chunk of c = gradient + decay * memory: finds the k positions with the largest |c|, ascending; of equal ones
// the lower positions. `memory` may be null; otherwise it becomes c. Throws std::invalid_argument if c is not finite.
void topk_chunks(const float* gradient, float* memory, float decay, const ChunkGrid& grid, int64_t k, int32_t* indices,
                 float* values);

// memory[position of each index] -= sent, which is no longer owed.
void subtract_sent(float* memory, const ChunkGrid& grid, int64_t k, const int32_t* indices, const float* sent);

// Writes the chunks' values to the dense parameter; positions without a value are left as they are.
void scatter_chunks(float* dense, const ChunkGrid& grid, int64_t k, const int64_t* indices, const float* values);

}  // namespace shoal::gather

namespace shoal {

SHOAL_PER_ISA(
    // Appends the positions i in [begin, end) with keys[i] > threshold as keys[i] << 32 | ~i, until `out` has
    // `capacity` elements. Returns the first position that was not read, and the new length in *length.
    int64_t collect_above(const uint32_t* keys, int64_t begin, int64_t end, uint32_t threshold, uint64_t* out,
                          int64_t capacity, int64_t* length);
    // For a row of a chunk: writes c = g + decay * m to `values` and m, and |c| as bits to `keys`. `memory` may be
    // null. Returns the largest key.
    uint32_t fold_row(const float* gradient, float* memory, float decay, int64_t n, float* values, uint32_t* keys);)

}  // namespace shoal
