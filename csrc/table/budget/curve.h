// How often a table of another size would have found its rows: reuse distances of a sample of ids.
//
// An id is sampled by its hash (Waldspurger et al., "SHARDS", 2015): of those below a threshold every write is seen,
// and the number of sampled ids written since the last write of an id, over the rate, estimates how many rows an LRU
// table needs to still have it. The threshold falls so that the sample stays small.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace shoal {

class Curve {
 public:
  static constexpr uint64_t kAtFirst = ~uint64_t{0} >> 3;
  explicit Curve(uint64_t threshold = kAtFirst) : threshold_(threshold) {}

  // Distinct ids of one call, or occurrences in order.
  void wrote(const int64_t* ids, int64_t n, const uint8_t* drop);
  // The same of a call of ``writes`` ids, of which somebody else has chosen those that may be sampled.
  void sampled(const int64_t* ids, int64_t n, int64_t writes);
  static uint64_t hash(int64_t id);  // ids whose hash is below the threshold are sampled
  uint64_t threshold() const { return threshold_.load(std::memory_order_relaxed); }

  struct Points {
    std::vector<int64_t> rows;   // of a table, rising
    std::vector<double> misses;  // the share of sampled writes whose id would not be there
    int64_t sampled = 0;         // writes
  };
  Points points() const;

 private:
  static constexpr size_t kMost = 8192;  // ids in the sample
  void see(int64_t id, uint64_t hash);
  void forget_some();
  void renumber();
  void add(size_t place, int32_t by);
  int64_t after(size_t place) const;  // sampled ids whose last write is behind it

  struct Last {
    uint64_t hash;
    uint32_t place;  // in the order of last writes
  };
  mutable std::mutex mutex_;
  std::atomic<uint64_t> threshold_;
  std::unordered_map<int64_t, Last> last_;
  std::vector<int32_t> tree_;  // a Fenwick tree over places
  uint32_t next_ = 0;
  std::vector<double> counts_;  // of distances, each bin an eighth of a doubling
  double total_ = 0;            // writes that the sample stands for
  std::atomic<int64_t> writes_{0};
  int64_t sampled_ = 0;
};

}  // namespace shoal
