// How many requests each caller may make per second: a bucket for each, which fills at that rate.
#pragma once
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

namespace shoal {

class Rates {
 public:
  // `per_second` requests of every caller, and as many at once as come in `burst_s`; 0: as many as they like.
  explicit Rates(double per_second, double burst_s = 1.0) : per_second_(per_second), burst_s_(burst_s) {}

  void set(std::string caller, double per_second);      // of one caller; 0: as many as it likes
  bool admit(std::string_view caller, int64_t now_ns);  // counts a request
  int64_t refused() const;

 private:
  struct Bucket {
    double level = 0;
    int64_t at_ns = 0;
  };
  static constexpr size_t kMaxCallers = 1 << 16;
  void forget(int64_t now_ns);

  const double per_second_, burst_s_;
  mutable std::mutex mutex_;
  std::unordered_map<std::string, double> limits_;
  std::unordered_map<std::string, Bucket> buckets_;
  int64_t refused_ = 0;
};

}  // namespace shoal
