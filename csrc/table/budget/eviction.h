// The state of a table with a budget, apart from its rows: the policy and its clocks, pinned ids, counters.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "table/budget/budget.h"
#include "table/budget/curve.h"
#include "table/budget/policy.h"

namespace shoal {

struct Rows;

// How a table keeps its budget: a limit of rows, of bytes, or both.
struct EvictOptions {
  Policy policy = Policy::lru;
  int64_t max_rows = Budget::kUnlimited;
  std::shared_ptr<Budget> bytes;  // null: unlimited
  uint32_t min_age_s = 0;         // younger rows stay
  uint32_t epoch_s = 0;           // length of an epoch; 0: the caller ends it
  bool if_better = false;         // refuse a new id with a lower key than the row that would leave for it
};

class Eviction {
 public:
  explicit Eviction(const EvictOptions& options)
      : options(options), budget(options.bytes ? options.bytes : std::make_shared<Budget>()) {}

  const EvictOptions options;
  const std::shared_ptr<Budget> budget;

  // --- clocks -----------------------------------------------------------------------------------------------------
  Moment begin_call(uint32_t seconds, int64_t rows) {
    Moment now = moment();
    now.call = call_.fetch_add(1, std::memory_order_relaxed) + 1;
    int64_t since = coarse_began_.load(std::memory_order_relaxed);
    const int64_t made = created.load(std::memory_order_relaxed);
    if (made - since > rows / 1024 && coarse_began_.compare_exchange_strong(since, made))
      now.coarse = coarse_.fetch_add(1) + 1;
    uint32_t began = epoch_began_.load(std::memory_order_relaxed);
    if (options.epoch_s && seconds && seconds - began >= options.epoch_s && seconds > began &&
        epoch_began_.compare_exchange_strong(began, seconds) && began)
      now.epoch = next_epoch();
    return now;
  }
  Moment moment() const {
    return {.policy = options.policy,
            .call = call_.load(),
            .coarse = coarse_.load(),
            .epoch = epoch_.load(),
            .score = score_.load(),
            .scored = scored_.load()};
  }
  uint32_t next_epoch() {
    if (options.policy == Policy::epoch_lru) coarse_.store(0);
    return epoch_.fetch_add(1) + 1;
  }
  uint32_t epoch() const { return epoch_.load(); }
  void set_epoch(uint32_t epoch) { epoch_.store(epoch); }
  // The score of rows that are written from now on without one; `every`: also of rows that exist already.
  void set_score(float score, bool every) {
    score_.store(score);
    scored_.store(every);
  }
  // Advances the call clock past this time, in seconds, with which rows were loaded.
  void raise_call(uint32_t seconds) { raise(call_, seconds); }
  // Advances the clocks to those of a loaded row (`Moment::lasting`); false if it has none.
  bool raise_clocks(uint64_t lasting) {
    const auto high = static_cast<uint32_t>(lasting >> 23),
               low = static_cast<uint32_t>(lasting >> 3) & Moment::kLowMask;
    if ((lasting & 7) != static_cast<uint64_t>(options.policy) + 1) return false;
    if (options.policy == Policy::lru || options.policy == Policy::slru) raise(call_, high);
    if (options.policy == Policy::lfu) raise(coarse_, high);
    if (options.policy == Policy::epoch_lru || options.policy == Policy::epoch_lfu) {
      const std::lock_guard lock(loading_);
      const uint32_t epoch = epoch_.load();
      if (static_cast<int32_t>(high - epoch) > 0) {
        epoch_.store(high);
        if (options.policy == Policy::epoch_lru) coarse_.store(low);
      } else if (high == epoch && options.policy == Policy::epoch_lru) {
        raise(coarse_, low);
      }
    }
    return true;
  }
  // Advances the clocks to those of another table, if these are behind.
  void raise_clocks(const Eviction& other) {
    raise(call_, other.call_.load());
    if (options.policy == Policy::lfu) raise(coarse_, other.coarse_.load());
    if (static_cast<int32_t>(other.epoch_.load() - epoch_.load()) >= 0) {
      epoch_.store(other.epoch_.load());
      if (options.policy == Policy::epoch_lru) coarse_.store(other.coarse_.load());
    }
    coarse_began_.store(created.load() - Budget::kUnlimited);  // the next call advances the coarse clock
  }

  // --- pinned ids -------------------------------------------------------------------------------------------------
  void pin(const int64_t* ids, int64_t n) {
    std::unique_lock lock(pins_mutex_);
    pins_.insert(ids, ids + n);
    pinned_.store(!pins_.empty());
  }
  void unpin(const int64_t* ids, int64_t n) {
    std::unique_lock lock(pins_mutex_);
    for (int64_t i = 0; i < n; ++i) pins_.erase(ids[i]);
    pinned_.store(!pins_.empty());
  }
  std::vector<int64_t> pinned() const {
    std::shared_lock lock(pins_mutex_);
    return {pins_.begin(), pins_.end()};
  }
  bool is_pinned(int64_t id) const {
    if (!pinned_.load(std::memory_order_relaxed)) return false;
    std::shared_lock lock(pins_mutex_);
    return pins_.contains(id);
  }

  // --- counters ---------------------------------------------------------------------------------------------------
  std::atomic<int64_t> created{0}, hits{0};  // rows that writes created; writes to rows that existed
  std::atomic<int64_t> evicted{0}, refused{0};
  std::atomic<int64_t> age_sum{0};                // of evicted rows, in seconds
  std::atomic<int64_t> youngest{-1}, oldest{-1};  // ages of evicted rows; -1: none was evicted
  std::atomic<bool> full{false};                  // no more rows or bytes are left
  Curve curve;

  // Evicted rows are copied there, if given.
  std::shared_ptr<struct EvictedRows> sink() const { return sink_.load(); }
  void set_sink(std::shared_ptr<struct EvictedRows> sink) { sink_.store(std::move(sink)); }

  void count(int64_t made, int64_t written, int64_t turned_away) {
    created.fetch_add(made, std::memory_order_relaxed);
    hits.fetch_add(written - made, std::memory_order_relaxed);
    if (turned_away) refused.fetch_add(turned_away, std::memory_order_relaxed);
  }
  void count_ages(int64_t sum, int64_t lowest, int64_t highest) {
    age_sum.fetch_add(sum, std::memory_order_relaxed);
    int64_t seen = youngest.load(std::memory_order_relaxed);
    while ((seen < 0 || lowest < seen) && !youngest.compare_exchange_weak(seen, lowest)) {
    }
    seen = oldest.load(std::memory_order_relaxed);
    while (highest > seen && !oldest.compare_exchange_weak(seen, highest)) {
    }
  }

  // --- a log of evicted and refused ids ----------------------------------------------------------------------------
  // Ids whose rows were evicted, and ids that were refused, since the last take_outcome(); kept while recording is on.
  struct Outcome {
    std::vector<int64_t> gone, refused;
  };
  void record(bool on) { recording_.store(on); }
  bool recording() const { return recording_.load(std::memory_order_relaxed); }
  void note_gone(int64_t id) {
    const std::lock_guard lock(outcome_mutex_);
    outcome_.gone.push_back(id);
  }
  void note_refused(int64_t id) {
    const std::lock_guard lock(outcome_mutex_);
    outcome_.refused.push_back(id);
  }
  Outcome take_outcome() {
    const std::lock_guard lock(outcome_mutex_);
    return std::exchange(outcome_, {});
  }

 private:
  static void raise(std::atomic<uint32_t>& clock, uint32_t to) {
    uint32_t now = clock.load();
    while (static_cast<int32_t>(to - now) > 0 && !clock.compare_exchange_weak(now, to)) {
    }
  }
  std::mutex loading_, outcome_mutex_;
  std::atomic<bool> recording_{false};
  Outcome outcome_;
  std::atomic<uint32_t> call_{0}, coarse_{2}, epoch_{1}, epoch_began_{0};
  std::atomic<int64_t> coarse_began_{0};
  std::atomic<float> score_{0};
  std::atomic<bool> scored_{false};
  mutable std::shared_mutex pins_mutex_;
  std::unordered_set<int64_t> pins_;
  std::atomic<bool> pinned_{false};
  std::atomic<std::shared_ptr<struct EvictedRows>> sink_;
};

}  // namespace shoal
