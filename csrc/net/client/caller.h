// gRPC calls to other servers, many at a time: one thread speaks HTTP/2 on unencrypted connections, one per address.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/at_fork.h"
#include "net/call.h"
#include "net/client/address.h"

namespace shoal::net {

// A started call. Its answer may be read after wait().
class Outgoing {
 public:
  void wait();  // until it has ended, at the latest by its deadline
  int status = -1;
  std::string details;
  std::string message;
  Metadata metadata;  // of the answer: headers and trailers

 private:
  friend class Caller;
  struct Link;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  // For the caller's thread:
  std::string address_, path_, body_;
  Metadata sent_;
  int64_t deadline_ns_ = 0;
  size_t body_at_ = 0;
  Link* link_ = nullptr;
  int32_t stream_ = 0;
};
using OutgoingPtr = std::shared_ptr<Outgoing>;

class Caller {
 public:
  explicit Caller(int64_t max_message);
  ~Caller();
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  struct Request {
    std::string address, path, message;
    Metadata metadata;
  };
  // Begins a call of the method at `path` of a server at "host:port", "[v6]:port" or "unix:path". It may have to
  // resolve the host's name; otherwise it returns at once. The call reports errors.
  OutgoingPtr start(Request request, double timeout_s);
  // Several at once, under one deadline.
  std::vector<OutgoingPtr> start_all(std::vector<Request> requests, double timeout_s);
  void cancel(const OutgoingPtr& call);
  // Closes the connections to all other addresses; calls on them end as cancelled.
  void keep(const std::vector<std::string>& addresses);
  void at_fork(Fork phase);

 private:
  using Link = Outgoing::Link;
  friend struct Outgoing::Link;
  bool known(const std::string& address, std::string* why);
  void run();
  void turn();
  void begin(const OutgoingPtr& call);
  Link* link_to(const std::string& address, std::string* why);
  void settle(Link* link);
  void fail(Link* link, int status, const std::string& why);
  void receive(Link* link, uint32_t events);
  void finish(const OutgoingPtr& call, uint32_t code);
  void expire(const OutgoingPtr& call, int status, const std::string& why);
  void forget(const OutgoingPtr& call);
  static void end(const OutgoingPtr& call, int status, std::string details);
  void wake();

  const int64_t max_message_;
  int epoll_ = -1, wake_ = -1;
  std::unordered_map<std::string, std::unique_ptr<Link>> links_;
  std::vector<std::unique_ptr<Link>> leaving_;  // these accept no further calls
  std::multimap<int64_t, OutgoingPtr> deadlines_;
  std::vector<char> scratch_ = std::vector<char>(128 << 10);

  std::mutex mutex_;  // guards the members below, which other threads write
  std::vector<OutgoingPtr> started_, cancelled_;
  std::unordered_map<std::string, SocketAddress> resolved_;
  std::vector<std::vector<std::string>> kept_;
  bool stopping_ = false, forked_ = false;
  std::thread* thread_ = nullptr;
  AtFork fork_{this};
};

}  // namespace shoal::net
