// How often any two peers chose the same positions: the exact matrix of intersection sizes.
#pragma once
#include <cstdint>
#include <span>

#include "core/isa.h"
#include "gather/codec.h"

namespace shoal::gather {

// counts[u * P + v] += sum over `chunks` chunks of |indices_u ∩ indices_v|, for P = peers.size(). A null pointer is a
// peer without this parameter. Bytes begin at the first chunk. Memory: (totalk + P) * P / 8 * threads, about.
void overlap(std::span<const uint8_t* const> peers, Codec codec, int64_t chunks, int64_t k, int64_t totalk,
             int64_t* counts);

}  // namespace shoal::gather

namespace shoal {

SHOAL_PER_ISA(
    // counts[bit] += 1 for every set bit of every masks[indices[i] * words + word].
    void count_bits(const uint64_t* masks, int64_t words, int64_t word, const uint16_t* indices, int64_t k,
                    uint32_t* counts);)

}  // namespace shoal
