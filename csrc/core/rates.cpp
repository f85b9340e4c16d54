#include "core/rates.h"

#include <algorithm>
#include <iterator>

namespace shoal {

void Rates::set(std::string caller, double per_second) {
  const std::lock_guard lock(mutex_);
  limits_[std::move(caller)] = per_second;
}

bool Rates::admit(std::string_view caller, int64_t now_ns) {
  const std::string key(caller);
  const std::lock_guard lock(mutex_);
  const auto own = limits_.find(key);
  const double limit = own == limits_.end() ? per_second_ : own->second;
  if (limit <= 0) return true;
  const double full = std::max(1.0, limit);
  auto found = buckets_.find(key);
  if (found == buckets_.end()) {
    if (buckets_.size() >= kMaxCallers) forget(now_ns);
    found = buckets_.emplace(key, Bucket{full, now_ns}).first;
  }
  Bucket& bucket = found->second;
  const int64_t passed = std::max<int64_t>(0, now_ns - bucket.at_ns);
  bucket.level = std::min(full, bucket.level + limit * static_cast<double>(passed) * 1e-9);
  bucket.at_ns = now_ns;
  if (bucket.level < 1) {
    ++refused_;
    return false;
  }
  bucket.level -= 1;
  return true;
}

// Drops buckets without a request for a second, which are full again unless the limit is below 1 per second; if there
// are none, drops all.
void Rates::forget(int64_t now_ns) {
  constexpr int64_t kSecondNs = 1'000'000'000;
  for (auto each = buckets_.begin(); each != buckets_.end();) {
    each = now_ns - each->second.at_ns > kSecondNs ? buckets_.erase(each) : std::next(each);
  }
  if (buckets_.size() >= kMaxCallers) buckets_.clear();
}

int64_t Rates::refused() const {
  const std::lock_guard lock(mutex_);
  return refused_;
}

}  // namespace shoal
