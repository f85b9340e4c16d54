#include "core/thread_pool.h"

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/check.h"

using namespace shoal;

TEST(every_index_is_visited_once) {
  for (int threads : {1, 2, 5}) {
    set_num_threads(threads);
    for (int64_t n : {0, 1, 7, 1000, 100003}) {
      std::vector<int> seen(n, 0);
      parallel_for(n, 16, [&](int64_t b, int64_t e) {
        for (; b < e; ++b) seen[b]++;
      });
      for (int s : seen) CHECK(s == 1);
    }
  }
}

TEST(an_exception_reaches_the_caller_and_the_pool_survives) {
  set_num_threads(4);
  CHECK_THROWS(parallel_parts(100, [](int64_t i) {
    if (i == 37) throw std::runtime_error("37");
  }));
  std::atomic<int> count{0};
  parallel_parts(100, [&](int64_t) { count++; });
  CHECK(count == 100);
}

TEST(many_callers_at_once_and_nested_calls) {
  set_num_threads(3);
  std::vector<std::thread> callers;
  std::atomic<int64_t> total{0};
  for (int c = 0; c < 6; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        parallel_parts(8, [&](int64_t) { parallel_for(100, 10, [&](int64_t b, int64_t e) { total += e - b; }); });
      }
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK(total == int64_t{6} * 50 * 8 * 100);
}

TEST(a_bad_thread_count_is_refused) {
  CHECK_THROWS(set_num_threads(0));
  CHECK_THROWS(set_num_threads(100000));
}
