// The inner loops of reading, for each instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/isa.h"

namespace shoal {

struct Bucket;
struct RowPlaces;

constexpr int kRound = 64;  // ids that go through a stage of reading together

// What is known of a round of ids.
struct Round {
  uint64_t hash[kRound];
  Bucket* home[kRound];
  char* row[kRound];     // null: there is none
  uint8_t open[kRound];  // the ids to probe on for
  int64_t opens;
  int64_t unknown;  // ids that are known to have no row
};

// Where the homes of ids are: the index of each stripe, `stride` bytes from one to the next.
struct Homes {
  const uint8_t* stripe_of_cell;
  const char* first_index;
  size_t stride;
};

SHOAL_PER_ISA(
    // Hashes n ids, addresses their home buckets and asks for them.
    void start_round(const Homes& homes, const int64_t* ids, int64_t n, Round& round);
    // Looks into the home buckets and asks for so many bytes of the rows, and for the bucket behind the home of an id
    // that is not there.
    void probe_round(const Homes& homes, const RowPlaces& rows, const int64_t* ids, int64_t n, int32_t row_bytes,
                     Round& round);
    // Probes on for the ids that were not at home.
    void resolve_round(const Homes& homes, const RowPlaces& rows, const int64_t* ids, int32_t row_bytes, Round& round);
    // Rows of dim floats, one behind the other; a null row is zeros. With `stream` past the cache: out is aligned to 16
    // bytes then, and a fence has to follow.
    void copy_rows(const float* const* rows, int64_t n, int64_t dim, bool stream, float* out);)

}  // namespace shoal
