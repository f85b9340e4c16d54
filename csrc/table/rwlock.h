// A phase-fair reader-writer spin lock: readers and writers take turns, so neither starves (Brandenburg and Anderson,
// 2010).
#pragma once
#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>

namespace shoal {

template <class Done>
void spin_until(Done done) {
  for (int spins = 0; !done(); ++spins) {
    if (spins < 128) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else if (spins < 160) {
      sched_yield();
    } else {
      // More threads than cores: sleep, so that the holder runs; yielding only lets other waiters run.
      const timespec nap{0, 50'000};
      nanosleep(&nap, nullptr);
    }
  }
}

class RwLock {
 public:
  void lock_shared() {
    uint32_t writer = readers_in_.fetch_add(kReader, std::memory_order_acquire) & kWriterBits;
    if (writer) spin_until([&] { return (readers_in_.load(std::memory_order_acquire) & kWriterBits) != writer; });
  }
  void unlock_shared() { readers_out_.fetch_add(kReader, std::memory_order_release); }

  void lock() {
    uint32_t ticket = writers_in_.fetch_add(1, std::memory_order_acquire);
    spin_until([&] { return writers_out_.load(std::memory_order_acquire) == ticket; });
    uint32_t readers = readers_in_.fetch_add(kPresent | (ticket & kPhase), std::memory_order_acquire) & ~kWriterBits;
    spin_until([&] { return readers_out_.load(std::memory_order_acquire) == readers; });
  }
  void unlock() {
    readers_in_.fetch_and(~kWriterBits, std::memory_order_release);
    writers_out_.fetch_add(1, std::memory_order_release);
  }

  // Unlocks it for a forked child, which does not have the threads that held the lock or waited for it.
  void reset() {
    for (auto* count : {&readers_in_, &readers_out_, &writers_in_, &writers_out_}) count->store(0);
  }

 private:
  static constexpr uint32_t kReader = 4, kPresent = 2, kPhase = 1, kWriterBits = 3;

  std::atomic<uint32_t> readers_in_{0}, readers_out_{0}, writers_in_{0}, writers_out_{0};
};

}  // namespace shoal
