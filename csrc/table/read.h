// The inner loops of reading, for each instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/isa.h"

namespace shoal {

struct Bucket;
struct RowPlaces;

constexpr int kRound = 64;  // ids that pass each stage of reading together

// The state of a round of ids.
struct Round {
  uint64_t hash[kRound];
  Bucket* home[kRound];
  char* row[kRound];     // null: there is none
  uint8_t open[kRound];  // the ids whose probes must continue after their home
  int64_t opens;
  int64_t unknown;  // ids that are known to have no row
};

// The indexes of the stripes, `stride` bytes apart.
struct Homes {
  const uint8_t* stripe_of_cell;
  const char* first_index;
  size_t stride;
};

SHOAL_PER_ISA(
    // Hashes n ids and prefetches their home buckets.
    void start_round(const Homes& homes, const int64_t* ids, int64_t n, Round& round);
    // Looks into the home buckets; prefetches row_bytes of the rows found, and for other ids the bucket after the home.
    void probe_round(const Homes& homes, const RowPlaces& rows, const int64_t* ids, int64_t n, int32_t row_bytes,
                     Round& round);
    // Continues the probes for the ids that were not at home.
    void resolve_round(const Homes& homes, const RowPlaces& rows, const int64_t* ids, int32_t row_bytes, Round& round);
    // Copies rows of dim floats one after another; a null row becomes zeros. `stream` writes past the cache: then `out`
    // must be aligned to 16 bytes and a fence must follow.
    void copy_rows(const float* const* rows, int64_t n, int64_t dim, bool stream, float* out);)

}  // namespace shoal
