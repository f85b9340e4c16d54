#include "net/loop.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "net/front.h"

namespace shoal::net {
namespace {

constexpr uint64_t kWake = 1;
constexpr uint64_t kListener = uint64_t{1} << 32;  // | descriptor
constexpr uint64_t kConnection = uint64_t{1} << 62;
constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kGoodbye = kSecond / 20;  // after the shutdown notice, for calls that were sent before it arrived

std::string text_of(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address.ss_family == AF_INET) {
    const auto& ip = reinterpret_cast<const sockaddr_in&>(address);
    inet_ntop(AF_INET, &ip.sin_addr, text, sizeof text);
    return "ipv4:" + std::string(text) + ":" + std::to_string(ntohs(ip.sin_port));
  }
  if (address.ss_family == AF_INET6) {
    const auto& ip = reinterpret_cast<const sockaddr_in6&>(address);
    inet_ntop(AF_INET6, &ip.sin6_addr, text, sizeof text);
    return "ipv6:[" + std::string(text) + "]:" + std::to_string(ntohs(ip.sin6_port));
  }
  return "unix:";
}

void set_socket(int fd) {
  const int on = 1, idle = 60, every = 20, tries = 3;
  const int taken_ms = 60'000;  // without an acknowledgement for so long, the other end is gone
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every, sizeof every);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &tries, sizeof tries);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &taken_ms, sizeof taken_ms);
}

}  // namespace

Loop::Loop(Front* front, int number) : front_(front), number_(number), scratch_(128 << 10) {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epoll_ < 0 || wake_ < 0) throw std::runtime_error(std::string("epoll: ") + std::strerror(errno));
  front_->add_descriptor(epoll_);
  front_->add_descriptor(wake_);
  epoll_event event{EPOLLIN, {.u64 = kWake}};
  epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
}

Loop::~Loop() {
  for (int fd : {epoll_, wake_}) {
    if (fd < 0) continue;
    front_->remove_descriptor(fd);
    ::close(fd);
  }
}

void Loop::listen(int fd) {
  listeners_.push_back(fd);
  epoll_event event{EPOLLIN, {.u64 = kListener | static_cast<uint64_t>(fd)}};
  epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
}

void Loop::start() {
  thread_ = new std::thread([this] { run(); });
  pthread_setname_np(thread_->native_handle(), ("shoal-front-" + std::to_string(number_)).c_str());
}

void Loop::join() {
  if (!thread_) return;
  thread_->join();
  delete thread_;
  thread_ = nullptr;
}

void Loop::forget() {
  thread_ = nullptr;  // the child does not have the thread
  epoll_ = wake_ = -1;
  for (auto& [id, connection] : connections_) (void)connection.release();  // their descriptors are closed already
  connections_.clear();
}

thread_local Loop* Loop::current = nullptr;

void Loop::deliver(std::vector<Reply> replies) {
  for (Reply& reply : replies) {
    const auto found = connections_.find(reply.connection);
    if (found == connections_.end()) continue;
    found->second->reply(std::move(reply));
    touch(found->second.get());
  }
}

// --- from other threads --------------------------------------------------------------------------------------------

void Loop::wake() {
  const uint64_t one = 1;
  (void)!::write(wake_, &one, sizeof one);
}

void Loop::post(std::vector<Reply> replies) {
  bool quiet;
  {
    const std::lock_guard lock(mutex_);
    quiet = !woken_;
    woken_ = true;
    if (posted_.empty()) {
      posted_ = std::move(replies);
    } else {
      for (Reply& each : replies) posted_.push_back(std::move(each));
    }
  }
  if (quiet) wake();
}

void Loop::adopt(int fd, std::string address) {
  {
    const std::lock_guard lock(mutex_);
    adopted_.emplace_back(fd, std::move(address));
    woken_ = true;
  }
  wake();
}

void Loop::drain() {
  {
    const std::lock_guard lock(mutex_);
    draining_ = woken_ = true;
  }
  wake();
}

void Loop::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = woken_ = true;
  }
  wake();
}

// --- the thread ----------------------------------------------------------------------------------------------------

void Loop::run() {
  current = this;
  for (;;) {
    try {
      turn();
    } catch (const std::exception&) {  // probably out of memory: the loop must continue
    }
    const std::lock_guard lock(mutex_);
    if (stopping_) break;
  }
  for (auto& [id, connection] : connections_) {
    connection->reset_all();
    connection->go_away();
    connection->flush();
    front_->remove_descriptor(connection->fd());
  }
  connections_.clear();
  count_ = 0;
}

void Loop::turn() {
  epoll_event events[128];
  const int64_t before = now_ns();
  std::unique_ptr<Batch> left = front_->lanes().has_left() ? front_->lanes().take_left() : nullptr;
  int64_t until = left ? 0 : kSecond;
  if (!timers_.empty()) until = std::min(until, std::max<int64_t>(0, std::get<0>(*timers_.begin()) - before));
  if (goodbye_ns_) until = std::min(until, std::max<int64_t>(0, goodbye_ns_ - before));
  const int count = epoll_wait(epoll_, events, 128, static_cast<int>((until + 999'999) / 1'000'000));
  for (int i = 0; i < count; ++i) {
    const uint64_t tag = events[i].data.u64;
    if (tag == kWake) {
      uint64_t drained;
      (void)!::read(wake_, &drained, sizeof drained);
    } else if (tag & kConnection) {
      const auto found = connections_.find(tag & ~kConnection);
      if (found != connections_.end()) serve(found->second.get(), events[i].events);
    } else {
      accept_from(static_cast<int>(tag & ~kListener));
    }
  }
  take_posts();
  run_timers();
  if (left) {
    left->predict();
    left = nullptr;
  }
  if (!batched_.empty()) {
    std::vector<CallPtr> others, refused;
    std::vector<std::unique_ptr<Batch>> now;
    front_->lanes().offer(batched_, &others, &refused, &now);
    batched_.clear();
    for (auto& batch : now) {
      batch->predict();
      batch = nullptr;
    }
    for (const CallPtr& call : others) front_->notify(EventKind::call, call);
    refuse(refused, "too many requests of this model are waiting; try again later or elsewhere");
  }
  if (!too_many_.empty()) {
    refuse(too_many_, "this caller makes more requests per second than it may; try again later");
    too_many_.clear();
  }
  for (size_t i = 0; i < dirty_.size(); ++i) {
    const auto found = connections_.find(dirty_[i]);
    if (found != connections_.end()) settle(found->second.get());
  }
  dirty_.clear();
}

void Loop::refuse(const std::vector<CallPtr>& calls, const char* why) {
  for (const CallPtr& call : calls) {
    const auto found = connections_.find(call->connection);
    if (found == connections_.end()) continue;
    Reply reply;
    reply.stream = call->stream;
    reply.code = kResourceExhausted;
    reply.details = why;
    found->second->reply(std::move(reply));
    touch(found->second.get());
  }
}

void Loop::take_posts() {
  std::vector<Reply> replies;
  std::vector<std::pair<int, std::string>> adopted;
  bool draining;
  {
    const std::lock_guard lock(mutex_);
    replies.swap(posted_);
    adopted.swap(adopted_);
    draining = draining_;
    draining_ = woken_ = false;
  }
  for (auto& [fd, address] : adopted) open(fd, std::move(address));
  deliver(std::move(replies));
  if (draining) {
    for (int fd : listeners_) epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr), front_->close_listener(fd);
    listeners_.clear();
    for (auto& [id, connection] : connections_) {
      connection->say_goodbye();
      touch(connection.get());
    }
    goodbye_ns_ = now_ns() + kGoodbye;
  }
}

void Loop::run_timers() {
  const int64_t now = now_ns();
  while (!timers_.empty() && std::get<0>(*timers_.begin()) <= now) {
    const auto [deadline, connection, stream] = *timers_.begin();
    timers_.erase(timers_.begin());
    const auto found = connections_.find(connection);
    if (found == connections_.end()) continue;
    found->second->expire(stream);
    touch(found->second.get());
  }
  if (goodbye_ns_ && now >= goodbye_ns_) {
    goodbye_ns_ = 0;
    for (auto& [id, connection] : connections_) {
      connection->go_away();
      touch(connection.get());
    }
  }
  if (now - checked_ns_ < kSecond) return;
  checked_ns_ = now;
  std::vector<Connection*> late;
  for (auto& [id, connection] : connections_) {
    if (!connection->check(now)) late.push_back(connection.get());
    touch(connection.get());
  }
  for (Connection* each : late) close(each);
}

void Loop::accept_from(int listener) {
  for (int i = 0; i < 64; ++i) {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    const int fd = accept4(listener, reinterpret_cast<sockaddr*>(&address), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) usleep(10'000);
      return;
    }
    set_socket(fd);
    front_->hand_out(fd, text_of(address));
  }
}

void Loop::open(int fd, std::string address) {
  const uint64_t id = next_id_++;
  std::unique_ptr<Connection> made;  // closes the descriptor, also after an exception
  try {
    std::unique_ptr<TlsSession> tls = front_->tls() ? front_->tls()->accept(fd) : nullptr;
    made =
        std::make_unique<Connection>(this, this, front_->options().limits, id, fd, std::move(tls), std::move(address));
    made->interest = EPOLLIN | EPOLLRDHUP;
    epoll_event event{made->interest, {.u64 = kConnection | id}};
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event)) {
      front_->remove_descriptor(fd);
      return;
    }
    touch(made.get());
    connections_[id] = std::move(made);
    count_ = connections_.size();
  } catch (const std::exception&) {
    front_->remove_descriptor(fd);
    if (!made) ::close(fd);
  }
}

void Loop::serve(Connection* connection, uint32_t events) {
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) || !connection->is_open()) {
    if (!connection->readable(scratch_.data(), scratch_.size())) {
      close(connection);
      return;
    }
  }
  touch(connection);
}

void Loop::touch(Connection* connection) {
  if (connection->dirty) return;
  connection->dirty = true;
  dirty_.push_back(connection->id());
}

void Loop::settle(Connection* connection) {
  connection->dirty = false;
  if (!connection->flush()) {
    close(connection);
    return;
  }
  const uint32_t wanted = EPOLLIN | EPOLLRDHUP | (connection->wants_write() ? EPOLLOUT : 0u);
  if (wanted == connection->interest) return;
  connection->interest = wanted;
  epoll_event event{wanted, {.u64 = kConnection | connection->id()}};
  epoll_ctl(epoll_, EPOLL_CTL_MOD, connection->fd(), &event);
}

void Loop::close(Connection* connection) {
  front_->remove_descriptor(connection->fd());
  connections_.erase(connection->id());  // closes the descriptor, which removes it from epoll
  count_ = connections_.size();
}

// --- calls ---------------------------------------------------------------------------------------------------------

const Method* Loop::method(std::string_view path) const { return front_->method(path); }

int64_t Loop::hold(int64_t change) { return front_->hold(change); }

void Loop::count(int change) {
  calls_.store(calls_.load(std::memory_order_relaxed) + change, std::memory_order_relaxed);
}

void Loop::arrived(const CallPtr& call) {
  if (!front_->admits(*call)) {
    too_many_.push_back(call);
    return;
  }
  if (front_->notes().any()) front_->notes().mark(call.get());
  if (call->method->batches && front_->may_batch(*call)) {
    batched_.push_back(call);
  } else {
    front_->notify(EventKind::call, call);
  }
}

void Loop::message(const CallPtr& call, std::string message, bool compressed) {
  front_->notify(EventKind::message, call, std::move(message), compressed);
}

void Loop::half_closed(const CallPtr& call) { front_->notify(EventKind::half_close, call); }

void Loop::ended(const CallPtr& call) { front_->notify(EventKind::end, call); }

void Loop::set_timer(int64_t deadline_ns, uint64_t connection, int32_t stream) {
  timers_.emplace(deadline_ns, connection, stream);
}

void Loop::clear_timer(int64_t deadline_ns, uint64_t connection, int32_t stream) {
  timers_.erase({deadline_ns, connection, stream});
}

}  // namespace shoal::net
