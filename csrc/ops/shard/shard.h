// Floor-mod of an int64 by a fixed number of shards, by multiplication: an id's shard costs a few cycles, not a
// division.
#pragma once
#include <bit>
#include <cstdint>

namespace shoal::ops {

class FloorMod {
 public:
  explicit FloorMod(int64_t n) : n_(static_cast<uint64_t>(n)) {
    // ceil(2^(63 + l) / n) with 2^l >= n fits 64 bits and divides every 63-bit numerator exactly.
    int l = n > 1 ? 64 - std::countl_zero(n_ - 1) : 0;
    if (l > 0) {
      magic_ = static_cast<uint64_t>((((unsigned __int128)1 << (63 + l)) + n_ - 1) / n_);
      shift_ = l - 1;
    }
  }
  int64_t operator()(int64_t x) const {
    if (n_ == 1) return 0;
    uint64_t sign = static_cast<uint64_t>(x >> 63);  // floormod(x) = n - 1 - floormod(~x) below zero
    uint64_t u = static_cast<uint64_t>(x) ^ sign;
    uint64_t q = static_cast<uint64_t>(((unsigned __int128)magic_ * u) >> 64) >> shift_;
    uint64_t r = u - q * n_;
    return static_cast<int64_t>((r ^ sign) + (sign & n_));
  }

 private:
  uint64_t n_, magic_ = 0;
  int shift_ = 0;
};

}  // namespace shoal::ops
