#include "net/client/load.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <nghttp2/nghttp2.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "net/call.h"

// Frames are written and read here and not by nghttp2: a client that takes as much CPU time as the server would measure
// itself. The first request enters its headers into the table; all others have the same bytes, and so has the end of
// every successful answer.

namespace shoal::net {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kDrain = 10 * kSecond;  // for answers after the last call
constexpr size_t kHead = 9;               // bytes before a frame
constexpr size_t kFrame = 16384;          // bytes of a frame that every server accepts
constexpr uint32_t kMost = 0x7fffffff;    // the largest window
constexpr size_t kFull = 256 << 10;       // unwritten bytes after which no further call begins
constexpr int kDynamic = 62;              // number of the last header that entered the table
constexpr int64_t kRefill = 1 << 29;      // received bytes after which the window is enlarged again

enum Frame : uint8_t { kData = 0, kHeaders = 1, kReset = 3, kSettings = 4, kPing = 6, kGoAway = 7, kWindowUpdate = 8 };
constexpr uint8_t kEndStream = 1, kAck = 1, kEndHeaders = 4;

void put_number(std::string* out, uint32_t value, int bytes) {
  for (int i = bytes - 1; i >= 0; --i) out->push_back(static_cast<char>(value >> (8 * i)));
}
uint32_t number(const char* from, int bytes) {
  uint32_t value = 0;
  for (int i = 0; i < bytes; ++i) value = value << 8 | static_cast<uint8_t>(from[i]);
  return value;
}
void put_frame(std::string* out, size_t size, uint8_t type, uint8_t flags, uint32_t stream) {
  put_number(out, static_cast<uint32_t>(size), 3);
  out->push_back(static_cast<char>(type));
  out->push_back(static_cast<char>(flags));
  put_number(out, stream, 4);
}
void put_text(std::string* out, const std::string& text) {  // with its length
  size_t left = text.size();
  if (left < 127) {
    out->push_back(static_cast<char>(left));
  } else {
    out->push_back(127);
    for (left -= 127; left >= 128; left >>= 7) out->push_back(static_cast<char>((left & 127) | 128));
    out->push_back(static_cast<char>(left));
  }
  *out += text;
}

struct Pending {
  uint32_t stream = 0;  // 0: free
  int64_t begin = 0;
};

struct Link {
  int fd = -1;
  bool over = false;
  bool leaving = false;       // the server accepts no further call, but answers those that it has accepted
  uint32_t next = 1;          // stream
  std::vector<Pending> open;  // by the stream's number, modulo their count
  int64_t count = 0;          // of open calls
  std::string out, in;
  size_t out_at = 0;
  bool waits_to_write = false;
  int64_t window = 65535, first_window = 65535, received = 0;
  uint32_t sending = 0;  // the stream whose body is being sent; `sent` bytes of it were
  size_t sent = 0;
  int64_t stream_window = 0;
  int owed = 0;  // calls to begin
  nghttp2_hd_inflater* inflater = nullptr;
  std::string good;  // the last headers of a successful answer, while the header table does not change
  ~Link() {
    if (inflater) nghttp2_hd_inflate_del(inflater);
    if (fd >= 0) ::close(fd);
  }
};

class Client {
 public:
  explicit Client(const LoadOptions& options) : options_(options), body_(framed(options.message.size())) {
    std::copy(options.message.begin(), options.message.end(), body_.begin() + kPrefix);
    std::vector<std::pair<std::string, std::string>> headers = {{":path", options.path},
                                                                {":authority", options.host},
                                                                {"te", "trailers"},
                                                                {"content-type", "application/grpc"}};
    if (options.timeout_ms) headers.emplace_back("grpc-timeout", std::to_string(options.timeout_ms) + "m");
    first_ = known_ = "\x83\x86";  // POST, http
    int number = kDynamic + static_cast<int>(headers.size());
    for (const auto& [name, value] : headers) {
      first_ += '\x40';  // a literal that enters the table
      put_text(&first_, name);
      put_text(&first_, value);
      known_ += static_cast<char>(0x80 | --number);
    }
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
    for (auto& link : links_) link->owed = options_.rate > 0 ? 0 : options_.calls;
    int64_t made = 0;
    size_t next = 0;
    for (;;) {
      const int64_t now = now_ns();
      if (options_.rate > 0 && now < end_) {
        const auto due = static_cast<int64_t>(static_cast<double>(now - begin) * 1e-9 * options_.rate);
        for (; made < due; ++made) {
          Link* link = links_[next++ % links_.size()].get();
          if (link->count + link->owed >= options_.calls || link->over || link->leaving) {
            ++result_.skipped;
          } else {
            ++link->owed;
          }
        }
      }
      int64_t open = 0;
      for (auto& link : links_) {
        flush(link.get(), now);
        open += link->count;
      }
      if (now >= end_ && (!open || now >= end_ + kDrain)) break;
      poll(options_.rate > 0 && now < end_ ? 1 : 50);
    }
    result_.took = options_.seconds;
    for (auto& link : links_)
      if (link->count) result_.statuses[-1] += link->count;
    std::sort(result_.seconds.begin(), result_.seconds.end());
    return std::move(result_);
  }

 private:
  std::unique_ptr<Link> connect() {
    auto link = std::make_unique<Link>();
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
    link->open.resize(std::bit_ceil(static_cast<size_t>(options_.calls) * 8));
    link->out = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    if (nghttp2_hd_inflate_new(&link->inflater)) throw std::bad_alloc();
    put_frame(&link->out, 6, kSettings, 0, 0);
    put_number(&link->out, NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 2);
    put_number(&link->out, kMost, 4);
    put_frame(&link->out, 4, kWindowUpdate, 0, 0);
    put_number(&link->out, kMost - 65535, 4);
    epoll_event event{EPOLLIN, {.ptr = link.get()}};
    epoll_ctl(epoll_, EPOLL_CTL_ADD, link->fd, &event);
    return link;
  }

  Pending& slot(Link* link, uint32_t stream) { return link->open[stream / 2 & (link->open.size() - 1)]; }

  // Begins a call, if its place is free.
  bool begin(Link* link, int64_t now) {
    Pending& pending = slot(link, link->next);
    if (pending.stream) return false;
    pending = {link->next, now};
    ++link->count;
    const std::string& headers = link->next == 1 ? first_ : known_;
    put_frame(&link->out, headers.size(), kHeaders, kEndHeaders, link->next);
    link->out += headers;
    link->sending = link->next;
    link->sent = 0;
    link->stream_window = link->first_window;
    link->next += 2;
    return true;
  }

  // Sends as much of the body as the windows allow; true if all of it was sent.
  bool send_body(Link* link) {
    while (link->sent < body_.size()) {
      const int64_t room = std::min(link->window, link->stream_window);
      if (room <= 0) return false;
      const size_t count = std::min({body_.size() - link->sent, kFrame, static_cast<size_t>(room)});
      const bool last = link->sent + count == body_.size();
      put_frame(&link->out, count, kData, last ? kEndStream : 0, link->sending);
      link->out.append(body_, link->sent, count);
      link->sent += count;
      link->window -= static_cast<int64_t>(count);
      link->stream_window -= static_cast<int64_t>(count);
    }
    link->sending = 0;
    return true;
  }

  void flush(Link* link, int64_t now) {
    if (link->over) return;
    for (;;) {
      while (link->out.size() - link->out_at < kFull) {
        if (link->sending && !send_body(link)) break;
        if (link->owed <= 0 || link->leaving || now >= end_ || !begin(link, now)) break;
        --link->owed;
      }
      if (link->out.empty()) break;
      const ssize_t done = ::send(link->fd, link->out.data() + link->out_at, link->out.size() - link->out_at,
                                  MSG_NOSIGNAL | MSG_DONTWAIT);
      if (done < 0 && errno != EAGAIN && errno != EINTR) return fail(link);
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

  // Gives the connection up: its open calls have no status.
  void fail(Link* link) {
    link->over = true;
    if (link->count) result_.statuses[-1] += link->count;
    link->count = 0;
    link->out.clear();
    epoll_ctl(epoll_, EPOLL_CTL_DEL, link->fd, nullptr);
  }

  void poll(int millis) {
    epoll_event events[64];
    const int count = epoll_wait(epoll_, events, 64, millis);
    const int64_t now = now_ns();
    for (int i = 0; i < count; ++i) {
      auto* link = static_cast<Link*>(events[i].data.ptr);
      if (link->over) continue;
      const ssize_t got = ::recv(link->fd, scratch_, sizeof scratch_, MSG_DONTWAIT);
      if (got > 0) {
        receive(link, scratch_, static_cast<size_t>(got), now);
      } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
        fail(link);
      }
    }
  }

  void receive(Link* link, const char* data, size_t size, int64_t now) {
    if (!link->in.empty()) {
      link->in.append(data, size);
      data = link->in.data();
      size = link->in.size();
    }
    size_t at = 0;
    while (size - at >= kHead && !link->over) {
      const size_t length = number(data + at, 3);
      if (size - at < kHead + length) break;
      take(link, static_cast<uint8_t>(data[at + 3]), static_cast<uint8_t>(data[at + 4]),
           number(data + at + 5, 4) & kMost, data + at + kHead, length, now);
      at += kHead + length;
    }
    link->in = std::string(data + at, size - at);
    if (link->received < kRefill) return;
    put_frame(&link->out, 4, kWindowUpdate, 0, 0);
    put_number(&link->out, static_cast<uint32_t>(link->received), 4);
    link->received = 0;
  }

  void take(Link* link, uint8_t type, uint8_t flags, uint32_t stream, const char* data, size_t size, int64_t now) {
    switch (type) {
      case kData:
        link->received += static_cast<int64_t>(size);
        if (flags & kEndStream) ended(link, stream, -1, now);
        break;
      case kHeaders:
        if (const int status = status_of(link, {data, size}); flags & kEndStream) ended(link, stream, status, now);
        break;
      case kReset:
        ended(link, stream, -1, now);
        break;
      case kSettings:
        if (flags & kAck) break;
        for (size_t i = 0; i + 6 <= size; i += 6)
          if (number(data + i, 2) == NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE) {
            const int64_t window = number(data + i + 2, 4);
            if (link->sending) link->stream_window += window - link->first_window;
            link->first_window = window;
          }
        put_frame(&link->out, 0, kSettings, kAck, 0);
        break;
      case kPing:
        if (flags & kAck) break;
        put_frame(&link->out, size, kPing, kAck, 0);
        link->out.append(data, size);
        break;
      case kGoAway:
        leave(link, number(data, 4) & kMost, now);
        break;
      case kWindowUpdate:
        if (!stream) link->window += number(data, 4);
        if (stream && stream == link->sending) link->stream_window += number(data, 4);
        break;
      default:
        break;
    }
  }

  // The server answers calls up to the stream `last`; those after it have no status.
  void leave(Link* link, uint32_t last, int64_t now) {
    link->leaving = true;
    for (const Pending& pending : link->open)
      if (pending.stream > last) ended(link, pending.stream, -1, now);
  }

  // The status in an answer's headers, -1 if there is none.
  static int status_of(Link* link, std::string_view headers) {
    if (headers == link->good) return 0;
    // Headers that only refer to the table do not change it.
    const bool known = std::all_of(headers.begin(), headers.end(), [](char each) { return (each & 0x80) != 0; });
    int status = -1;
    const auto* at = reinterpret_cast<const uint8_t*>(headers.data());
    for (size_t left = headers.size();;) {
      nghttp2_nv found;
      int flags = 0;
      const ssize_t used = nghttp2_hd_inflate_hd2(link->inflater, &found, &flags, at, left, 1);
      if (used < 0) return -1;
      at += used;
      left -= static_cast<size_t>(used);
      if (flags & NGHTTP2_HD_INFLATE_EMIT &&
          std::string_view(reinterpret_cast<const char*>(found.name), found.namelen) == "grpc-status")
        status = std::atoi(std::string(reinterpret_cast<const char*>(found.value), found.valuelen).c_str());
      if (flags & NGHTTP2_HD_INFLATE_FINAL || (!(flags & NGHTTP2_HD_INFLATE_EMIT) && !left)) break;
    }
    nghttp2_hd_inflate_end_headers(link->inflater);
    if (!known) link->good.clear();
    if (known && !status) link->good = headers;
    return status;
  }

  void ended(Link* link, uint32_t stream, int status, int64_t now) {
    Pending& pending = slot(link, stream);
    if (pending.stream != stream) return;
    ++result_.statuses[status];
    if (!status) result_.seconds.push_back(static_cast<double>(now - pending.begin) * 1e-9);
    pending.stream = 0;
    --link->count;
    if (link->sending == stream) link->sending = 0;
    if (options_.rate <= 0) ++link->owed;
  }

  const LoadOptions& options_;
  std::string body_, first_, known_;
  std::vector<std::unique_ptr<Link>> links_;
  LoadResult result_;
  int epoll_ = -1;
  int64_t end_ = 0;
  char scratch_[128 << 10];
};

}  // namespace

LoadResult make_load(const LoadOptions& options) { return Client(options).run(); }

}  // namespace shoal::net
