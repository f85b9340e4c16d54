#include "nn/pooling.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/thread_pool.h"

namespace shoal {
namespace {

constexpr int64_t kRound = 64;  // rows that are prefetched together

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

// Pools some bags of one feature.
void pool_feature(const BagsAt& bags, int64_t feature, int64_t begin, int64_t end, const float* flat, float* out) {
  const int64_t* offsets = bags.offsets + feature * bags.bags;
  const Bags own{.offsets = offsets,
                 .dim = bags.dim,
                 .pool = bags.combiners[feature],
                 .weights = bags.weights,
                 .stride = bags.width,
                 .padded = !bags.in_order || bags.padding,
                 .length = bags.length(feature),
                 .marks = bags.marks};
  MarkRoom room(own);
  BagCursor cursor = room.cursor(begin, end);
  const float* rows[2][kRound];
  const int64_t last = offsets[end];
  auto ask = [&](int64_t first, const float** to) {
    for (int64_t i = first; i < std::min(last, first + kRound); ++i)
      __builtin_prefetch(to[i - first] = bags.is_there(i) ? flat + bags.row(i) : nullptr);
  };
  int64_t first = offsets[begin];
  ask(first, rows[0]);
  for (int which = 0; first < last; first += kRound, which ^= 1) {
    ask(first + kRound, rows[which ^ 1]);
    SHOAL_DISPATCH(pool_some)
    (own, cursor, first, std::min(kRound, last - first), rows[which], out + bags.columns[feature]);
  }
  SHOAL_DISPATCH(pool_some)(own, cursor, last, 0, nullptr, out + bags.columns[feature]);  // empty bags at the end
}

// Calls body(feature, begin, end) for the bags [begin, end), which are counted over all features.
void by_feature(const BagsAt& bags, int64_t begin, int64_t end, FunctionRef<void(int64_t, int64_t, int64_t)> body) {
  for (int64_t upto; begin < end; begin = upto) {
    const int64_t feature = begin / bags.bags, first = feature * bags.bags;
    upto = std::min(end, first + bags.bags);
    body(feature, begin - first, upto - first);
  }
}

// Bags that are worth waking a thread for.
int64_t grain(const BagsAt& bags) {
  const int64_t all = std::max<int64_t>(1, bags.features * bags.bags);
  return std::max<int64_t>(16, (int64_t{32} << 10) / std::max<int64_t>(1, (bags.ids + all) * bags.dim / all));
}

// A row of zeros, and room for two others.
std::vector<float> scratch_of(const BagsAt& bags) {
  return std::vector<float>(static_cast<size_t>(3 * bags.dim), 0.0f);
}

void check_marks(const BagsAt& bags) {
  if (bags.ids && !bags.marks &&
      std::find(bags.combiners.begin(), bags.combiners.end(), Pool::max) != bags.combiners.end())
    refuse("the gradient of max needs the marks that its forward wrote, got none");
}

}  // namespace

void BagsAt::check() const {
  if (dim < 1 || features < 1 || bags < 0)
    refuse("there must be dim >= 1, features >= 1 and bags >= 0, got " + std::to_string(dim) + ", " +
           std::to_string(features) + " and " + std::to_string(bags));
  if (static_cast<int64_t>(combiners.size()) != features || static_cast<int64_t>(columns.size()) != features)
    refuse("there must be one combiner and one column per feature, " + std::to_string(features) + ", got " +
           std::to_string(combiners.size()) + " and " + std::to_string(columns.size()));
  for (size_t f = 0; f < combiners.size(); ++f) {
    if (combiners[f] < Pool::sum || combiners[f] > Pool::max)
      refuse("the combiner of feature " + std::to_string(f) + " must be 0..4, got " +
             std::to_string(static_cast<int>(combiners[f])));
    const int64_t length = combiners[f] == Pool::firstn ? (f < lengths.size() ? lengths[f] : 0) : 1;
    if (length < 1 || length > width)
      refuse("the length of firstn must be 1.." + std::to_string(width) + ", got " + std::to_string(length));
    if (columns[f] < 0 || columns[f] + length * dim > width)
      refuse("the columns of feature " + std::to_string(f) + " must be within 0.." + std::to_string(width) + ", got " +
             std::to_string(length * dim) + " columns from " + std::to_string(columns[f]));
  }
  const int64_t all = features * bags;
  if (offsets[0] != 0 || offsets[all] != ids)
    refuse("offsets must rise from 0 to the number of ids, " + std::to_string(ids) + ", got " +
           std::to_string(offsets[0]) + ".." + std::to_string(offsets[all]));
  for (int64_t b = 0; b < all; ++b) {
    if (offsets[b] > offsets[b + 1]) refuse("offsets must never fall, but do at bag " + std::to_string(b));
  }
  if (in_order) {
    if (ids * dim > floats)
      refuse("there must be one row per id, " + std::to_string(ids * dim) + " floats, got " + std::to_string(floats));
    if (ids && padding && !keys) refuse("padding needs the ids, got none");
    return;
  }
  int32_t last = -1;
  for (int64_t i = 0; i < ids; ++i) last = std::max(last, at[i]);
  if (last >= 0 && last + dim > floats)
    refuse("offset " + std::to_string(last) + " + dim " + std::to_string(dim) + " is outside the buffer of " +
           std::to_string(floats) + " floats");
}

void pool_at(const BagsAt& bags, const float* flat, float* out) {
  bags.check();
  parallel_for(bags.features * bags.bags, grain(bags), [&](int64_t begin, int64_t end) {
    by_feature(bags, begin, end,
               [&](int64_t feature, int64_t from, int64_t to) { pool_feature(bags, feature, from, to, flat, out); });
  });
}

void add_pooled_at(const BagsAt& bags, const float* grad, float* flat) {
  bags.check();
  check_marks(bags);
  const int64_t all = bags.features * bags.bags;
  if (bags.in_order) {  // every row belongs to one id
    return parallel_for(all, grain(bags), [&](int64_t begin, int64_t end) {
      SHOAL_DISPATCH(add_some_pooled_at)(bags, begin, end, 0, bags.floats, grad, scratch_of(bags).data(), flat);
    });
  }
  // Every part owns the rows that begin in a range of the buffer and reads all ids: a row is summed by one thread, in
  // order. The ranges have about equal numbers of ids.
  constexpr int64_t kMost = 8;
  const int64_t parts = bags.ids * bags.dim < 1 << 16 ? 1 : std::min<int64_t>(num_threads(), kMost);
  int64_t bounds[kMost + 1] = {0};
  bounds[parts] = bags.floats;
  if (parts > 1) {
    std::vector<int32_t> sample;
    for (int64_t i = 0; i < bags.ids; i += std::max<int64_t>(1, bags.ids / 1024)) sample.push_back(bags.at[i]);
    std::sort(sample.begin(), sample.end());
    for (int64_t p = 1; p < parts; ++p)
      bounds[p] = std::max<int64_t>(0, sample[static_cast<int64_t>(sample.size()) * p / parts]);
  }
  parallel_parts(parts, [&](int64_t p) {
    SHOAL_DISPATCH(add_some_pooled_at)(bags, 0, all, bounds[p], bounds[p + 1], grad, scratch_of(bags).data(), flat);
  });
}

void weigh_pooled_at(const BagsAt& bags, const float* grad, const float* flat, float* of_weights) {
  bags.check();
  check_marks(bags);
  parallel_for(bags.features * bags.bags, grain(bags), [&](int64_t begin, int64_t end) {
    SHOAL_DISPATCH(weigh_some_pooled_at)(bags, begin, end, grad, flat, scratch_of(bags).data(), of_weights);
  });
}

}  // namespace shoal
