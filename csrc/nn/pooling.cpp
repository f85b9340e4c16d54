#include "nn/pooling.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/thread_pool.h"

namespace shoal {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

}  // namespace

void BagsAt::check() const {
  if (dim < 1 || features < 1 || bags < 0) refuse("bags must have a feature and rows of at least one float");
  if (static_cast<int64_t>(combiners.size()) != features || static_cast<int64_t>(columns.size()) != features)
    refuse("there must be one combiner and one column per feature");
  for (size_t f = 0; f < combiners.size(); ++f) {
    if (combiners[f] < Pool::sum || combiners[f] > Pool::max) refuse("combiner must be one of 0 to 4");
    const int64_t length = combiners[f] == Pool::firstn ? (f < lengths.size() ? lengths[f] : 0) : 1;
    if (length < 1 || length > width) refuse("the length of firstn must be at least 1 and fit the width");
    if (columns[f] < 0 || columns[f] + length * dim > width)
      refuse("column " + std::to_string(columns[f]) + " does not fit the width");
  }
  const int64_t all = features * bags;
  if (offsets[0] != 0 || offsets[all] != ids) refuse("offsets must rise from 0 to the number of ids");
  for (int64_t b = 0; b < all; ++b) {
    if (offsets[b] > offsets[b + 1]) refuse("offsets must never fall, but do at bag " + std::to_string(b));
  }
  if (in_order) {
    if (ids * dim > floats) refuse("there must be one row per id in the buffer of " + std::to_string(floats));
    if (ids && padding && !keys) refuse("padding needs the ids");
    return;
  }
  int32_t last = -1;
  for (int64_t i = 0; i < ids; ++i) last = std::max(last, at[i]);
  if (last >= 0 && last + dim > floats)
    refuse("a row lies outside the buffer of " + std::to_string(floats) + " floats");
}

void pool_at(const BagsAt& bags, const float* flat, float* out) {
  bags.check();
  const int64_t all = bags.features * bags.bags;
  const int64_t each = std::max<int64_t>(1, (bags.ids + all) * bags.dim / std::max<int64_t>(1, all));  // floats
  parallel_for(all, std::max<int64_t>(16, (int64_t{32} << 10) / each),
               [&](int64_t begin, int64_t end) { SHOAL_DISPATCH(pool_some_at)(bags, begin, end, flat, out); });
}

void add_pooled_at(const BagsAt& bags, const float* grad, float* flat) {
  bags.check();
  if (bags.in_order) refuse("gradients need the places of rows");
  for (Pool pool : bags.combiners) {
    if (pool == Pool::max || pool == Pool::firstn) refuse("gradients of max and firstn are not added here");
  }
  // Every part owns a range of the buffer's rows and looks at all ids: a row is summed by one thread, in order.
  const int64_t parts = bags.ids * bags.dim < 1 << 16 ? 1 : std::min(num_threads(), 8);
  const int64_t rows = bags.floats / bags.dim;
  parallel_parts(parts, [&](int64_t p) {
    SHOAL_DISPATCH(add_some_pooled_at)
    (bags, rows * p / parts * bags.dim, p + 1 == parts ? bags.floats : rows * (p + 1) / parts * bags.dim, grad, flat);
  });
}

}  // namespace shoal
