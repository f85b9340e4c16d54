// The bytes of a connection, and what nghttp2 finds in them.
#include "net/connection.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <vector>

#include "net/grpc.h"
#include "net/stream.h"

namespace shoal::net {
namespace {

constexpr size_t kOutBytes = 256 << 10;  // bytes to take from the session at a time
constexpr int kWindow = 1 << 20;         // bytes of a call's message that a client may send ahead
constexpr int kConnectionWindow = 16 << 20;
constexpr size_t kMaxHeaderBytes = 64 << 10;

bool is_reserved(std::string_view name) {
  return name.empty() || name[0] == ':' || name == "te" || name == "content-type" || name.starts_with("grpc-");
}

}  // namespace

// Callbacks of nghttp2. An exception ends the connection, not the server.
struct Connection::Callbacks {
  static Connection* of(void* user) { return static_cast<Connection*>(user); }
  static Stream* stream(nghttp2_session* session, int32_t id) {
    return static_cast<Stream*>(nghttp2_session_get_stream_user_data(session, id));
  }
  static int begin_headers(nghttp2_session* session, const nghttp2_frame* frame, void* user) {
    if (frame->hd.type != NGHTTP2_HEADERS || frame->headers.cat != NGHTTP2_HCAT_REQUEST) return 0;
    return guarded([&] {
      auto made = std::make_unique<Stream>(frame->hd.stream_id);
      nghttp2_session_set_stream_user_data(session, frame->hd.stream_id, made.get());
      of(user)->streams_[frame->hd.stream_id] = std::move(made);
      return 0;
    });
  }
  static int on_header(nghttp2_session* session, const nghttp2_frame* frame, const uint8_t* name, size_t name_size,
                       const uint8_t* value, size_t value_size, uint8_t, void*) {
    Stream* mine = stream(session, frame->hd.stream_id);
    if (!mine || frame->hd.type != NGHTTP2_HEADERS) return 0;
    return guarded([&] {
      const std::string_view key(reinterpret_cast<const char*>(name), name_size);
      const std::string_view text(reinterpret_cast<const char*>(value), value_size);
      mine->header_bytes += name_size + value_size + 32;
      if (mine->header_bytes > kMaxHeaderBytes) return static_cast<int>(NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE);
      if (frame->headers.cat != NGHTTP2_HCAT_REQUEST) return 0;  // trailers of a request are ignored
      if (key == ":path") mine->path = text;
      if (key == ":method") mine->verb = text;
      if (key == "content-type") mine->content_type = text;
      if (key == "grpc-encoding") mine->call->encoding = text;
      if (key == "grpc-timeout") {
        const int64_t left = parse_timeout(text);
        mine->bad_timeout = left < 0;
        if (left >= 0) mine->call->deadline_ns = now_ns() + left;
      }
      if (!is_reserved(key)) mine->call->metadata.emplace_back(key, text);
      return 0;
    });
  }
  static int frame_recv(nghttp2_session* session, const nghttp2_frame* frame, void* user) {
    if (frame->hd.type == NGHTTP2_SETTINGS) of(user)->opened_ = true;
    if (frame->hd.type != NGHTTP2_HEADERS && frame->hd.type != NGHTTP2_DATA) return 0;
    Stream* mine = stream(session, frame->hd.stream_id);
    if (!mine) return 0;
    return guarded([&] {
      if (frame->hd.type == NGHTTP2_HEADERS && frame->headers.cat == NGHTTP2_HCAT_REQUEST) of(user)->begin(mine);
      if (frame->hd.flags & NGHTTP2_FLAG_END_STREAM) of(user)->finish(mine);
      return 0;
    });
  }
  static int data_chunk(nghttp2_session* session, uint8_t, int32_t id, const uint8_t* data, size_t size, void* user) {
    Stream* mine = stream(session, id);
    if (!mine) return 0;
    return guarded([&] {
      of(user)->feed(mine, data, size);
      return 0;
    });
  }
  static int stream_close(nghttp2_session* session, int32_t id, uint32_t, void* user) {
    Stream* mine = stream(session, id);
    if (!mine) return 0;
    return guarded([&] {
      of(user)->close_stream(mine);
      of(user)->streams_.erase(id);
      return 0;
    });
  }
  // If the answer ended before its request, discards the rest of the request.
  static int frame_send(nghttp2_session* session, const nghttp2_frame* frame, void*) {
    if (!(frame->hd.flags & NGHTTP2_FLAG_END_STREAM)) return 0;
    if (frame->hd.type != NGHTTP2_HEADERS && frame->hd.type != NGHTTP2_DATA) return 0;
    const Stream* mine = stream(session, frame->hd.stream_id);
    if (mine && !mine->received)
      nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, frame->hd.stream_id, NGHTTP2_NO_ERROR);
    return 0;
  }
  static nghttp2_session_callbacks* all() {
    static nghttp2_session_callbacks* made = [] {
      nghttp2_session_callbacks* one;
      if (nghttp2_session_callbacks_new(&one)) throw std::bad_alloc();
      nghttp2_session_callbacks_set_on_begin_headers_callback(one, begin_headers);
      nghttp2_session_callbacks_set_on_header_callback(one, on_header);
      nghttp2_session_callbacks_set_on_frame_recv_callback(one, frame_recv);
      nghttp2_session_callbacks_set_on_data_chunk_recv_callback(one, data_chunk);
      nghttp2_session_callbacks_set_on_stream_close_callback(one, stream_close);
      nghttp2_session_callbacks_set_on_frame_send_callback(one, frame_send);
      return one;
    }();
    return made;
  }
};

Connection::Connection(Loop* loop, CallSink* sink, const Limits& limits, uint64_t id, int fd,
                       std::unique_ptr<TlsSession> tls, std::string address)
    : loop_(loop),
      sink_(sink),
      limits_(limits),
      id_(id),
      fd_(fd),
      tls_(std::move(tls)),
      peer_(std::make_shared<Peer>()),
      since_(now_ns()) {
  peer_->address = std::move(address);
  secured_ = !tls_;
  if (nghttp2_session_server_new(&session_, Callbacks::all(), this)) throw std::bad_alloc();
  const nghttp2_settings_entry settings[] = {
      {NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, static_cast<uint32_t>(limits_.max_streams)},
      {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, kWindow},
      {NGHTTP2_SETTINGS_MAX_FRAME_SIZE, 256 << 10},
      {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, kMaxHeaderBytes},
  };
  nghttp2_submit_settings(session_, NGHTTP2_FLAG_NONE, settings, std::size(settings));
  nghttp2_session_set_local_window_size(session_, NGHTTP2_FLAG_NONE, 0, kConnectionWindow);
}

Connection::~Connection() {
  for (auto& [id, stream] : streams_) close_stream(stream.get());
  nghttp2_session_del(session_);
  if (tls_) tls_->shutdown();
  tls_.reset();
  ::close(fd_);
}

// --- bytes ---------------------------------------------------------------------------------------------------------

bool Connection::handshake() {
  switch (tls_->handshake()) {
    case TlsSession::State::done:
      if (!tls_->speaks_http2()) return false;
      secured_ = true;
      wants_write_ = false;
      peer_->common_name = tls_->common_name();
      return true;
    case TlsSession::State::wants_read:
      wants_write_ = false;
      return true;
    case TlsSession::State::wants_write:
      wants_write_ = true;
      return true;
    default:
      return false;
  }
}

bool Connection::readable(char* scratch, size_t size) {
  if (!secured_) {
    if (!handshake()) return false;
    if (!secured_) return true;
  }
  // After some rounds other connections get a turn: epoll reports again that the socket has data.
  for (int round = 0; round < 8 || (tls_ && tls_->has_pending()); ++round) {
    const ssize_t got = tls_ ? tls_->read(scratch, size) : ::recv(fd_, scratch, size, 0);
    if (got == 0) return false;
    if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
    if (!receive(scratch, static_cast<size_t>(got))) return false;
    if (!tls_ && static_cast<size_t>(got) < size) return true;
  }
  return true;
}

bool Connection::receive(const char* data, size_t size) {
  const ssize_t used = nghttp2_session_mem_recv(session_, reinterpret_cast<const uint8_t*>(data), size);
  if (used < 0) {  // the session sends a GOAWAY if it can
    flush();
    return false;
  }
  return true;
}

bool Connection::put(const char* data, size_t size, size_t* done) {
  *done = 0;
  while (*done < size) {
    const ssize_t count =
        tls_ ? tls_->write(data + *done, size - *done) : ::send(fd_, data + *done, size - *done, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    *done += static_cast<size_t>(count);
  }
  return true;
}

bool Connection::flush() {
  if (!secured_) return true;
  for (;;) {
    while (out_.size() - out_at_ < kOutBytes) {
      const uint8_t* data;
      const ssize_t count = nghttp2_session_mem_send(session_, &data);
      if (count < 0) return false;
      if (!count) break;
      out_.append(reinterpret_cast<const char*>(data), static_cast<size_t>(count));
    }
    if (out_.empty()) break;
    size_t done;
    if (!put(out_.data() + out_at_, out_.size() - out_at_, &done)) return false;
    out_at_ += done;
    if (out_at_ < out_.size()) {
      if (!wants_write_ || done) blocked_since_ = now_ns();
      wants_write_ = true;
      if (out_at_ > kOutBytes / 2) {
        out_.erase(0, out_at_);
        out_at_ = 0;
      }
      return true;
    }
    out_at_ = 0;
    out_.capacity() > kOutBytes / 4 ? std::string().swap(out_) : out_.clear();
  }
  wants_write_ = false;
  blocked_since_ = 0;
  return nghttp2_session_want_read(session_) || nghttp2_session_want_write(session_);
}

bool Connection::check(int64_t now) {
  if (!opened_ && now - since_ > limits_.open_ns) return false;
  if (blocked_since_ && now - blocked_since_ > limits_.stall_ns) return false;
  std::vector<Stream*> late;
  for (auto& [id, stream] : streams_) {
    const bool streams = stream->call->method && stream->call->method->streams;
    if (!stream->received && !streams && !stream->answered && now - stream->progress_ns > limits_.stall_ns)
      late.push_back(stream.get());
  }
  for (Stream* each : late) refuse(each, kCancelled, "the request did not arrive in time");
  return true;
}

}  // namespace shoal::net
