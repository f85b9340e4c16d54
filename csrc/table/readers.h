// Readers of a table who do not touch its locks: each announces the stripes it reads in a cache line of its own, so
// that any number of threads read side by side without passing a line of memory around.
//
// Stripes are open to such readers or closed. A writer, who holds the locks of its stripes, closes them and waits for
// the readers that are announced; from then on readers take the locks, which are fair, and one of them opens the
// stripes again while it holds their locks (Dice and Kogan, "BRAVO", 2019).
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

  // Announces a reader of the stripes; null where it has to take their locks.
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

  // For a writer who holds the locks of the stripes: when it returns, nobody reads them.
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
    // Where readers and writers meet, closing costs as much as waiting did: it must not happen all the time.
    const int64_t now = nanoseconds();
    closed_until_.store(now + std::min<int64_t>(9 * (now - begin), 1'000'000), std::memory_order_relaxed);
  }
  // For a reader who holds the locks of the stripes.
  void admit(uint64_t stripes) {
    const int64_t until = closed_until_.load(std::memory_order_relaxed);
    if (until && nanoseconds() < until) return;
    open_.fetch_or(stripes);
  }

  // For a child process: those who were announced are threads that it does not have.
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
