// The inner loop of the outer update: reduces peers' sparse chunks, in canonical order, to the dense parameter.
#pragma once
#include <cstdint>
#include <span>

#include "core/isa.h"
#include "gather/codec.h"

namespace shoal::gather {

enum class Reduction : int { count_mean, peer_mean, sum };

// Where chunks are in the parameter, viewed as (rows, columns): `across` chunks of `height` x `width` per grid row.
// Only rows [row0, row1) and columns [column0, column1) are written, to `dense`, whose rows have `stride` elements.
struct Grid {
  int64_t across, height, width;
  int64_t row0, row1, column0, column1;
  float* dense;
  int64_t stride;
};

struct Tile {
  const int64_t* chunks;  // the numbers of its chunks in the parameter's grid
  int64_t n;
  int64_t k, totalk;
  Codec codec;
  float* sum;      // [n, totalk]; both null if one call does everything: then each thread uses scratch memory
  int32_t* count;  // [n, totalk]
  bool first, last;
  Reduction reduction;
  int64_t peers;  // of the complete update: the divisor of peer_mean
};

// Adds factor * value of each peer, in the given order, to every chunk of the tile: in float32, with one product and
// one addition per position, never fused, and with any number of threads in the order of the peers. With `last` it
// applies the reduction and, with `grid.dense`, writes the chunks to the parameter; otherwise they stay in `sum`.
// Peers' bytes begin at the tile's first chunk. Throws std::invalid_argument for an index outside the chunk.
void reduce(const Tile& tile, const Grid& grid, std::span<const Encoded> peers, std::span<const float> factors);

}  // namespace shoal::gather

namespace shoal {

SHOAL_PER_ISA(
    // sum[index] += value, count[index] += 1 for k packed or int32 indices. False: an index was outside.
    bool add_chunk(const uint8_t* indices, int codec, int64_t k, int64_t totalk, const float* values, float* sum,
                   int32_t* count, uint16_t* scratch);
    // The same for uint8 values, with a table that already includes the factor.
    bool add_chunk_u8(const uint8_t* indices, int codec, int64_t k, int64_t totalk, const uint8_t* q,
                      const float* table, float* sum, int32_t* count, uint16_t* scratch);
    void scale(float* values, int64_t n, float factor);
    void divide(float* sum, const int32_t* count, int64_t n, int reduction, float peers);)

}  // namespace shoal
