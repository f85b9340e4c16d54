#include "train/topk.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/thread_pool.h"

namespace shoal {
namespace {

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr int kShift = 15;  // 2^16 buckets: the exponent and 8 bits of the mantissa
constexpr int kBuckets = 1 << (31 - kShift);
constexpr int64_t kGrain = 1 << 16;

// Magnitudes order as their bit patterns do; every NaN becomes the same key, just above infinity.
inline uint32_t key_of(float x) { return std::min(std::bit_cast<uint32_t>(x) & 0x7fffffffu, kInfinity + 1); }

struct Candidate {
  uint32_t key;
  uint32_t index;
};

// Stable, largest key first. The input is in index order, so ties keep it.
void sort_by_key(std::vector<Candidate>& items) {
  std::vector<Candidate> other(items.size());
  for (int shift = 0; shift < 32; shift += 11) {
    std::array<uint32_t, 2048> count{};
    for (const Candidate& c : items) ++count[2047 - ((c.key >> shift) & 2047)];
    if (std::find(count.begin(), count.end(), items.size()) != count.end()) continue;
    uint32_t at = 0;
    for (uint32_t& c : count) at += std::exchange(c, at);
    for (const Candidate& c : items) other[count[2047 - ((c.key >> shift) & 2047)]++] = c;
    items.swap(other);
  }
}

}  // namespace

bool topk_magnitude(const float* x, int64_t n, int64_t k, bool by_index, bool stop_on_nonfinite, int64_t* indices) {
  if (n < 1 || n >= (int64_t{1} << 32) || k < 1 || k > n)
    throw std::invalid_argument("topk_magnitude: n must be 1..4294967295 and k 1..n, got n " + std::to_string(n) +
                                " and k " + std::to_string(k));
  const int64_t parts = std::clamp<int64_t>(n / kGrain, 1, num_threads());
  const auto begin = [&](int64_t part) { return n * part / parts; };

  // How many values fall in each bucket, per part.
  std::vector<uint32_t> counts(static_cast<size_t>(parts) * kBuckets);
  parallel_parts(parts, [&](int64_t part) {
    uint32_t* count = counts.data() + part * kBuckets;
    // Two histograms, so that a run of equal buckets does not wait for its own last store.
    std::vector<uint32_t> twin(kBuckets);
    int64_t i = begin(part);
    const int64_t end = begin(part + 1);
    for (; i + 1 < end; i += 2) {
      ++count[key_of(x[i]) >> kShift];
      ++twin[key_of(x[i + 1]) >> kShift];
    }
    if (i < end) ++count[key_of(x[i]) >> kShift];
    for (int b = 0; b < kBuckets; ++b) count[b] += twin[b];
  });
  const auto total = [&](int bucket) {
    int64_t sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += counts[part * kBuckets + bucket];
    return sum;
  };
  bool nonfinite = false;
  for (int b = kInfinity >> kShift; b < kBuckets; ++b) nonfinite |= total(b) != 0;
  if (nonfinite && stop_on_nonfinite) return true;

  // The bucket of the k-th magnitude, and the number of values in higher buckets.
  int edge = kBuckets - 1;
  int64_t above = 0;
  for (int64_t here = total(edge); above + here < k; here = total(--edge)) above += here;
  const uint32_t edge_low = static_cast<uint32_t>(edge) << kShift;

  // Everything from that bucket on, in index order.
  std::vector<int64_t> offset(parts + 1);
  for (int64_t part = 0; part < parts; ++part) {
    offset[part + 1] = offset[part];
    for (int b = edge; b < kBuckets; ++b) offset[part + 1] += counts[part * kBuckets + b];
  }
  std::vector<Candidate> found(offset[parts] + 1);  // one spare, since the loop below writes before it knows
  parallel_parts(parts, [&](int64_t part) {
    // A local array, so that the spare write does not reach the next part's range.
    std::unique_ptr<Candidate[]> mine(new Candidate[offset[part + 1] - offset[part] + 1]);
    int64_t at = 0;
    for (int64_t i = begin(part), end = begin(part + 1); i < end; ++i) {
      const uint32_t key = key_of(x[i]);
      mine[at] = {key, static_cast<uint32_t>(i)};
      at += key >= edge_low;
    }
    std::memcpy(found.data() + offset[part], mine.get(), at * sizeof(Candidate));
  });
  found.pop_back();

  // Of the edge bucket, keep the largest keys, and of equal keys the lowest indices.
  const int64_t wanted = k - above;
  std::vector<uint32_t> edge_keys;
  const uint32_t edge_high = edge_low + (1u << kShift);
  for (const Candidate& c : found)
    if (c.key < edge_high) edge_keys.push_back(c.key);
  std::nth_element(edge_keys.begin(), edge_keys.begin() + (wanted - 1), edge_keys.end(), std::greater<>());
  const uint32_t threshold = edge_keys[wanted - 1];
  int64_t ties = k;
  for (const Candidate& c : found) ties -= c.key > threshold;
  std::erase_if(found, [&](const Candidate& c) { return c.key < threshold || (c.key == threshold && ties-- <= 0); });

  if (!by_index) sort_by_key(found);
  for (int64_t i = 0; i < k; ++i) indices[i] = found[i].index;
  return nonfinite;
}

}  // namespace shoal
