#include "core/ahead.h"

#include <sys/mman.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "core/per_process.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace shoal {
namespace {

constexpr size_t kHuge = size_t{2} << 20, kPage = 4096;

struct Request {
  const Ahead* owner;
  char* begin;
  size_t bytes;
  int advice;
};

class Worker {
 public:
  void ask(const Request& request) {
    std::lock_guard lock(mutex_);
    if (!started_) {
      try {
        std::thread([this] { loop(); }).detach();
      } catch (const std::system_error&) {
        return;  // without a thread the pages are created when they are touched
      }
      started_ = true;
    }
    requests_.push_back(request);
    wake_.notify_one();
  }

  void stop(const Ahead* owner) {
    std::unique_lock lock(mutex_);
    std::erase_if(requests_, [&](const Request& request) { return request.owner == owner; });
    done_.wait(lock, [&] { return at_work_ != owner; });
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return !requests_.empty(); });
      Request& next = requests_.front();
      Request now = next;
      now.bytes = std::min(next.bytes, kHuge);  // in small pieces, so that stop() does not wait long
      next.begin += now.bytes;
      next.bytes -= now.bytes;
      if (next.bytes == 0) requests_.pop_front();
      at_work_ = now.owner;
      lock.unlock();
      madvise(now.begin, now.bytes, now.advice);
      lock.lock();
      at_work_ = nullptr;
      done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<Request> requests_;
  const Ahead* at_work_ = nullptr;
  bool started_ = false;
};

auto& g_worker = *new PerProcess<Worker>;

}  // namespace

void Ahead::populate(char* begin, size_t bytes) {
  asked_ = true;
  const auto first = reinterpret_cast<uintptr_t>(begin) & ~(kPage - 1);
  const auto end = (reinterpret_cast<uintptr_t>(begin) + bytes + kPage - 1) & ~(kPage - 1);
  g_worker.get().ask({this, reinterpret_cast<char*>(first), end - first, MADV_POPULATE_WRITE});
}

void Ahead::gather(char* begin) {
  asked_ = true;
  g_worker.get().ask({this, begin, kHuge, MADV_COLLAPSE});
}

void Ahead::stop() {
  if (asked_) g_worker.get().stop(this);
}

}  // namespace shoal
