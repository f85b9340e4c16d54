// 12-bit indices and their values: the contents of a peer's payload, in chunks of k entries.
#pragma once
#include <cstdint>

#include "core/isa.h"

namespace shoal::gather {

enum class Codec : int { packed12, i32 };
enum class Values : int { u8, f32, f16, bf16 };  // u8 indexes a table of 256 float32

// One parameter of one payload, as it is in its file. `table` is used with Values::u8 only.
struct Encoded {
  const uint8_t* indices;
  const uint8_t* values;
  const float* table;
  Values kind;
};

inline int64_t index_bytes(Codec codec, int64_t n) { return codec == Codec::packed12 ? n / 2 * 3 : n * 4; }
inline int64_t value_bytes(Values kind) { return kind == Values::u8 ? 1 : kind == Values::f32 ? 4 : 2; }

}  // namespace shoal::gather

namespace shoal {

SHOAL_PER_ISA(
    // n is even; reads exactly 3n/2 bytes.
    void unpack12(const uint8_t* packed, int64_t n, uint16_t* out);
    void unpack12_wide(const uint8_t* packed, int64_t n, int64_t* out);
    // False if a value is outside 0..4095; then the output is meaningless.
    bool pack12(const int64_t* indices, int64_t n, uint8_t* out);
    // `table` has 256 entries; every q must be below `bins`. A table of few bins is kept in registers.
    void look_up(const uint8_t* q, int64_t n, const float* table, int bins, float* out);
    // q = clamp(round_half_even(z / scale + offset), 0, bins - 1). Adds each z to the sum of its bin, and counts it.
    void quantize(const float* z, int64_t n, float scale, float offset, int bins, uint8_t* q, double* sums,
                  int64_t* counts);
    // Converts values of any kind except u8 to float32; the bytes may have any alignment.
    void widen(const uint8_t* values, int64_t n, int kind, float* out);)

}  // namespace shoal
