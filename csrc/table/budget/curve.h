// Estimates how often a table of another size would have found its rows, from the reuse distances of a sample of ids.
//
// Ids are sampled by hash (Waldspurger et al., "SHARDS", 2015): every write of an id below a threshold is counted. The
// number of sampled ids written since the last write of an id, divided by the sampling rate, estimates how many rows an
// LRU table needs to still have it. The threshold is lowered to keep the sample small.
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

  // Counts the writes of one call: distinct ids, or occurrences in order.
  void wrote(const int64_t* ids, int64_t n, const uint8_t* drop);
  // The same for a call of `writes` ids of which the caller has chosen those to sample.
  void sampled(const int64_t* ids, int64_t n, int64_t writes);
  static uint64_t hash(int64_t id);  // ids whose hash is below the threshold are sampled
  uint64_t threshold() const { return threshold_.load(std::memory_order_relaxed); }

  struct Points {
    std::vector<int64_t> rows;   // sizes of a table, ascending
    std::vector<double> misses;  // the share of writes whose id a table of that size would not have
    int64_t sampled = 0;         // sampled writes
  };
  Points points() const;

 private:
  static constexpr size_t kMost = 8192;  // ids in the sample
  void see(int64_t id, uint64_t hash);
  void forget_some();
  void renumber();
  void add(size_t place, int32_t by);
  int64_t after(size_t place) const;  // sampled ids whose last write came later

  struct Last {
    uint64_t hash;
    uint32_t place;  // in the order of last writes
  };
  mutable std::mutex mutex_;
  std::atomic<uint64_t> threshold_;
  std::unordered_map<int64_t, Last> last_;
  std::vector<int32_t> tree_;  // a Fenwick tree over places
  uint32_t next_ = 0;
  std::vector<double> counts_;  // of distances, in bins of an eighth of a doubling
  double total_ = 0;            // writes that the sample represents
  std::atomic<int64_t> writes_{0};
  int64_t sampled_ = 0;
};

}  // namespace shoal
