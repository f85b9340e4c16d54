// Readers of a table that do not take its locks: each announces the stripes that it reads in its own cache line, so
// that any number of threads can read without sharing a line that is written.
//
// A stripe is open to such readers or closed. A writer, which holds the locks of its stripes, closes them and waits for
// the announced readers; from then on readers take the locks, which are fair, and one of them opens the stripes again
// while it holds their locks (Dice and Kogan, "BRAVO", 2019).
#pragma once
#include <time.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <thread>

#include "table/rwlock.h"

namespace shoal {

class Readers {
 public:
  using Place = std::atomic<uint64_t>;

  // Announces a reader of the stripes; null if it must take their locks.
  Place* enter(uint64_t stripes) {
    if ((open_.load(std::memory_order_relaxed) & stripes) != stripes) return nullptr;
    const unsigned mine = number_of_thread();
    for (unsigned k = 0; k < 4; ++k) {
      Place& place = places_[(mine + k) & mask_].stripes;
      uint64_t nobody = 0;
      if (place.load(std::memory_order_relaxed) || !place.compare_exchange_strong(nobody, stripes)) continue;
      // Either this sees that a writer has closed a stripe, or that writer sees the announcement.
      if ((open_.load() & stripes) == stripes) return &place;
      leave(&place);
      return nullptr;
    }
    return nullptr;
  }
  static void leave(Place* place) { place->store(0, std::memory_order_release); }

  // For a writer that holds the locks of the stripes: waits until nobody reads them.
  void exclude(uint64_t stripes) {
    if (!(open_.load() & stripes)) return;
    open_.fetch_and(~stripes);
    int64_t begin = 0;
    for (unsigned k = 0; k <= mask_; ++k) {
      const Place& place = places_[k].stripes;
      if (!(place.load() & stripes)) continue;
      if (!begin) begin = nanoseconds();
      spin_until([&] { return !(place.load() & stripes); });
    }
    if (!begin) return;
    // Closing has cost this wait: keep stripes closed for nine times as long, so that it does not happen all the time.
    const int64_t now = nanoseconds();
    closed_until_.store(now + std::min<int64_t>(9 * (now - begin), 1'000'000), std::memory_order_relaxed);
  }
  // For a reader that holds the locks of the stripes: opens them again.
  void admit(uint64_t stripes) {
    const int64_t until = closed_until_.load(std::memory_order_relaxed);
    if (until && nanoseconds() < until) return;
    open_.fetch_or(stripes);
  }

  // For a forked child, which does not have the threads that were announced.
  void reset() {
    for (unsigned k = 0; k <= mask_; ++k) places_[k].stripes.store(0);
  }

 private:
  struct alignas(64) Line {
    Place stripes{0};  // 0: free
  };
  static unsigned number_of_thread() {
    static std::atomic<unsigned> next{0};
    thread_local const unsigned number = next.fetch_add(1, std::memory_order_relaxed);
    return number;
  }
  static int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
  }
  static unsigned lines() { return std::bit_ceil(std::clamp(std::thread::hardware_concurrency(), 4u, 64u)); }

  alignas(64) std::atomic<uint64_t> open_{~uint64_t{0}};
  std::atomic<int64_t> closed_until_{0};
  const unsigned mask_ = lines() - 1;
  const std::unique_ptr<Line[]> places_{new Line[mask_ + 1]};
};

}  // namespace shoal
