// Gradients for the rows of tables: per row, or per bag without being expanded.
#pragma once
#include <cstdint>
#include <vector>

#include "core/isa.h"
#include "core/scratch.h"
#include "table/rows/pooled.h"
#include "table/table.h"

namespace shoal {

SHOAL_PER_ISA(
    // The largest magnitude, as the bits of a float: kInfiniteBits or more means infinity or NaN.
    uint32_t largest_bits(const float* x, int64_t n);
    // out = x * factor. A separate function, so that the product is rounded before it is added to a sum.
    void scaled(const float* x, float factor, int64_t n, float* out);
    // The same in marked columns, and zeros in the others.
    void scaled_marked(const float* x, float factor, const uint8_t* marks, int64_t n, float* out);)

// One gradient for each of n ids of a table, in order: at(i) times its factor, in the marked columns.
struct Gradients {
  const int64_t* ids = nullptr;
  int64_t n = 0;
  const float* rows = nullptr;  // at(i) is rows + i * stride, or each[i] if `each` is given
  int64_t stride = 0;
  const float* const* each = nullptr;
  const float* factors = nullptr;         // null: all are 1
  const uint8_t* const* marks = nullptr;  // null, or marks[i] null: all columns are marked
  const float* at(int64_t i) const { return each ? each[i] : rows + i * stride; }
  // The gradient of id i: in place if it is at(i), else in `out`.
  const float* value(int64_t i, int64_t dim, float* out) const {
    const uint8_t* marked = marks ? marks[i] : nullptr;
    if (!marked && !factors) return at(i);
    const float factor = factors ? factors[i] : 1.0f;
    if (marked) {
      SHOAL_DISPATCH(scaled_marked)(at(i), factor, marked, dim, out);
    } else {
      SHOAL_DISPATCH(scaled)(at(i), factor, dim, out);
    }
    return out;
  }
};

constexpr uint32_t kInfiniteBits = 0x7F800000;

// One table's gradients to apply.
struct Update {
  Table* table;
  Gradients gradients;
  const float* rates;  // one per segment
  int64_t global_step;
  Stamp time;
  bool dedup;
  BadGradient bad;
  bool clean = false;             // no gradient holds NaN or infinity
  int64_t skipped = 0;            // result: occurrences skipped for a bad gradient
  const float* scores = nullptr;  // one per id, if the table's policy uses scores
};

// Which table each feature of a batch belongs to, and where its bags' gradients are.
struct FeatureMap {
  std::vector<int32_t> tables;
  std::vector<Pool> combiners;
  std::vector<int64_t> columns;  // feature f of bag b has grad[b, columns[f] .. + length(f) * dim]
  int64_t width = 0;
  bool pads = false;
  int64_t padding = 0;                // an id that has neither row nor gradient
  std::vector<int64_t> lengths = {};  // rows that firstn puts side by side; empty: 1 for each feature
  int64_t length(size_t feature) const { return lengths.empty() ? 1 : lengths[feature]; }
};

// A gradient of a batch's rows, or with `offsets` of its pooled bags.
struct GradientPart {
  const FeatureMap* features;
  const int64_t* ids;  // [n], those of feature 0 first
  int64_t n;
  const int64_t* counts;   // [F]
  const float* grad;       // [n, dim] or [bags, width]
  int64_t stride;          // floats from one row of grad to the next
  const int64_t* offsets;  // [F * bags + 1] or null
  int64_t bags;            // of each feature
  const float* weights;    // [n] or null
  const uint8_t* marks;    // [n, mark_bytes(dim)] for features with the combiner max; or null
};

// The gradients of each of `tables` tables over all parts, in order. Throws std::invalid_argument for parts that do not
// fit together. The parts' arrays must outlive it.
class JoinedParts {
 public:
  JoinedParts(const std::vector<GradientPart>& parts, int64_t tables, int64_t dim);
  const Gradients& of(int64_t table) const { return joined_[table]; }
  bool named(int64_t table) const { return named_[table]; }  // whether a feature of a part uses the table
  // True if no gradient holds NaN or infinity; false may be a false alarm.
  bool clean() const;

 private:
  struct Span;
  struct Piece;
  bool clean(const GradientPart& part) const;
  void check(const GradientPart& part, int64_t tables) const;

  const std::vector<GradientPart>& parts_;
  const int64_t dim_;
  std::vector<Gradients> joined_;
  std::vector<uint8_t> named_;
  std::vector<float> zeros_;  // the gradient of a row that firstn leaves out
  std::vector<Scratch> memory_;
};

}  // namespace shoal
