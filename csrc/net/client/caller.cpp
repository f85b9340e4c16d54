#include "net/client/caller.h"

#include <nghttp2/nghttp2.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "net/client/link.h"
#include "net/grpc.h"
#include "net/http2.h"

namespace shoal::net {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kConnect = 5 * kSecond;
constexpr size_t kOut = 256 << 10;

}  // namespace

void Outgoing::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return ended_; });
}

Caller::Caller(int64_t max_message) : max_message_(max_message + static_cast<int64_t>(kPrefix)) {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epoll_ < 0 || wake_ < 0) throw std::runtime_error(std::string("epoll: ") + std::strerror(errno));
  epoll_event event{EPOLLIN, {.ptr = nullptr}};
  epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
  thread_ = new std::thread([this] { run(); });
  pthread_setname_np(thread_->native_handle(), "shoal-caller");
}

Caller::~Caller() {
  if (forked_) {  // the thread and its connections are the parent's
    for (auto& [address, link] : links_) (void)link.release();
    for (auto& link : leaving_) (void)link.release();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake();
  thread_->join();
  delete thread_;
  ::close(wake_);
  ::close(epoll_);
}

// --- for any thread --------------------------------------------------------------------------------------------------

void Caller::wake() {
  const uint64_t one = 1;
  (void)!::write(wake_, &one, sizeof one);
}

OutgoingPtr Caller::start(Request request, double timeout_s) {
  std::vector<Request> one;
  one.push_back(std::move(request));
  return start_all(std::move(one), timeout_s)[0];
}

std::vector<OutgoingPtr> Caller::start_all(std::vector<Request> requests, double timeout_s) {
  const int64_t deadline = now_ns() + static_cast<int64_t>(std::clamp(timeout_s, 0.0, 1e9) * 1e9);
  std::vector<OutgoingPtr> calls;
  for (Request& request : requests) {
    auto call = std::make_shared<Outgoing>();
    call->address_ = std::move(request.address);
    call->path_ = std::move(request.path);
    call->body_ = framed(request.message.size());
    std::copy(request.message.begin(), request.message.end(), call->body_.begin() + kPrefix);
    call->sent_ = std::move(request.metadata);
    call->deadline_ns_ = deadline;
    std::string why;
    if (forked_) {
      end(call, kUnavailable, "the client was created before a fork; create another one in the child");
    } else if (!known(call->address_, &why)) {
      end(call, kUnavailable, "cannot resolve " + call->address_ + ": " + why);
    }
    calls.push_back(std::move(call));
  }
  if (forked_) return calls;
  {
    const std::lock_guard lock(mutex_);
    for (const OutgoingPtr& call : calls)
      if (!call->ended_) started_.push_back(call);
  }
  wake();
  return calls;
}

bool Caller::known(const std::string& address, std::string* why) {
  {
    const std::lock_guard lock(mutex_);
    if (resolved_.contains(address)) return true;
  }
  SocketAddress found = resolve(address, why);  // without the lock: it may take long
  if (found.empty()) return false;
  const std::lock_guard lock(mutex_);
  resolved_.emplace(address, std::move(found));
  return true;
}

void Caller::cancel(const OutgoingPtr& call) {
  if (forked_) return;
  {
    const std::lock_guard lock(mutex_);
    cancelled_.push_back(call);
  }
  wake();
}

void Caller::keep(const std::vector<std::string>& addresses) {
  if (forked_) return;
  {
    const std::lock_guard lock(mutex_);
    kept_.push_back(addresses);
  }
  wake();
}

// A child does not have the thread: it closes its copies of the descriptors, and every call ends at once.
void Caller::at_fork(Fork phase) {
  if (phase == Fork::prepare) {
    mutex_.lock();
    return;
  }
  if (phase == Fork::child) {
    forked_ = true;
    ::close(wake_);
    ::close(epoll_);
  }
  mutex_.unlock();
}

void Caller::end(const OutgoingPtr& call, int status, std::string details) {
  {
    const std::lock_guard lock(call->mutex_);
    if (call->ended_) return;
    call->ended_ = true;
    call->status = status;
    call->details = std::move(details);
  }
  call->changed_.notify_all();
}

// --- the thread ------------------------------------------------------------------------------------------------------

void Caller::run() {
  for (;;) {
    turn();
    const std::lock_guard lock(mutex_);
    if (stopping_) break;
  }
  while (!links_.empty()) fail(links_.begin()->second.get(), kCancelled, "the client was closed");
  while (!leaving_.empty()) fail(leaving_.back().get(), kCancelled, "the client was closed");
  const std::lock_guard lock(mutex_);
  for (const OutgoingPtr& call : started_) end(call, kCancelled, "the client was closed");
}

void Caller::turn() {
  int64_t until = kSecond;
  if (!deadlines_.empty()) until = std::clamp<int64_t>(deadlines_.begin()->first - now_ns(), 0, until);
  epoll_event events[64];
  const int count = epoll_wait(epoll_, events, 64, static_cast<int>((until + 999'999) / 1'000'000));
  for (int i = 0; i < count; ++i) {
    auto* link = static_cast<Link*>(events[i].data.ptr);
    if (!link) {
      uint64_t drained;
      (void)!::read(wake_, &drained, sizeof drained);
      continue;
    }
    receive(link, events[i].events);
  }
  std::vector<OutgoingPtr> started, cancelled;
  std::vector<std::vector<std::string>> kept;
  {
    const std::lock_guard lock(mutex_);
    started.swap(started_);
    cancelled.swap(cancelled_);
    kept.swap(kept_);
  }
  for (const auto& addresses : kept) {
    std::vector<Link*> gone;
    for (auto& [address, link] : links_)
      if (std::find(addresses.begin(), addresses.end(), address) == addresses.end()) gone.push_back(link.get());
    for (Link* link : gone) fail(link, kCancelled, "the connection was closed");
  }
  for (const OutgoingPtr& call : started) begin(call);
  for (const OutgoingPtr& call : cancelled) expire(call, kCancelled, "the call was cancelled");
  for (const int64_t now = now_ns(); !deadlines_.empty() && deadlines_.begin()->first <= now;) {
    const OutgoingPtr call = deadlines_.begin()->second;
    deadlines_.erase(deadlines_.begin());
    expire(call, kDeadlineExceeded, "Deadline Exceeded");
  }
  std::vector<Link*> all;
  for (auto& [address, link] : links_) all.push_back(link.get());
  for (auto& link : leaving_) all.push_back(link.get());
  for (Link* link : all) settle(link);
}

void Caller::expire(const OutgoingPtr& call, int status, const std::string& why) {
  if (Link* link = call->link_) {
    nghttp2_submit_rst_stream(link->session, NGHTTP2_FLAG_NONE, call->stream_, NGHTTP2_CANCEL);
    nghttp2_session_set_stream_user_data(link->session, call->stream_, nullptr);
    call->link_ = nullptr;  // it stays in link->open until the session no longer uses its body
  }
  forget(call);
  end(call, status, why);
}

void Caller::forget(const OutgoingPtr& call) {
  for (auto [at, last] = deadlines_.equal_range(call->deadline_ns_); at != last; ++at) {
    if (at->second != call) continue;
    deadlines_.erase(at);
    return;
  }
}

Caller::Link* Caller::link_to(const std::string& address, std::string* why) {
  const auto found = links_.find(address);
  if (found != links_.end()) {
    if (!found->second->leaving) return found->second.get();
    leaving_.push_back(std::move(found->second));
    links_.erase(found);
  }
  SocketAddress where;
  {
    const std::lock_guard lock(mutex_);
    const auto known = resolved_.find(address);
    if (known != resolved_.end()) where = known->second;
  }
  if (where.empty()) {
    *why = "its address is no longer known";
    return nullptr;
  }
  auto link = std::make_unique<Link>(this, address);
  if (!link->connect(where, why)) return nullptr;
  epoll_event event{EPOLLIN | EPOLLOUT, {.ptr = link.get()}};
  epoll_ctl(epoll_, EPOLL_CTL_ADD, link->fd, &event);
  return (links_[address] = std::move(link)).get();
}

void Caller::begin(const OutgoingPtr& call) {
  const int64_t left = call->deadline_ns_ - now_ns();
  if (left <= 0) return end(call, kDeadlineExceeded, "Deadline Exceeded");
  std::string why;
  Link* link = link_to(call->address_, &why);
  if (!link) return end(call, kUnavailable, "failed to connect to " + call->address_ + ": " + why);
  const std::string timeout = std::to_string(std::min<int64_t>(99'999'999, left / 1000 + 1)) + "u";
  std::vector<nghttp2_nv> headers{header(":method", "POST"),      header(":scheme", "http"),
                                  header(":path", call->path_),   header(":authority", call->address_),
                                  header("te", "trailers"),       header("content-type", "application/grpc"),
                                  header("grpc-timeout", timeout)};
  for (const auto& [key, value] : call->sent_) headers.push_back(header(key, value));
  nghttp2_data_provider provider;
  provider.source.ptr = call.get();
  provider.read_callback = Link::read_body;
  const int32_t id =
      nghttp2_submit_request(link->session, nullptr, headers.data(), headers.size(), &provider, call.get());
  if (id < 0) {
    link->leaving = true;  // no stream numbers are left
    return end(call, kUnavailable, "the connection to " + call->address_ + " takes no further calls");
  }
  link->open[id] = call;
  call->link_ = link;
  call->stream_ = id;
  deadlines_.emplace(call->deadline_ns_, call);
}

// Ends a call whose stream has ended.
void Caller::finish(const OutgoingPtr& call, uint32_t code) {
  if (!call->link_) return;  // it was cancelled or has expired
  call->link_ = nullptr;
  forget(call);
  std::string& got = call->message;
  if (call->status < 0) {
    const bool refused = code == NGHTTP2_REFUSED_STREAM || code == NGHTTP2_NO_ERROR;
    return end(call,
               refused                  ? kUnavailable
               : code == NGHTTP2_CANCEL ? kCancelled
                                        : kInternal,
               "the call at " + call->address_ + " ended without a status (" + nghttp2_http2_strerror(code) + ")");
  }
  if (call->status) return end(call, call->status, std::move(call->details));
  size_t size = 0;
  for (size_t i = 1; i < kPrefix && got.size() >= kPrefix; ++i) size = size << 8 | static_cast<uint8_t>(got[i]);
  if (got.size() < kPrefix || got[0] != 0 || got.size() != kPrefix + size)
    return end(call, kInternal, "the answer of " + call->address_ + " must be one uncompressed message");
  got.erase(0, kPrefix);
  end(call, kOk, {});
}

void Caller::receive(Link* link, uint32_t events) {
  if (!link->connected && events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(link->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error) {
      link->broken = std::strerror(error);
      return;
    }
    link->connected = true;
  }
  if (!(events & (EPOLLIN | EPOLLERR | EPOLLHUP))) return;
  for (;;) {
    const ssize_t got = ::recv(link->fd, scratch_.data(), scratch_.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    if (got <= 0) {
      link->broken = got ? std::strerror(errno) : "the server has closed the connection";
      return;
    }
    if (nghttp2_session_mem_recv(link->session, reinterpret_cast<uint8_t*>(scratch_.data()), static_cast<size_t>(got)) <
        0) {
      link->broken = "the server does not speak HTTP/2";
      return;
    }
    if (static_cast<size_t>(got) < scratch_.size()) return;
  }
}

// Writes pending bytes; closes a connection that is broken or no longer needed.
void Caller::settle(Link* link) {
  if (!link->connected && link->broken.empty() && now_ns() - link->since_ns > kConnect)
    link->broken = "no connection after 5 s";
  while (link->connected && link->broken.empty()) {
    while (link->out.size() - link->out_at < kOut) {
      const uint8_t* data;
      const ssize_t count = nghttp2_session_mem_send(link->session, &data);
      if (count <= 0) break;
      link->out.append(reinterpret_cast<const char*>(data), static_cast<size_t>(count));
    }
    if (link->out.empty()) break;
    const ssize_t done =
        ::send(link->fd, link->out.data() + link->out_at, link->out.size() - link->out_at, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0 && errno != EAGAIN && errno != EWOULDBLOCK) link->broken = std::strerror(errno);
    if (done <= 0) break;
    link->out_at += static_cast<size_t>(done);
    if (link->out_at < link->out.size()) break;
    link->out.clear();
    link->out_at = 0;
  }
  if (!link->broken.empty())
    return fail(link, kUnavailable,
                (link->connected ? "the connection to " : "failed to connect to ") + link->address +
                    (link->connected ? " was lost: " : ": ") + link->broken);
  if (link->leaving && link->open.empty()) return fail(link, kUnavailable, "the server takes no further calls");
  const bool waits = !link->connected || !link->out.empty();
  if (waits == link->waits_to_write) return;
  link->waits_to_write = waits;
  epoll_event event{EPOLLIN | (waits ? EPOLLOUT : 0u), {.ptr = link}};
  epoll_ctl(epoll_, EPOLL_CTL_MOD, link->fd, &event);
}

void Caller::fail(Link* link, int status, const std::string& why) {
  std::unique_ptr<Link> gone;
  const auto found = links_.find(link->address);
  if (found != links_.end() && found->second.get() == link) {
    gone = std::move(found->second);
    links_.erase(found);
  }
  for (auto at = leaving_.begin(); !gone && at != leaving_.end(); ++at) {
    if (at->get() != link) continue;
    gone = std::move(*at);
    leaving_.erase(at);
    break;
  }
  {
    const std::lock_guard lock(mutex_);
    resolved_.erase(link->address);  // the name may belong to another host by now
  }
  const auto open = std::move(link->open);
  link->open.clear();
  for (const auto& [id, call] : open) {
    if (!call->link_) continue;
    call->link_ = nullptr;
    forget(call);
    end(call, status, why);
  }
}

}  // namespace shoal::net
