// The producer's side: the k largest magnitudes of every chunk, with what was left over from earlier rounds.
#pragma once
#include <cstdint>

#include "core/isa.h"

namespace shoal::gather {

struct ChunkGrid {
  int64_t rows, across, height, width;  // rows: grid rows; the parameter is (rows*height, across*width), contiguous
  int64_t columns() const { return across * width; }
};

// For each chunk of c = gradient + decay * memory: the k positions with the largest |c|, ascending; of equal ones the
// lower position. `memory` may be null; otherwise it becomes c. Throws std::invalid_argument when c is not finite.
void topk_chunks(const float* gradient, float* memory, float decay, const ChunkGrid& grid, int64_t k, int32_t* indices,
                 float* values);

// memory[position of each index] -= sent: what was sent is no longer owed.
void subtract_sent(float* memory, const ChunkGrid& grid, int64_t k, const int32_t* indices, const float* sent);

// Chunk values to the dense parameter, which must be zero where nothing is sent.
void scatter_chunks(float* dense, const ChunkGrid& grid, int64_t k, const int64_t* indices, const float* values);

}  // namespace shoal::gather

namespace shoal {

SHOAL_PER_ISA(
    // Up to `capacity` positions i in [begin, end) with keys[i] > threshold, appended as keys[i] << 32 | ~i. Stops
    // early when full; returns the first position not looked at, and the new length in *length.
    int64_t collect_above(const uint32_t* keys, int64_t begin, int64_t end, uint32_t threshold, uint64_t* out,
                          int64_t capacity, int64_t* length);
    // A row of a chunk: c = g + decay * m into `values`, into m, and |c| as bits into `keys`. memory may be null.
    // Returns the largest key.
    uint32_t fold_row(const float* gradient, float* memory, float decay, int64_t n, float* values, uint32_t* keys);)

}  // namespace shoal
