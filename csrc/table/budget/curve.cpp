#include "table/budget/curve.h"

#include <algorithm>
#include <cmath>

#include "core/hash.h"

namespace shoal {
namespace {

constexpr uint32_t kPlaces = 1 << 16;
constexpr double kBins = 8;  // per doubling

}  // namespace

uint64_t Curve::hash(int64_t id) {
  // Not the index's hash, which chooses the stripe: a sample must be of all stripes.
  return hash_id(static_cast<uint64_t>(id) + 0x5851F42D4C957F2DULL);
}

void Curve::wrote(const int64_t* ids, int64_t n, const uint8_t* drop) {
  const uint64_t below = threshold();
  std::vector<int64_t> seen;
  for (int64_t i = 0; i < n; ++i)
    if (hash(ids[i]) < below && !(drop && drop[i])) seen.push_back(ids[i]);
  sampled(seen.data(), static_cast<int64_t>(seen.size()), drop ? std::count(drop, drop + n, 0) : n);
}

void Curve::sampled(const int64_t* ids, int64_t n, int64_t writes) {
  writes_.fetch_add(writes, std::memory_order_relaxed);
  if (n == 0) return;
  std::lock_guard lock(mutex_);
  for (int64_t i = 0; i < n; ++i)
    if (const uint64_t own = hash(ids[i]); own < threshold()) see(ids[i], own);
}

void Curve::see(int64_t id, uint64_t hash) {
  if (tree_.empty()) tree_.assign(kPlaces + 1, 0);
  if (next_ == kPlaces) renumber();
  const double rate = std::ldexp(static_cast<double>(threshold()), -64);
  // A sampled write represents 1 / rate writes.
  ++sampled_;
  total_ += 1 / rate;
  const auto [at, first] = last_.try_emplace(id, Last{hash, next_});
  if (!first) {
    const double distance = static_cast<double>(after(at->second.place) + 1) / rate;
    const auto bin = static_cast<size_t>(kBins * std::log2(distance + 1));
    if (counts_.size() <= bin) counts_.resize(bin + 1, 0);
    counts_[bin] += 1 / rate;
    add(at->second.place, -1);
    at->second.place = next_;
  }
  add(next_++, 1);
  if (last_.size() > kMost) forget_some();
}

void Curve::forget_some() {
  const uint64_t below = threshold() / 2;
  for (auto at = last_.begin(); at != last_.end();) {
    if (at->second.hash < below) {
      ++at;
    } else {
      add(at->second.place, -1);
      at = last_.erase(at);
    }
  }
  threshold_.store(below);
}

void Curve::renumber() {
  std::vector<std::pair<uint32_t, Last*>> order;
  for (auto& [id, last] : last_) order.emplace_back(last.place, &last);
  std::sort(order.begin(), order.end());
  std::fill(tree_.begin(), tree_.end(), 0);
  next_ = 0;
  for (auto& [place, last] : order) {
    last->place = next_;
    add(next_++, 1);
  }
}

void Curve::add(size_t place, int32_t by) {
  for (size_t at = place + 1; at < tree_.size(); at += at & -at) tree_[at] += by;
}

int64_t Curve::after(size_t place) const {
  int64_t before = 0;
  for (size_t at = place + 1; at > 0; at -= at & -at) before += tree_[at];
  return static_cast<int64_t>(last_.size()) - before;
}

Curve::Points Curve::points() const {
  std::lock_guard lock(mutex_);
  Points points;
  points.sampled = sampled_;
  // A few ids have many writes. If the sample has more or fewer of these than its share, the difference is counted as
  // writes of ids that any table would have.
  const auto total = static_cast<double>(writes_.load());
  double found = total - total_;
  for (size_t bin = 0; bin < counts_.size(); ++bin) {
    found += counts_[bin];
    points.rows.push_back(static_cast<int64_t>(std::exp2(static_cast<double>(bin + 1) / kBins)));
    points.misses.push_back(std::clamp(1 - found / total, 0.0, 1.0));
  }
  return points;
}

}  // namespace shoal
