// A limit on the bytes of one or several tables: every allocation asks first, so that the sum never exceeds the limit.
#pragma once
#include <atomic>
#include <cstdint>

namespace shoal {

class Budget {
 public:
  static constexpr int64_t kUnlimited = int64_t{1} << 62;

  explicit Budget(int64_t limit = kUnlimited) : limit_(limit) {}
  Budget(const Budget&) = delete;

  // Takes the bytes if they are available.
  bool take(int64_t bytes) {
    int64_t used = used_.load(std::memory_order_relaxed);
    do {
      if (bytes > limit_ - used) return false;
    } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
    return true;
  }
  void give(int64_t bytes) { used_.fetch_sub(bytes, std::memory_order_relaxed); }

  int64_t used() const { return used_.load(std::memory_order_relaxed); }
  int64_t limit() const { return limit_; }
  bool unlimited() const { return limit_ >= kUnlimited; }

 private:
  const int64_t limit_;
  std::atomic<int64_t> used_{0};
};

}  // namespace shoal
