// Gradients on their way to the rows of tables: of rows, and of bags, which stay unexpanded.
#pragma once
#include <cstdint>
#include <vector>

#include "core/isa.h"
#include "core/scratch.h"
#include "table/rows/pooled.h"
#include "table/table.h"

namespace shoal {

SHOAL_PER_ISA(
    // The largest magnitude, as the bits of a float: from kInfiniteBits on there is an infinity or a NaN.
    uint32_t largest_bits(const float* x, int64_t n);
    // out = x * factor. Rounded by itself: where the product is added to a sum, no fused operation may skip that.
    void scaled(const float* x, float factor, int64_t n, float* out);
    // The same where a column is marked, and zeros elsewhere.
    void scaled_marked(const float* x, float factor, const uint8_t* marks, int64_t n, float* out);)

// One gradient for each of n ids of a table, in order: at(i) times its factor, where it is marked.
struct Gradients {
  const int64_t* ids = nullptr;
  int64_t n = 0;
  const float* rows = nullptr;  // at(i) is rows + i * stride,
  int64_t stride = 0;
  const float* const* each = nullptr;     // or each[i], where that is given
  const float* factors = nullptr;         // null: all are 1
  const uint8_t* const* marks = nullptr;  // null, or one that is: of all columns
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

// What one table is asked to apply.
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
  const float* scores = nullptr;  // one per id, of a table whose policy has them
};

// Which table each feature of a batch belongs to, and where its bags' gradients are.
struct FeatureMap {
  std::vector<int32_t> tables;
  std::vector<Pool> combiners;
  std::vector<int64_t> columns;  // feature f of bag b has grad[b, columns[f] .. + dim], or + lengths[f] * dim of firstn
  int64_t width = 0;
  bool pads = false;
  int64_t padding = 0;                // an id that has neither row nor gradient
  std::vector<int64_t> lengths = {};  // empty: 1 of each
  int64_t length(size_t feature) const { return lengths.empty() ? 1 : lengths[feature]; }
};

// A gradient of what was found for a batch: of its rows, or with `offsets` of its pooled bags.
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
  const uint8_t* marks;    // [n, mark_bytes(dim)] of features that are max; or null
};

// The gradients of each of `tables` tables over all parts, in order. Throws std::invalid_argument for parts that do not
// fit together. The parts' arrays must outlive it.
class JoinedParts {
 public:
  JoinedParts(const std::vector<GradientPart>& parts, int64_t tables, int64_t dim);
  const Gradients& of(int64_t table) const { return joined_[table]; }
  bool named(int64_t table) const { return named_[table]; }  // by a feature of a part
  // Whether no gradient holds NaN or infinity, by a look at all of them; false may be a false alarm.
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
  std::vector<float> zeros_;  // of a row that firstn leaves out
  std::vector<Scratch> memory_;
};

}  // namespace shoal
