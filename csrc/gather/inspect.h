// Checks of a payload's data, and norms that do not depend on the number of threads.
#pragma once
#include <cstdint>

#include "core/isa.h"
#include "gather/codec.h"

namespace shoal::gather {

inline constexpr int64_t kNormBlock = 16384;  // values per float64 partial sum

struct Findings {
  bool value_over_bins = false;
  bool index_out_of_range = false;
  bool duplicate_index = false;
  bool nonfinite = false;
  bool too_large = false;
  double sum_of_squares = 0;  // of the dequantized values; meaningless when nonfinite
};

// All checks of one parameter in one pass over its bytes. `table` maps uint8 values; `bins` bounds them.
Findings inspect(const Encoded& param, Codec codec, int64_t chunks, int64_t k, int64_t totalk, int64_t bins,
                 double max_abs);

struct Sums {
  double squares = 0;
  double values = 0;
};
// float64 sums over blocks of kNormBlock values; the blocks' sums are added in index order.
Sums block_sums(const float* values, int64_t n);

}  // namespace shoal::gather

namespace shoal {

SHOAL_PER_ISA(
    // Bit 0: an index >= totalk; bit 1: an index twice in its chunk. `stamps` must hold totalk zeros at first; it may
    // be reused for higher chunk numbers.
    int check_chunks(const uint8_t* indices, int codec, int64_t first, int64_t last, int64_t k, int64_t totalk,
                     uint32_t* stamps, uint16_t* scratch);
    void sum_block(const float* values, int64_t n, double* squares, double* sum);
    // Adds how often each value occurs to counts[256]; values >= `bins` are counted in any entry >= `bins`.
    void count_values(const uint8_t* q, int64_t n, int bins, uint32_t* counts);
    // The largest |v|, as its bits (above 0x7f800000: there is a NaN).
    uint32_t max_abs_bits(const float* values, int64_t n);)

}  // namespace shoal
