#include "train/topk.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "train/crc32.h"

using shoal::crc32;
using shoal::topk_magnitude;

static std::vector<int64_t> sorted(const std::vector<float>& x, int64_t k) {
  std::vector<int64_t> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  const auto rank = [&](int64_t i) {
    return std::isnan(x[i]) ? std::numeric_limits<double>::infinity() * 1.0 : std::min<double>(std::fabs(x[i]), 1e300);
  };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return rank(a) > rank(b); });
  order.resize(k);
  return order;
}

TEST(topk_agrees_with_a_stable_sort) {
  std::mt19937 rng(7);
  for (int round = 0; round < 200; ++round) {
    const int64_t n = 1 + rng() % (round < 190 ? 300 : 300000);
    const int64_t k = 1 + rng() % n;
    std::vector<float> x(n);
    std::normal_distribution<float> normal;
    for (float& v : x) v = round % 2 ? normal(rng) : static_cast<float>(static_cast<int>(rng() % 9) - 4);
    if (round % 5 == 0) x[rng() % n] = std::nanf("");
    std::vector<int64_t> got(k);
    topk_magnitude(x.data(), n, k, false, false, got.data());
    const std::vector<int64_t> want = sorted(x, k);
    CHECK(got == want);
    topk_magnitude(x.data(), n, k, true, false, got.data());
    std::vector<int64_t> by_index = want;
    std::sort(by_index.begin(), by_index.end());
    CHECK(got == by_index);
  }
}

TEST(crc32_agrees_with_itself_byte_by_byte) {
  std::mt19937 rng(8);
  const char* check = "123456789";
  CHECK(crc32(reinterpret_cast<const uint8_t*>(check), 9) == 0xcbf43926u);
  std::vector<uint8_t> bytes(1000);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng());
  for (int64_t n = 0; n < 1000; n += 7) {
    uint32_t slow = 0;
    for (int64_t i = 0; i < n; ++i) slow = crc32(&bytes[i], 1, slow);
    CHECK(crc32(bytes.data(), n) == slow);
  }
}
