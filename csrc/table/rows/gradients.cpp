#include "table/rows/gradients.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "core/thread_pool.h"

namespace shoal {
namespace {

constexpr int64_t kPiece = 8192;  // ids that a thread takes at a time

void refuse(const std::string& what) { throw std::invalid_argument(what); }

// body(i) for i in [0, n), on several threads if there are enough ids.
void each_of(int64_t n, int64_t ids, FunctionRef<void(int64_t)> body) {
  if (ids >= kPiece) return parallel_parts(n, body);
  for (int64_t i = 0; i < n; ++i) body(i);
}

}  // namespace

// The ids of one feature of one part.
struct JoinedParts::Span {
  const GradientPart* part;
  size_t feature;
  int64_t begin, end;       // in part->ids
  bool single = false;      // every bag has one id
  float* shares = nullptr;  // [bags, dim]: room for gradients of max that rows share
  Pool pool() const { return part->offsets && !single ? part->features->combiners[feature] : Pool::sum; }
  bool divides() const { return pool() == Pool::mean || pool() == Pool::sqrtn; }
  bool factors() const { return part->weights || divides(); }
  // Bag b is ids[first(b) .. first(b + 1)); without bags, every id is one.
  int64_t bags() const { return part->offsets ? part->bags : end - begin; }
  int64_t first(int64_t bag) const {
    return part->offsets ? part->offsets[static_cast<int64_t>(feature) * part->bags + bag] : begin + bag;
  }
  const float* gradient(int64_t bag) const {
    return part->offsets ? part->grad + bag * part->stride + part->features->columns[feature]
                         : part->grad + (begin + bag) * part->stride;
  }
  void check_offsets();
};

void JoinedParts::Span::check_offsets() {
  if (!part->offsets) return;
  if (first(0) != begin || first(part->bags) != end)
    refuse("the offsets of feature " + std::to_string(feature) + " must go from " + std::to_string(begin) + " to " +
           std::to_string(end) + ", got " + std::to_string(first(0)) + " to " + std::to_string(first(part->bags)));
  bool falls = false, other = false;
  const int64_t* offsets = part->offsets + static_cast<int64_t>(feature) * part->bags;
  for (int64_t b = 0; b < part->bags; ++b) {
    falls |= offsets[b + 1] < offsets[b];
    other |= offsets[b + 1] != offsets[b] + 1;
  }
  if (falls) refuse("the offsets of feature " + std::to_string(feature) + " must never fall");
  single = !other;
}

// Some of the bags of a span.
struct JoinedParts::Piece {
  const Span* span;
  int64_t begin, end;  // bags
  int64_t ids;         // that are not padding
  int64_t to;          // where they begin among the table's ids

  int64_t kept(int64_t bag) const {
    const FeatureMap& features = *span->part->features;
    const int64_t *from = span->part->ids + span->first(bag), *last = span->part->ids + span->first(bag + 1);
    return features.pads ? last - from - std::count(from, last, features.padding) : last - from;
  }

  // Where the piece's values go; all except `each` may be null.
  struct To {
    int64_t* ids;
    const float** each;
    float* factors;
    const uint8_t** marks;
  };
  void fill(To to, int64_t dim, const float* zeros) const {
    const GradientPart& part = *span->part;
    const bool pads = part.features->pads;
    const int64_t padding = part.features->padding;
    const Pool pool = span->pool();
    for (int64_t bag = begin; bag < end; ++bag) {
      const PooledBag of{.pool = pool,
                         .dim = dim,
                         .length = part.features->length(span->feature),
                         .grad = span->gradient(bag),
                         .zeros = zeros,
                         .weights = part.weights,
                         .marks = pool == Pool::max ? part.marks : nullptr,
                         .begin = span->first(bag),
                         .end = span->first(bag + 1)};
      spread_gradient(
          of, span->shares + bag * dim, [&](int64_t i) { return !pads || part.ids[i] != padding; },
          [&](int64_t i, const float* gradient, float factor, const uint8_t* marks) {
            if (to.ids) *to.ids++ = part.ids[i];
            *to.each++ = gradient;
            if (to.factors) *to.factors++ = factor;
            if (to.marks) *to.marks++ = marks;
          });
    }
  }
};

void JoinedParts::check(const GradientPart& part, int64_t tables) const {
  const FeatureMap& features = *part.features;
  int64_t n = 0;
  for (size_t f = 0; f < features.tables.size(); ++f) {
    if (features.tables[f] < 0 || features.tables[f] >= tables)
      refuse("feature " + std::to_string(f) + " must name one of " + std::to_string(tables) + " tables, got " +
             std::to_string(features.tables[f]));
    if (part.counts[f] < 0) refuse("counts must be >= 0, got " + std::to_string(part.counts[f]));
    n += part.counts[f];
  }
  if (n != part.n) refuse("counts must add up to " + std::to_string(part.n) + " ids, got " + std::to_string(n));
  if (!part.offsets) return;
  if (features.combiners.size() != features.tables.size() || features.columns.size() != features.tables.size())
    refuse("there must be one combiner and one column per feature, " + std::to_string(features.tables.size()) +
           ", got " + std::to_string(features.combiners.size()) + " and " + std::to_string(features.columns.size()));
  if (!features.lengths.empty() && features.lengths.size() != features.tables.size())
    refuse("there must be one length per feature, " + std::to_string(features.tables.size()) + ", or none, got " +
           std::to_string(features.lengths.size()));
  for (size_t f = 0; f < features.tables.size(); ++f) {
    const Pool combiner = features.combiners[f];
    if (combiner < Pool::sum || combiner > Pool::max)
      refuse("the combiner of feature " + std::to_string(f) + " must be 0..4, got " +
             std::to_string(static_cast<int>(combiner)));
    if (combiner == Pool::max && !part.marks && part.n)
      refuse("the gradient of max needs the marks that its forward wrote, got none");
    const int64_t length = features.length(f);
    if (length < 1 || length > features.width || (length > 1 && combiner != Pool::firstn))
      refuse("the length of feature " + std::to_string(f) + " must be 1.." + std::to_string(features.width) +
             " with firstn and 1 otherwise, got " + std::to_string(length));
    if (features.columns[f] < 0 || features.columns[f] > features.width - length * dim_)
      refuse("the columns of feature " + std::to_string(f) + " must be within 0.." + std::to_string(features.width) +
             ", got " + std::to_string(length * dim_) + " columns from " + std::to_string(features.columns[f]));
  }
}

JoinedParts::JoinedParts(const std::vector<GradientPart>& parts, int64_t tables, int64_t dim)
    : parts_(parts), dim_(dim), joined_(static_cast<size_t>(tables)), named_(static_cast<size_t>(tables), 0) {
  std::vector<std::vector<Span>> spans(static_cast<size_t>(tables));
  std::vector<Span*> bags;
  int64_t ids = 0, offsets = 0;
  for (const GradientPart& part : parts) {
    check(part, tables);
    int64_t begin = 0;
    for (size_t f = 0; f < part.features->tables.size(); ++f) {
      const int64_t end = begin + part.counts[f];
      spans[part.features->tables[f]].push_back({&part, f, begin, end});
      named_[part.features->tables[f]] = 1;
      begin = end;
    }
    ids += part.n;
    if (part.offsets) offsets += part.bags * static_cast<int64_t>(part.features->tables.size());
  }
  for (auto& of_table : spans)
    for (Span& span : of_table)
      if (span.part->offsets) bags.push_back(&span);
  each_of(static_cast<int64_t>(bags.size()), offsets, [&](int64_t i) { bags[i]->check_offsets(); });

  // A table whose arrays can be used as they are is not copied.
  struct Copied {
    int64_t table;
    size_t begin, end;  // pieces
    bool ids, factors, marks;
  };
  std::vector<Copied> copied;
  std::vector<Piece> pieces;
  for (int64_t t = 0; t < tables; ++t) {
    auto& of_table = spans[t];
    if (of_table.empty()) continue;
    const Span& only = of_table[0];
    const bool as_it_is = of_table.size() == 1 && !only.part->features->pads;
    const float* weights = only.part->weights ? only.part->weights + only.begin : nullptr;
    if (as_it_is) {
      joined_[t].ids = only.part->ids + only.begin;
      joined_[t].n = only.end - only.begin;
      if (!only.divides()) joined_[t].factors = weights;
      if (!only.part->offsets || only.single) {
        joined_[t].rows = only.gradient(0);
        joined_[t].stride = only.part->stride;
        continue;
      }
    }
    Copied plan{t, pieces.size(), 0, !as_it_is, false, false};
    for (Span& span : of_table) {
      plan.factors |= span.factors();
      if (span.pool() == Pool::firstn) zeros_.resize(static_cast<size_t>(dim), 0.0f);
      if (span.pool() == Pool::max) {
        plan.marks = true;
        span.shares = memory_.emplace_back(static_cast<size_t>(span.bags() * dim) * sizeof(float)).as<float>();
      }
      for (int64_t bag = 0; bag < span.bags();) {
        const int64_t first = span.first(bag);
        int64_t end = bag + 1;
        if (!span.part->offsets) end = std::min(span.bags(), bag + kPiece);
        while (end < span.bags() && span.first(end + 1) - first <= kPiece) ++end;
        pieces.push_back({&span, bag, end, span.first(end) - first, 0});
        bag = end;
      }
    }
    if (joined_[t].factors) plan.factors = false;
    plan.end = pieces.size();
    copied.push_back(plan);
  }
  each_of(static_cast<int64_t>(pieces.size()), ids, [&](int64_t i) {
    Piece& piece = pieces[i];
    if (!piece.span->part->features->pads) return;
    piece.ids = 0;
    for (int64_t bag = piece.begin; bag < piece.end; ++bag) piece.ids += piece.kept(bag);
  });

  std::vector<const Copied*> plan_of(pieces.size());
  for (const Copied& plan : copied) {
    Gradients& joined = joined_[plan.table];
    joined.n = 0;
    for (size_t i = plan.begin; i < plan.end; ++i) {
      pieces[i].to = joined.n;
      joined.n += pieces[i].ids;
      plan_of[i] = &plan;
    }
    const auto n = static_cast<size_t>(joined.n);
    joined.each = memory_.emplace_back(n * sizeof(float*)).as<const float*>();
    if (plan.ids) joined.ids = memory_.emplace_back(n * sizeof(int64_t)).as<int64_t>();
    if (plan.factors) joined.factors = memory_.emplace_back(n * sizeof(float)).as<float>();
    if (plan.marks) joined.marks = memory_.emplace_back(n * sizeof(uint8_t*)).as<const uint8_t*>();
  }
  each_of(static_cast<int64_t>(pieces.size()), ids, [&](int64_t i) {
    const Piece& piece = pieces[i];
    const Copied& plan = *plan_of[i];
    const Gradients& to = joined_[plan.table];  // the arrays filled here are in memory_
    piece.fill({.ids = plan.ids ? const_cast<int64_t*>(to.ids) + piece.to : nullptr,
                .each = const_cast<const float**>(to.each) + piece.to,
                .factors = plan.factors ? const_cast<float*>(to.factors) + piece.to : nullptr,
                .marks = plan.marks ? const_cast<const uint8_t**>(to.marks) + piece.to : nullptr},
               dim, zeros_.data());
  });
}

bool JoinedParts::clean() const {
  return std::all_of(parts_.begin(), parts_.end(), [&](const GradientPart& part) { return clean(part); });
}

bool JoinedParts::clean(const GradientPart& part) const {
  const FeatureMap& features = *part.features;
  int64_t own = 0;
  for (size_t f = 0; f < features.columns.size(); ++f) own += features.length(f) * dim_;
  const bool bags = part.offsets, whole = !bags || own == features.width;
  const int64_t rows = bags ? part.bags : part.n, width = bags ? features.width : dim_;
  std::atomic<uint32_t> largest{0};
  auto raise = [&](uint32_t bits) {
    uint32_t seen = largest.load(std::memory_order_relaxed);
    while (seen < bits && !largest.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) {
    }
  };
  parallel_for(rows, std::max<int64_t>(1, 65536 / std::max<int64_t>(1, width)), [&](int64_t begin, int64_t end) {
    uint32_t bits = 0;
    if (whole && part.stride == width) {
      bits = SHOAL_DISPATCH(largest_bits)(part.grad + begin * width, (end - begin) * width);
    } else {
      for (int64_t row = begin; row < end && bits < kInfiniteBits; ++row) {
        const float* grad = part.grad + row * part.stride;
        if (whole) {
          bits = std::max(bits, SHOAL_DISPATCH(largest_bits)(grad, width));
        } else {
          for (size_t f = 0; f < features.columns.size(); ++f)
            bits = std::max(bits, SHOAL_DISPATCH(largest_bits)(grad + features.columns[f], features.length(f) * dim_));
        }
      }
    }
    raise(bits);
  });
  if (largest >= kInfiniteBits) return false;
  if (!part.weights) return true;
  const uint32_t of_weights = SHOAL_DISPATCH(largest_bits)(part.weights, part.n);
  float gradient, weight;
  const uint32_t bits = largest;
  std::memcpy(&gradient, &bits, sizeof bits);
  std::memcpy(&weight, &of_weights, sizeof of_weights);
  // The products must be finite, too.
  return of_weights < kInfiniteBits &&
         double{gradient} * std::max(1.0, double{weight}) < 0.99 * double{std::numeric_limits<float>::max()};
}

}  // namespace shoal
