#include "net/front.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "net/grpc.h"

namespace shoal::net {

Front::Front(Options options) : options_(std::move(options)), lanes_(this, options_.lanes, options_.generation) {
  if (!options_.tls.certificate.empty()) tls_ = TlsContext::make(options_.tls);
  event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (event_fd_ < 0) throw std::runtime_error(std::string("eventfd: ") + std::strerror(errno));
  add_descriptor(event_fd_);
  for (int i = 0; i < std::max(1, options_.threads); ++i) loops_.push_back(std::make_unique<Loop>(this, i));
}

Front::~Front() {
  close();
  loops_.clear();  // first, since they use members that are declared after them
  if (!forked_) ::close(event_fd_);
}

void Front::add_method(std::string path, bool streams, bool batches) {
  if (started_) throw std::logic_error("Front.add_method must be called before start()");
  methods_[path] = Method{path, streams, batches};
}

void Front::listen(int fd) {
  add_descriptor(fd);
  listeners_.push_back(fd);
}

void Front::start() {
  if (started_ || closed_) throw std::logic_error("Front.start must be called only once, and before close()");
  started_ = true;
  for (int fd : listeners_) loops_[0]->listen(fd);
  for (auto& loop : loops_) loop->start();
}

void Front::drain() {
  if (forked_ || closed_) return;
  for (auto& loop : loops_) loop->drain();
}

void Front::close() {
  if (closed_ || forked_) return;
  closed_ = true;
  lanes_.stop();
  for (auto& loop : loops_) loop->stop();
  for (auto& loop : loops_) loop->join();
  while (!listeners_.empty()) close_listener(listeners_.back());
}

void Front::close_listener(int fd) {  // called by the first loop's thread, or when no thread runs
  remove_descriptor(fd);
  ::close(fd);
  listeners_.erase(std::find(listeners_.begin(), listeners_.end(), fd));
}

int64_t Front::calls() const {
  int64_t all = 0;
  for (const auto& loop : loops_) all += loop->calls();
  return all;
}

int64_t Front::connections() const {
  int64_t all = 0;
  for (const auto& loop : loops_) all += static_cast<int64_t>(loop->connections());
  return all;
}

// --- Python --------------------------------------------------------------------------------------------------------

std::vector<Event> Front::take_events() {
  std::vector<Event> taken;
  if (forked_) return taken;
  const std::lock_guard lock(events_mutex_);
  uint64_t drained;
  (void)!::read(event_fd_, &drained, sizeof drained);
  taken.swap(events_);
  return taken;
}

void Front::notify(EventKind kind, const CallPtr& call, std::string message, bool compressed) {
  if (kind == EventKind::call) call->watched = true;
  bool first;
  {
    const std::lock_guard lock(events_mutex_);
    first = events_.empty();
    events_.push_back({kind, call, std::move(message), compressed});
  }
  if (!first) return;
  const uint64_t one = 1;
  (void)!::write(event_fd_, &one, sizeof one);
}

void Front::reply(const Call& call, Reply reply) {
  if (forked_ || closed_) return;
  reply.connection = call.connection;
  reply.stream = call.stream;
  std::vector<Reply> one;
  one.push_back(std::move(reply));
  call.loop->post(std::move(one));
}

// --- the loops -----------------------------------------------------------------------------------------------------

const Method* Front::method(std::string_view path) const {
  const auto found = methods_.find(std::string(path));
  return found == methods_.end() ? nullptr : &found->second;
}

bool Front::may_batch(const Call& call) const {
  if (call.compressed || static_cast<int64_t>(call.message.size()) > options_.lanes.max_bytes) return false;
  std::string_view bearer;
  for (const auto& [key, value] : call.metadata) {
    if (key.starts_with("shoal-")) return false;  // a header that Python handles
    if (key == "authorization") bearer = value;
  }
  if (!options_.wants_identity) return true;
  if (options_.bearers.empty()) return !call.peer->common_name.empty();
  bool known = false;
  for (const std::string& each : options_.bearers) known |= same_secret(each, bearer);
  return known;
}

bool Front::admits(const Call& call) const {
  if (!options_.rates || call.method->path.starts_with("/grpc.")) return true;  // health, reflection
  std::string_view bearer;
  for (const auto& [key, value] : call.metadata)
    if (key == "authorization") bearer = value;
  std::string_view caller;
  // Compares all, so that the time reveals nothing.
  for (size_t i = 0; i < options_.names.size() && !bearer.empty(); ++i)
    if (same_secret(options_.bearers[i], bearer)) caller = options_.names[i];
  if (caller.empty()) caller = call.peer->common_name;
  if (caller.empty()) {
    caller = call.peer->address;
    caller = caller.substr(0, caller.rfind(':'));  // without the port
  }
  return options_.rates->admit(caller, now_ns());
}

void Front::hand_out(int fd, std::string address) {
  if (connections() >= options_.limits.max_connections) {
    ::close(fd);
    return;
  }
  add_descriptor(fd);
  loops_[next_loop_++ % loops_.size()]->adopt(fd, std::move(address));
}

void Front::bounce(const std::vector<CallPtr>& calls) {
  for (const CallPtr& call : calls)
    if (!call->ended) notify(EventKind::call, call);
}

void Front::send(std::vector<std::pair<Loop*, Reply>> replies) {
  if (forked_ || closed_) return;
  for (const auto& loop : loops_) {
    std::vector<Reply> own;
    for (auto& [to, reply] : replies)
      if (to == loop.get()) own.push_back(std::move(reply));
    if (own.empty()) continue;
    if (loop.get() == Loop::current) {
      loop->deliver(std::move(own));
    } else {
      loop->post(std::move(own));
    }
  }
}

// --- forks ---------------------------------------------------------------------------------------------------------

void Front::add_descriptor(int fd) {
  const std::lock_guard lock(descriptors_mutex_);
  descriptors_.insert(fd);
}

void Front::remove_descriptor(int fd) {
  const std::lock_guard lock(descriptors_mutex_);
  descriptors_.erase(fd);
}

// A child does not have the threads: it closes its copies of the descriptors and cannot use this object.
void Front::at_fork(Fork phase) {
  if (phase == Fork::prepare) {
    descriptors_mutex_.lock();
    return;
  }
  if (phase == Fork::child && !closed_) {
    for (int fd : descriptors_) ::close(fd);
    descriptors_.clear();
    forked_ = true;
  }
  descriptors_mutex_.unlock();
  if (phase == Fork::child && forked_)
    for (auto& loop : loops_) loop->forget();
}

}  // namespace shoal::net

#ifdef SHOAL_HTTP2_STATIC
// Referenced by the archive of nghttp2 for debugging output (cmake/http2.cmake); never called.
#include <cstdio>
extern "C" __attribute__((visibility("hidden"))) FILE* shoal_http2_stderr;
FILE* shoal_http2_stderr = nullptr;
#endif
