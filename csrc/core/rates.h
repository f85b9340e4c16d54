// Limits on the requests that each caller may make per second: one token bucket per caller.
#pragma once
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

namespace shoal {

class Rates {
 public:
  // Allows every caller `per_second` requests, and bursts of one second's worth; 0: no limit.
  explicit Rates(double per_second) : per_second_(per_second) {}

  void set(std::string caller, double per_second);      // another limit for one caller; 0: no limit
  bool admit(std::string_view caller, int64_t now_ns);  // whether the caller may make a request, which is counted
  int64_t refused() const;

 private:
  struct Bucket {
    double level = 0;
    int64_t at_ns = 0;
  };
  static constexpr size_t kMaxCallers = 1 << 16;
  void forget(int64_t now_ns);

  const double per_second_;
  mutable std::mutex mutex_;
  std::unordered_map<std::string, double> limits_;
  std::unordered_map<std::string, Bucket> buckets_;
  int64_t refused_ = 0;
};

}  // namespace shoal
