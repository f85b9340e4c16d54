// Bags: runs of rows that are pooled into one vector, or into a short sequence of vectors.
#pragma once
#include <cstdint>
#include <vector>

#include "core/isa.h"
#include "table/table.h"

namespace shoal {

enum class Pool : int32_t { sum, mean, firstn, sqrtn, max };  // the order is shared with src/shoal/table/protocol.py

// Bag b is rows[offsets[b] .. offsets[b + 1]); each row is multiplied by its weight first, where there are weights.
struct Bags {
  const int64_t* offsets;  // [bags + 1]
  int64_t bags;
  int64_t dim;
  Pool pool;
  int64_t length;        // firstn: vectors of a bag's output
  const float* weights;  // [rows] or null

  int64_t stride = 0;   // from one bag's output to the next one's; 0: width()
  bool padded = false;  // a null row stands for none, and a mean does not count it

  // Throws std::invalid_argument unless the offsets rise from 0 to `rows` and the sizes make sense.
  void check(int64_t rows) const;
  // Floats of one bag's output.
  int64_t width() const { return pool == Pool::firstn ? length * dim : dim; }
  int64_t step() const { return stride ? stride : width(); }
};

// The bag that rows are being added to, of those before `end`; `kept` of its rows were not null.
struct BagCursor {
  int64_t bag;
  int64_t end;
  int64_t kept = 0;
};

void pool(const Bags& bags, const float* rows, float* out);
// Looks the ids up (with `create`, makes rows for unknown ones) and pools, a piece at a time, so that the rows are
// still in the cache when they are summed.
void lookup_pool(Table& table, const int64_t* ids, const Bags& bags, bool create, Stamp time, float* out);
// grad_rows and grad_weights may be null; `rows` is read for the latter and for the maximum, whose gradient goes to the
// first row that has it.
void pool_gradient(const Bags& bags, const float* grad, const float* rows, float* grad_rows, float* grad_weights);

// Sums the rows of equal ids, in input order. Writes the distinct ids, by first occurrence, and their sums to out_ids
// and out_rows, which have room for n of each; returns how many there are.
int64_t sum_by_id(const int64_t* ids, int64_t n, const float* rows, int64_t dim, int64_t* out_ids, float* out_rows);

SHOAL_PER_ISA(  // Adds rows first .. first + n of the batch, which come in order, to the sum, mean or sqrtn of their
                // bags; writes the bags that end there and what it has of the next one.
    void pool_some(const Bags& bags, BagCursor& at, int64_t first, int64_t n, const float* const* rows, float* out);
    void pool_bags(const Bags& bags, int64_t begin, int64_t end, const float* rows, float* out);
    void pool_bags_gradient(const Bags& bags, int64_t begin, int64_t end, const float* grad, const float* rows,
                            float* grad_rows, float* grad_weights);
    void add_to(const float* from, int64_t n, float* to);)

}  // namespace shoal
