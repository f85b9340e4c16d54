#include "core/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/per_process.h"

namespace shoal {
namespace {

struct Job {
  Job(FunctionRef<void(int64_t)> body, int64_t parts, int helpers)
      : body(body), parts(parts), helpers_wanted(helpers) {}

  FunctionRef<void(int64_t)> body;
  int64_t parts;
  int helpers_wanted;  // guarded by Pool::mutex_, like helpers_inside
  int helpers_inside = 0;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;  // written once, by the thread that set `failed`

  void work() {
    for (int64_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
      try {
        body(part);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
        next.store(parts, std::memory_order_relaxed);
      }
    }
  }
};

class Pool {
 public:
  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void run(int64_t parts, int helpers, FunctionRef<void(int64_t)> body) {
    Job job(body, parts, helpers);
    {
      std::lock_guard lock(mutex_);
      while (static_cast<int>(threads_.size()) < helpers) threads_.emplace_back([this] { loop(); });
      jobs_.push_back(&job);
    }
    for (int i = 0; i < helpers; ++i) wake_.notify_one();
    job.work();
    std::unique_lock lock(mutex_);
    if (job.helpers_wanted > 0) jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
    done_.wait(lock, [&] { return job.helpers_inside == 0; });
    lock.unlock();
    if (job.failed.load()) std::rethrow_exception(job.error);
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
      if (stopping_) return;
      Job* job = jobs_.front();
      ++job->helpers_inside;
      if (--job->helpers_wanted == 0) jobs_.pop_front();
      lock.unlock();
      job->work();
      lock.lock();
      if (--job->helpers_inside == 0) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<Job*> jobs_;
  std::vector<std::thread> threads_;
  bool stopping_ = false;
};

int cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

std::atomic<int> g_threads{cpus()};
auto& g_pool = *new PerProcess<Pool>;

}  // namespace

int num_threads() { return g_threads.load(std::memory_order_relaxed); }

void set_num_threads(int n) {
  if (n < 1 || n > 1024) throw std::invalid_argument("num_threads must be 1..1024, got " + std::to_string(n));
  g_threads.store(n);
}

void parallel_parts(int64_t parts, FunctionRef<void(int64_t)> body) {
  int helpers = static_cast<int>(std::min<int64_t>(num_threads(), parts)) - 1;
  if (helpers <= 0) {
    for (int64_t part = 0; part < parts; ++part) body(part);
  } else {
    g_pool.get().run(parts, helpers, body);
  }
}

void parallel_for(int64_t n, int64_t grain, FunctionRef<void(int64_t, int64_t)> body) {
  if (n <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  // A few pieces per thread, so that a slow core does not hold up the rest.
  int64_t parts = std::min<int64_t>((n + grain - 1) / grain, int64_t{4} * num_threads());
  if (parts <= 1 || num_threads() == 1) return body(0, n);
  parallel_parts(parts, [&](int64_t part) {
    int64_t begin = n / parts * part + std::min(part, n % parts);
    int64_t end = begin + n / parts + (part < n % parts);
    body(begin, end);
  });
}

}  // namespace shoal
