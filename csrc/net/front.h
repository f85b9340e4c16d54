// The server's front end: threads for HTTP/2, calls for Python, and calls that are answered in batches.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/at_fork.h"
#include "core/rates.h"
#include "net/connection.h"
#include "net/lanes.h"
#include "net/loop.h"
#include "net/tls.h"

namespace shoal::net {

// An event of a call, for Python.
enum class EventKind { call, message, half_close, end };
struct Event {
  EventKind kind;
  CallPtr call;
  std::string message;
  bool compressed = false;
};

class Front : public LaneOwner {
 public:
  struct Options {
    int threads = 1;
    Limits limits;
    LaneLimits lanes;
    TlsFiles tls;                      // without a certificate: no TLS
    bool wants_identity = false;       // calls without an identity go to Python, which refuses them
    std::vector<std::string> bearers;  // accepted authorization headers
    std::vector<std::string> names;    // the callers that send them
    std::shared_ptr<Rates> rates;      // limits of callers; null: none
    // Incremented whenever another version of a model begins to answer.
    std::shared_ptr<const std::atomic<int64_t>> generation = std::make_shared<std::atomic<int64_t>>(0);
  };
  explicit Front(Options options);
  ~Front();

  void add_method(std::string path, bool streams, bool batches);  // before start
  void listen(int fd);                                            // takes ownership of it; before start
  void start();
  void drain();           // accepts no further connections; asks clients to call another server
  void close();           // ends everything
  int64_t calls() const;  // calls without an answer
  int64_t connections() const;
  int64_t hold(int64_t change) { return held_ += change; }  // bytes of incomplete requests

  // For Python: a descriptor that is readable when there are events, and the events.
  int event_fd() const { return event_fd_; }
  std::vector<Event> take_events();
  void reply(const Call& call, Reply reply);

  Lanes& lanes() { return lanes_; }

  // For the loops and batches:
  const Options& options() const { return options_; }
  const Method* method(std::string_view path) const;
  bool may_batch(const Call& call) const;
  bool admits(const Call& call) const;  // whether the caller is within its rate limit
  Notes& notes() { return notes_; }
  void note(std::vector<Note> notes) override { notes_.add(std::move(notes)); }
  void notify(EventKind kind, const CallPtr& call, std::string message = {}, bool compressed = false);
  void close_listener(int fd);
  void hand_out(int fd, std::string address);
  TlsContext* tls() { return tls_.get(); }
  void bounce(const std::vector<CallPtr>& calls) override;
  void send(std::vector<std::pair<Loop*, Reply>> replies) override;
  void add_descriptor(int fd);
  void remove_descriptor(int fd);
  void at_fork(Fork phase);

 private:
  std::atomic<int64_t> held_{0};
  const Options options_;
  std::unique_ptr<TlsContext> tls_;
  std::unordered_map<std::string, Method> methods_;
  std::vector<std::unique_ptr<Loop>> loops_;
  std::vector<int> listeners_;
  std::atomic<size_t> next_loop_{0};
  bool started_ = false, closed_ = false, forked_ = false;

  std::mutex events_mutex_;
  std::vector<Event> events_;
  int event_fd_ = -1;

  std::mutex descriptors_mutex_;
  std::set<int> descriptors_;  // a forked child closes its copies
  Notes notes_;
  Lanes lanes_;
  AtFork fork_{this};
};

}  // namespace shoal::net
