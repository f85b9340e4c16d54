// Forks while other threads are inside a table, a filter and the pool: the child can use all of them.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>
#include <vector>

#include "core/buffers.h"
#include "core/thread_pool.h"
#include "table/filters/filter_sliding.h"
#include "table/table.h"
#include "tests/check.h"

using namespace shoal;

namespace {

[[maybe_unused]] constexpr int64_t kRows = 20000;

[[maybe_unused]] Layout sgd(int32_t dim) {
  Segment segment;
  segment.dim = dim;
  return Layout({segment}, false, false);
}

[[maybe_unused]] std::vector<int64_t> first_ids(int64_t n) {
  std::vector<int64_t> ids(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) ids[i] = i;
  return ids;
}

// Whether a child that does `work` exits with 0 within half a minute.
template <class Work>
bool in_child(Work work) {
  const pid_t child = fork();
  if (child == 0) {
#if defined(__SANITIZE_THREAD__)
    set_num_threads(1);  // the sanitizer ends a child that starts threads
#endif
    _exit(work() ? 0 : 1);
  }
  int status = 0;
  for (int naps = 0; naps < 15000; ++naps) {
    if (waitpid(child, &status, WNOHANG) == child) return WIFEXITED(status) && WEXITSTATUS(status) == 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return false;
}

}  // namespace

// AddressSanitizer's allocator stays locked in a child if other threads allocate during the fork (GCC 12).
#if !defined(__SANITIZE_ADDRESS__)

TEST(a_child_can_use_what_threads_of_the_parent_were_using) {
  set_num_threads(3);
  Table table(sgd(8), 1);
  SlidingFilter filter(100000, 7, Thresholds(1, {}));
  const auto ids = first_ids(kRows);
  const std::vector<float> values(static_cast<size_t>(kRows) * 8, 1.0f);
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (int w = 0; w < 2; ++w) {
    writers.emplace_back([&] {
      std::vector<float> out(values.size());
      while (!stop) {
        table.assign(ids.data(), kRows, values.data(), 7);
        table.lookup(ids.data(), kRows, out.data());
        table.erase(ids.data(), 100);
        for (int64_t id = 0; id < 1000; ++id) filter.add(id, 1);
        give_block(take_block(1 << 22));
      }
    });
  }
  for (int round = 0; round < 30; ++round) {
    CHECK(in_child([&] {
      std::vector<float> out(values.size());
      table.assign(ids.data(), kRows, values.data(), 9);
      table.lookup(ids.data(), kRows, out.data());
      filter.add(5, 1);
      give_block(take_block(1 << 22));
      return out == values && table.size() == kRows;
    }));
  }
  stop = true;
  for (auto& writer : writers) writer.join();
  table.assign(ids.data(), kRows, values.data(), 7);
  CHECK(table.size() == kRows);
}

TEST(tables_are_created_and_destroyed_during_forks) {
  std::atomic<bool> stop{false};
  std::thread maker([&] {
    while (!stop) Table(sgd(4), 1).clear();
  });
  for (int round = 0; round < 20; ++round) CHECK(in_child([] { return Table(sgd(4), 1).size() == 0; }));
  stop = true;
  maker.join();
}

#endif
