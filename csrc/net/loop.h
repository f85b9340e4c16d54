// A thread that waits for some of the connections and does all work on them.
#pragma once
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "net/connection.h"

namespace shoal::net {

class Front;

class Loop : public CallSink {
 public:
  Loop(Front* front, int number);
  ~Loop() override;

  // From any thread.
  void post(std::vector<Reply> replies);
  void adopt(int fd, std::string address);
  void drain();  // asks clients to call another server; open calls are still answered
  void stop();   // ends the thread and all connections
  void listen(int fd);
  void start();
  void join();
  void forget();  // in a forked child, which has no such thread
  size_t connections() const { return count_.load(std::memory_order_relaxed); }
  int64_t calls() const { return calls_.load(std::memory_order_relaxed); }

  // For its own thread:
  static thread_local Loop* current;  // the calling thread's loop, or null
  void deliver(std::vector<Reply> replies);
  const Method* method(std::string_view path) const override;
  void count(int change) override;
  int64_t hold(int64_t change) override;
  void arrived(const CallPtr& call) override;
  void message(const CallPtr& call, std::string message, bool compressed) override;
  void half_closed(const CallPtr& call) override;
  void ended(const CallPtr& call) override;
  void set_timer(int64_t deadline_ns, uint64_t connection, int32_t stream) override;
  void clear_timer(int64_t deadline_ns, uint64_t connection, int32_t stream) override;

 private:
  void run();
  void turn();
  void wake();
  void take_posts();
  void accept_from(int listener);
  void open(int fd, std::string address);
  void serve(Connection* connection, uint32_t events);
  void touch(Connection* connection);
  void settle(Connection* connection);
  void refuse(const std::vector<CallPtr>& calls, const char* why);
  void close(Connection* connection);
  void run_timers();

  Front* const front_;
  const int number_;
  int epoll_ = -1, wake_ = -1;
  std::vector<int> listeners_;
  std::unordered_map<uint64_t, std::unique_ptr<Connection>> connections_;
  std::vector<uint64_t> dirty_;
  std::vector<CallPtr> batched_;   // calls of this turn that may be answered in batches
  std::vector<CallPtr> too_many_;  // calls beyond their caller's rate limit
  std::set<std::tuple<int64_t, uint64_t, int32_t>> timers_;
  uint64_t next_id_ = 16;
  int64_t checked_ns_ = 0, goodbye_ns_ = 0;
  std::vector<char> scratch_;
  std::atomic<size_t> count_{0};
  std::atomic<int64_t> calls_{0};  // written only by its own thread

  std::mutex mutex_;  // guards the members below, which other threads write
  std::vector<Reply> posted_;
  std::vector<std::pair<int, std::string>> adopted_;
  bool draining_ = false, stopping_ = false, woken_ = false;
  std::thread* thread_ = nullptr;
};

}  // namespace shoal::net
