#include "nn/pooling.h"

#include <algorithm>

#include "table/rows/gradients.h"
#include "table/rows/optimizers.h"

namespace shoal::SHOAL_ISA {
namespace {

// Bag number `bag` of all features, and its gradient.
inline PooledBag bag_of(const BagsAt& bags, int64_t bag, const float* grad, const float* zeros) {
  const int64_t feature = bag / bags.bags;
  const Pool pool = bags.combiners[feature];
  return {.pool = pool,
          .dim = bags.dim,
          .length = bags.length(feature),
          .grad = grad + (bag - feature * bags.bags) * bags.width + bags.columns[feature],
          .zeros = zeros,
          .weights = bags.weights,
          .marks = pool == Pool::max ? bags.marks : nullptr,
          .begin = bags.offsets[bag],
          .end = bags.offsets[bag + 1]};
}

}  // namespace

void add_some_pooled_at(const BagsAt& bags, int64_t begin, int64_t end, int64_t low, int64_t high, const float* grad,
                        float* scratch, float* flat) {
  float *shares = scratch + bags.dim, *product = shares + bags.dim;
  for (int64_t bag = begin; bag < end; ++bag) {
    if (bags.offsets[bag] == bags.offsets[bag + 1]) continue;
    spread_gradient(
        bag_of(bags, bag, grad, scratch), shares, [&](int64_t i) { return bags.is_there(i); },
        [&](int64_t i, const float* own, float factor, const uint8_t* marks) {
          const int64_t row = bags.row(i);
          if (row < low || row >= high || own == scratch) return;
          if (marks) {
            scaled_marked(own, factor, marks, bags.dim, product);
          } else if (factor != 1.0f) {
            scaled(own, factor, bags.dim, product);
          } else {
            return add(own, bags.dim, flat + row);
          }
          add(product, bags.dim, flat + row);
        });
  }
}

void weigh_some_pooled_at(const BagsAt& bags, int64_t begin, int64_t end, const float* grad, const float* flat,
                          float* scratch, float* of_weights) {
  std::fill(of_weights + bags.offsets[begin], of_weights + bags.offsets[end], 0.0f);
  for (int64_t bag = begin; bag < end; ++bag) {
    PooledBag of = bag_of(bags, bag, grad, scratch);
    of.weights = nullptr;
    spread_gradient(
        of, scratch + bags.dim, [&](int64_t i) { return bags.is_there(i); },
        [&](int64_t i, const float* own, float factor, const uint8_t* marks) {
          const float* row = flat + bags.row(i);
          float sum = 0;
          for (int64_t c = 0; c < bags.dim; ++c) sum += !marks || is_marked(marks, c) ? own[c] * row[c] : 0.0f;
          of_weights[i] = factor * sum;
        });
  }
}

}  // namespace shoal::SHOAL_ISA
