// Bags: runs of rows that are pooled into one vector.
#pragma once
#include <cstdint>
#include <vector>

#include "core/isa.h"
#include "table/rows/pooled.h"

namespace shoal {

// Bag b is rows[offsets[b] .. offsets[b + 1]); each row is first multiplied by its weight, if there are weights.
struct Bags {
  const int64_t* offsets;
  int64_t dim;
  Pool pool;
  const float* weights;      // [rows] or null
  int64_t stride;            // floats from one bag's output to the next
  bool padded;               // a null row is padding, which a mean does not count
  int64_t length = 1;        // rows that firstn puts side by side
  uint8_t* marks = nullptr;  // for max, or null: gets the marks of the rows that are not null
};

// The bag to which rows are being added, up to bag `end`; `kept` of its rows so far were not null.
struct BagCursor {
  int64_t bag;
  int64_t end;
  int64_t kept = 0;
  // For a bag whose rows get marks and come in several parts, [dim] each:
  int64_t* raised = nullptr;  // the first row of the part that last raised each maximum
  float* before = nullptr;    // the maxima before the current part
};

// Memory for a cursor's `raised` and `before`.
class MarkRoom {
 public:
  explicit MarkRoom(const Bags& bags)
      : raised_(static_cast<size_t>(bags.marks ? bags.dim : 0)),
        before_(static_cast<size_t>(bags.marks ? bags.dim : 0)) {}
  BagCursor cursor(int64_t begin, int64_t end) { return {begin, end, 0, raised_.data(), before_.data()}; }

 private:
  std::vector<int64_t> raised_;
  std::vector<float> before_;
};

// Throws std::invalid_argument unless offsets [bags + 1] rise from 0 to `rows` without falling.
void check_offsets(const int64_t* offsets, int64_t bags, int64_t rows);

// Sums the rows of equal ids, in input order. Writes the distinct ids, by first occurrence, and their sums to out_ids
// and out_rows, which have room for n of each; returns how many there are.
int64_t sum_by_id(const int64_t* ids, int64_t n, const float* rows, int64_t dim, int64_t* out_ids, float* out_rows);

SHOAL_PER_ISA(  // Adds rows [first, first + n) of the batch, which come in order, to their bags' outputs; finishes the
                // bags that end there.
    void pool_some(const Bags& bags, BagCursor& at, int64_t first, int64_t n, const float* const* rows, float* out);)

}  // namespace shoal
