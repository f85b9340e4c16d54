#include "nn/wiring.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/thread_pool.h"
#include "table/read.h"

namespace shoal {
namespace {

constexpr int64_t kGrain = 2048;  // ids and bags that are worth waking a thread for

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

// Throws unless `offsets` of bags `begin` to `end` never fall and are within [0, n].
void check_offsets(const int64_t* offsets, int64_t begin, int64_t end, int64_t n) {
  int64_t falls = 0;
  for (int64_t b = begin; b < end; ++b) falls += offsets[b + 1] < offsets[b];
  if (!falls && offsets[begin] >= 0 && offsets[end] <= n) return;
  for (int64_t b = begin; b < end; ++b)
    if (offsets[b + 1] < offsets[b])
      refuse("offsets must never fall, but entry " + std::to_string(b + 1) + " is " + std::to_string(offsets[b + 1]) +
             " after " + std::to_string(offsets[b]));
  refuse("offsets must be 0.." + std::to_string(n) + ", the number of ids, got " + std::to_string(offsets[begin]) +
         ".." + std::to_string(offsets[end]));
}

}  // namespace

Wiring::Wiring(std::vector<Feature> features, int64_t width, std::optional<int64_t> padding)
    : features_(std::move(features)), width_(width), padding_(padding) {
  if (features_.empty()) refuse("there must be at least one feature, got none");
  dim_ = features_[0].table->layout().dim;
  for (const Feature& feature : features_) {
    if (feature.table->layout().dim != dim_)
      refuse("all tables must have the dim " + std::to_string(dim_) + ", got " +
             std::to_string(feature.table->layout().dim));
    if (feature.pool < Pool::sum || feature.pool > Pool::max)
      refuse("the combiner must be 0..4, got " + std::to_string(static_cast<int>(feature.pool)));
    if (feature.length < 1 || (feature.length > 1 && feature.pool != Pool::firstn) ||
        feature.length > (int64_t{1} << 31))
      refuse("the length of a feature must be 1..2^31 with firstn and 1 otherwise, got " +
             std::to_string(feature.length));
    const int64_t last = width_ - dim_ * feature.length;
    if (feature.column < 0 || (width_ && feature.column > last))
      refuse("the first column of a feature must be " + (width_ ? "0.." + std::to_string(last) : ">= 0") + ", got " +
             std::to_string(feature.column));
  }
}

void Wiring::rows(const int64_t* ids, int64_t n, const int64_t* counts, Missing missing, float* out) const {
  std::vector<int64_t> ends(features_.size());
  int64_t total = 0;
  for (size_t f = 0; f < ends.size(); ++f) {
    if (counts[f] < 0) refuse("counts must be >= 0, got " + std::to_string(counts[f]));
    ends[f] = total += counts[f];
  }
  if (total != n)
    refuse("counts must add up to the number of ids, " + std::to_string(n) + ", got " + std::to_string(total));
  if (missing == Missing::zeros) missing = Missing::none;  // copy_rows writes zeros for them
  const int64_t* padding = padding_ ? &*padding_ : nullptr;
  parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
    auto feature = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    for (; begin < end; ++feature) {
      const int64_t upto = std::min(end, ends[feature]);
      features_[feature].table->read(ids + begin, upto - begin, missing, padding,
                                     [&](int64_t first, int64_t some, const float* const* rows) {
                                       SHOAL_DISPATCH(copy_rows)
                                       (rows, some, dim_, false, out + (begin + first) * dim_);
                                     });
      begin = upto;
    }
  });
}

void Wiring::pooled(const int64_t* ids, int64_t n, const int64_t* offsets, int64_t bags, const float* weights,
                    Missing missing, float* out, uint8_t* marks) const {
  const int64_t all = size() * bags;
  if (offsets[0] != 0) refuse("offsets must start at 0, got " + std::to_string(offsets[0]));
  if (offsets[all] != n)
    refuse("offsets must end at the number of ids, " + std::to_string(n) + ", got " + std::to_string(offsets[all]));
  const int64_t* padding = padding_ ? &*padding_ : nullptr;

  // Pools some bags of one feature.
  auto pool = [&](int64_t number, int64_t begin, int64_t end) {
    const Feature& feature = features_[static_cast<size_t>(number)];
    const int64_t* own = offsets + number * bags;
    const Bags of_feature{.offsets = own,
                          .dim = dim_,
                          .pool = feature.pool,
                          .weights = weights,
                          .stride = width_,
                          .padded = padding != nullptr,
                          .length = feature.length,
                          .marks = marks};
    float* to = out + feature.column;
    MarkRoom room(of_feature);
    BagCursor at = room.cursor(begin, end);
    feature.table->read(ids + own[begin], own[end] - own[begin], missing, padding,
                        [&](int64_t first, int64_t some, const float* const* rows) {
                          SHOAL_DISPATCH(pool_some)(of_feature, at, own[begin] + first, some, rows, to);
                        });
    SHOAL_DISPATCH(pool_some)(of_feature, at, own[end], 0, nullptr, to);  // empty bags at the end
  };
  // Parts with about equal numbers of ids and bags.
  const int64_t work = n + all;
  const int64_t parts = std::clamp<int64_t>(work / kGrain, 1, int64_t{4} * num_threads());
  auto part_begin = [&](int64_t part) {
    if (part == parts) return all;
    int64_t low = 0, high = all;  // find the first bag with that much work before it
    for (const int64_t before = work / parts * part; low < high;) {
      const int64_t middle = (low + high) / 2;
      if (offsets[middle] + middle < before) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  };
  parallel_parts(parts, [&](int64_t part) {
    int64_t begin = part ? part_begin(part) : 0;
    const int64_t end = part_begin(part + 1);
    if (begin >= end) return;
    check_offsets(offsets, begin, end, n);
    for (int64_t upto; begin < end; begin = upto) {
      const int64_t feature = begin / bags;
      upto = std::min(end, (feature + 1) * bags);
      pool(feature, begin - feature * bags, upto - feature * bags);
    }
  });
}

}  // namespace shoal
