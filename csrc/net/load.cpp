#include "net/load.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <nghttp2/nghttp2.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <unordered_map>

#include "net/call.h"

namespace shoal::net {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kDrain = 10 * kSecond;  // for answers after the last call was made

struct Pending {
  int64_t begin;
  size_t sent = 0;
  int status = -1;
};

class Client;

struct Link {
  Client* client;
  int fd = -1;
  nghttp2_session* session = nullptr;
  std::unordered_map<int32_t, Pending> open;
  std::string out;
  size_t out_at = 0;
  bool waits_to_write = false;
  ~Link() {
    if (session) nghttp2_session_del(session);
    if (fd >= 0) ::close(fd);
  }
};

nghttp2_nv header(const std::string& name, const std::string& value) {
  return {reinterpret_cast<uint8_t*>(const_cast<char*>(name.data())),
          reinterpret_cast<uint8_t*>(const_cast<char*>(value.data())), name.size(), value.size(),
          NGHTTP2_NV_FLAG_NO_COPY_NAME | NGHTTP2_NV_FLAG_NO_COPY_VALUE};
}

class Client {
 public:
  explicit Client(const LoadOptions& options) : options_(options), body_(framed(options.message.size())) {
    std::copy(options.message.begin(), options.message.end(), body_.begin() + kPrefix);
    headers_ = {{":method", "POST"},          {":scheme", "http"}, {":path", options.path},
                {":authority", options.host}, {"te", "trailers"},  {"content-type", "application/grpc"}};
    if (options.timeout_ms) headers_.emplace_back("grpc-timeout", std::to_string(options.timeout_ms) + "m");
    for (const auto& each : options.metadata) headers_.push_back(each);
    for (const auto& [name, value] : headers_) nvs_.push_back(header(name, value));
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    for (int i = 0; i < options.connections; ++i) links_.push_back(connect());
  }
  ~Client() {
    links_.clear();
    ::close(epoll_);
  }

  LoadResult run() {
    const int64_t begin = now_ns();
    end_ = begin + static_cast<int64_t>(options_.seconds * 1e9);
    if (options_.rate <= 0) {
      for (auto& link : links_)
        for (int i = 0; i < options_.calls; ++i) call(link.get());
    }
    int64_t made = 0;
    size_t next = 0;
    for (;;) {
      const int64_t now = now_ns();
      if (options_.rate > 0 && now < end_) {
        const auto due = static_cast<int64_t>(static_cast<double>(now - begin) * 1e-9 * options_.rate);
        for (; made < due; ++made) {
          Link* link = links_[next++ % links_.size()].get();
          if (static_cast<int>(link->open.size()) >= options_.calls) {
            ++result_.skipped;
          } else {
            call(link);
          }
        }
      }
      size_t open = 0;
      for (auto& link : links_) {
        flush(link.get());
        open += link->open.size();
      }
      if (now >= end_ && (!open || now >= end_ + kDrain)) break;
      const bool paced = options_.rate > 0 && now < end_;
      poll(paced ? 1 : 50);
    }
    result_.took = options_.seconds;
    for (auto& link : links_) result_.statuses[-1] += static_cast<int64_t>(link->open.size());
    if (!result_.statuses[-1]) result_.statuses.erase(-1);
    std::sort(result_.seconds.begin(), result_.seconds.end());
    return std::move(result_);
  }

 private:
  std::unique_ptr<Link> connect() {
    auto link = std::make_unique<Link>();
    link->client = this;
    link->fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(options_.port));
    inet_pton(AF_INET, options_.host.c_str(), &address.sin_addr);
    if (link->fd < 0 || ::connect(link->fd, reinterpret_cast<sockaddr*>(&address), sizeof address))
      throw std::runtime_error("cannot connect to " + options_.host + ":" + std::to_string(options_.port) + ": " +
                               std::strerror(errno));
    const int on = 1;
    setsockopt(link->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    nghttp2_session_callbacks* callbacks;
    nghttp2_session_callbacks_new(&callbacks);
    nghttp2_session_callbacks_set_on_header_callback(callbacks, on_header);
    nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, on_close);
    nghttp2_session_client_new(&link->session, callbacks, link.get());
    nghttp2_session_callbacks_del(callbacks);
    const nghttp2_settings_entry window{NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 4 << 20};
    nghttp2_submit_settings(link->session, NGHTTP2_FLAG_NONE, &window, 1);
    nghttp2_session_set_local_window_size(link->session, NGHTTP2_FLAG_NONE, 0, 16 << 20);
    epoll_event event{EPOLLIN, {.ptr = link.get()}};
    epoll_ctl(epoll_, EPOLL_CTL_ADD, link->fd, &event);
    return link;
  }

  static int on_header(nghttp2_session*, const nghttp2_frame* frame, const uint8_t* name, size_t name_size,
                       const uint8_t* value, size_t value_size, uint8_t, void* user) {
    if (std::string_view(reinterpret_cast<const char*>(name), name_size) != "grpc-status") return 0;
    auto& open = static_cast<Link*>(user)->open;
    const auto found = open.find(frame->hd.stream_id);
    if (found != open.end())
      found->second.status = std::atoi(std::string(reinterpret_cast<const char*>(value), value_size).c_str());
    return 0;
  }
  static int on_close(nghttp2_session*, int32_t id, uint32_t, void* user) {
    auto* link = static_cast<Link*>(user);
    const auto found = link->open.find(id);
    if (found == link->open.end()) return 0;
    link->client->ended(link, found->second);
    link->open.erase(found);
    return 0;
  }
  static ssize_t read_body(nghttp2_session*, int32_t id, uint8_t* into, size_t size, uint32_t* flags,
                           nghttp2_data_source* source, void*) {
    auto* link = static_cast<Link*>(source->ptr);
    Pending& pending = link->open[id];
    const std::string& body = link->client->body_;
    const size_t count = std::min(size, body.size() - pending.sent);
    std::memcpy(into, body.data() + pending.sent, count);
    pending.sent += count;
    if (pending.sent == body.size()) *flags |= NGHTTP2_DATA_FLAG_EOF;
    return static_cast<ssize_t>(count);
  }

  void ended(Link* link, const Pending& pending) {
    const int64_t now = now_ns();
    ++result_.statuses[pending.status];
    if (!pending.status) result_.seconds.push_back(static_cast<double>(now - pending.begin) * 1e-9);
    if (options_.rate <= 0 && now < end_ && link->session) ++owed_[link];
  }

  void call(Link* link) {
    nghttp2_data_provider provider;
    provider.source.ptr = link;
    provider.read_callback = read_body;
    const int32_t id = nghttp2_submit_request(link->session, nullptr, nvs_.data(), nvs_.size(), &provider, nullptr);
    if (id > 0) link->open[id].begin = now_ns();
  }

  void flush(Link* link) {
    for (int& left = owed_[link]; left > 0; --left) call(link);
    for (;;) {
      while (link->out.size() - link->out_at < 256 << 10) {
        const uint8_t* data;
        const ssize_t count = nghttp2_session_mem_send(link->session, &data);
        if (count <= 0) break;
        link->out.append(reinterpret_cast<const char*>(data), static_cast<size_t>(count));
      }
      if (link->out.empty()) break;
      const ssize_t done = ::send(link->fd, link->out.data() + link->out_at, link->out.size() - link->out_at,
                                  MSG_NOSIGNAL | MSG_DONTWAIT);
      if (done < 0 && errno != EAGAIN && errno != EINTR) fail(link);
      if (done <= 0) break;
      link->out_at += static_cast<size_t>(done);
      if (link->out_at < link->out.size()) break;
      link->out.clear();
      link->out_at = 0;
    }
    const bool waits = !link->out.empty();
    if (waits == link->waits_to_write) return;
    link->waits_to_write = waits;
    epoll_event event{EPOLLIN | (waits ? EPOLLOUT : 0u), {.ptr = link}};
    epoll_ctl(epoll_, EPOLL_CTL_MOD, link->fd, &event);
  }

  // The connection is over: what was open has no status.
  void fail(Link* link) {
    for (const auto& [id, pending] : link->open) ++result_.statuses[pending.status];
    link->open.clear();
    link->out.clear();
    link->out_at = 0;
    owed_[link] = 0;
    epoll_ctl(epoll_, EPOLL_CTL_DEL, link->fd, nullptr);
  }

  void poll(int millis) {
    epoll_event events[64];
    const int count = epoll_wait(epoll_, events, 64, millis);
    for (int i = 0; i < count; ++i) {
      auto* link = static_cast<Link*>(events[i].data.ptr);
      const ssize_t got = ::recv(link->fd, scratch_, sizeof scratch_, MSG_DONTWAIT);
      if (got > 0) {
        if (nghttp2_session_mem_recv(link->session, reinterpret_cast<uint8_t*>(scratch_), static_cast<size_t>(got)) < 0)
          fail(link);
      } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
        fail(link);
      }
    }
  }

  const LoadOptions& options_;
  std::string body_;
  std::vector<std::pair<std::string, std::string>> headers_;
  std::vector<nghttp2_nv> nvs_;
  std::vector<std::unique_ptr<Link>> links_;
  std::unordered_map<Link*, int> owed_;  // calls that answers have made room for
  LoadResult result_;
  int epoll_ = -1;
  int64_t end_ = 0;
  char scratch_[128 << 10];
};

}  // namespace

LoadResult make_load(const LoadOptions& options) { return Client(options).run(); }

}  // namespace shoal::net
