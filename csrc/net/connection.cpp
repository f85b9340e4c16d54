#include "net/connection.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "net/grpc.h"

namespace shoal::net {
namespace {

constexpr size_t kOutBytes = 256 << 10;  // bytes to take from the session at a time
constexpr int kWindow = 1 << 20;         // bytes of a call's message that a client may send ahead
constexpr int kConnectionWindow = 16 << 20;
constexpr size_t kMaxHeaderBytes = 64 << 10;
constexpr size_t kFirstBytes = 64 << 10;  // bytes to allocate for a message before it arrives

nghttp2_nv header(std::string_view name, std::string_view value, uint8_t flags = NGHTTP2_NV_FLAG_NONE) {
  return {reinterpret_cast<uint8_t*>(const_cast<char*>(name.data())),
          reinterpret_cast<uint8_t*>(const_cast<char*>(value.data())), name.size(), value.size(), flags};
}
constexpr uint8_t kStatic = NGHTTP2_NV_FLAG_NO_COPY_NAME | NGHTTP2_NV_FLAG_NO_COPY_VALUE;

bool is_reserved(std::string_view name) {
  return name.empty() || name[0] == ':' || name == "te" || name == "content-type" || name.starts_with("grpc-");
}

}  // namespace

struct Connection::Stream {
  explicit Stream(int32_t id) : id(id) {}
  const int32_t id;
  CallPtr call = std::make_shared<Call>();
  // The request:
  std::string path, verb, content_type;
  size_t header_bytes = 0;
  bool bad_timeout = false;
  uint8_t prefix[kPrefix];
  size_t prefix_bytes = 0;  // of the current message
  bool compressed = false;
  size_t message_left = 0;
  int messages = 0;  // complete ones
  std::string partial;
  int64_t held = 0;       // bytes of `partial` that CallSink::hold counts
  bool received = false;  // the request is complete
  bool counted = false;
  int64_t progress_ns = 0;
  // The answer:
  bool responding = false;  // its headers were submitted
  bool answered = false;    // its status is known
  std::string out;
  size_t out_at = 0;
  int code = 0;
  std::string details;
  Metadata trailing;
};

// Callbacks of nghttp2. An exception ends the connection, not the server.
struct Connection::Callbacks {
  static Connection* of(void* user) { return static_cast<Connection*>(user); }
  static Stream* stream(nghttp2_session* session, int32_t id) {
    return static_cast<Stream*>(nghttp2_session_get_stream_user_data(session, id));
  }
  template <class F>
  static int guarded(F&& work) {
    try {
      return work();
    } catch (...) {
      return NGHTTP2_ERR_CALLBACK_FAILURE;
    }
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
  static ssize_t read_answer(nghttp2_session* session, int32_t, uint8_t* into, size_t size, uint32_t* flags,
                             nghttp2_data_source* source, void*) {
    auto* mine = static_cast<Stream*>(source->ptr);
    const size_t count = std::min(size, mine->out.size() - mine->out_at);
    std::memcpy(into, mine->out.data() + mine->out_at, count);
    mine->out_at += count;
    if (mine->out_at < mine->out.size()) return static_cast<ssize_t>(count);
    mine->out.clear();
    mine->out_at = 0;
    if (mine->answered) {
      *flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
      const int failed = guarded([&] {
        submit_trailers(session, *mine);
        return 0;
      });
      return failed ? static_cast<ssize_t>(failed) : static_cast<ssize_t>(count);
    }
    return count ? static_cast<ssize_t>(count) : static_cast<ssize_t>(NGHTTP2_ERR_DEFERRED);
  }
  static void add_status(const Stream& mine, std::string* code, std::string* details,
                         std::vector<nghttp2_nv>* headers) {
    *code = std::to_string(mine.code);
    headers->push_back(header("grpc-status", *code, NGHTTP2_NV_FLAG_NO_COPY_NAME));
    if (!mine.details.empty()) {
      *details = percent_encoded(mine.details);
      headers->push_back(header("grpc-message", *details, NGHTTP2_NV_FLAG_NO_COPY_NAME));
    }
    for (const auto& [key, value] : mine.trailing) headers->push_back(header(key, value));
  }
  static void submit_trailers(nghttp2_session* session, const Stream& mine) {
    if (mine.code == kOk && mine.details.empty() && mine.trailing.empty()) {
      const nghttp2_nv good = header("grpc-status", "0", kStatic);
      nghttp2_submit_trailer(session, mine.id, &good, 1);
      return;
    }
    std::string code, details;
    std::vector<nghttp2_nv> headers;
    add_status(mine, &code, &details, &headers);
    nghttp2_submit_trailer(session, mine.id, headers.data(), headers.size());
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

// --- calls ---------------------------------------------------------------------------------------------------------

void Connection::begin(Stream* stream) {
  stream->progress_ns = now_ns();
  Call& call = *stream->call;
  call.loop = loop_;
  call.connection = id_;
  call.stream = stream->id;
  call.peer = peer_;
  call.arrived_ns = stream->progress_ns;
  if (stream->verb != "POST") {
    refuse_http(stream, "405");
  } else if (!stream->content_type.starts_with("application/grpc")) {
    refuse_http(stream, "415");
  } else if (stream->bad_timeout) {
    refuse(stream, kInternal, "grpc-timeout is malformed");
  } else if (!(call.method = sink_->method(stream->path))) {
    refuse(stream, kUnimplemented, "Method not found!");
  } else {
    stream->counted = true;
    sink_->count(1);
    if (call.deadline_ns) sink_->set_timer(call.deadline_ns, id_, stream->id);
    if (call.method->streams) sink_->arrived(stream->call);
  }
}

void Connection::feed(Stream* stream, const uint8_t* data, size_t size) {
  stream->progress_ns = now_ns();
  Call& call = *stream->call;
  while (size && !stream->answered) {
    if (stream->prefix_bytes < kPrefix) {
      const size_t count = std::min(size, kPrefix - stream->prefix_bytes);
      std::memcpy(stream->prefix + stream->prefix_bytes, data, count);
      stream->prefix_bytes += count;
      data += count;
      size -= count;
      if (stream->prefix_bytes < kPrefix) return;
      stream->compressed = stream->prefix[0] == 1;
      const size_t length = static_cast<size_t>(stream->prefix[1]) << 24 | stream->prefix[2] << 16 |
                            stream->prefix[3] << 8 | stream->prefix[4];
      if (stream->prefix[0] > 1) {
        refuse(stream, kInternal,
               "the first byte of a message must be 0 or 1, got " + std::to_string(stream->prefix[0]));
        return;
      }
      if (static_cast<int64_t>(length) > limits_.max_message) {
        refuse(stream, kResourceExhausted,
               "Received message larger than max (" + std::to_string(length) + " vs. " +
                   std::to_string(limits_.max_message) + ")");
        return;
      }
      if (!call.method->streams && stream->messages) {
        refuse(stream, kInternal, "a call of this method must have one message, got more");
        return;
      }
      stream->message_left = length;
      stream->partial.clear();
      stream->partial.reserve(std::min(length, kFirstBytes));
    }
    const size_t count = std::min(size, stream->message_left);
    stream->partial.append(reinterpret_cast<const char*>(data), count);
    stream->message_left -= count;
    data += count;
    size -= count;
    if (stream->message_left) {
      stream->held += static_cast<int64_t>(count);
      if (sink_->hold(static_cast<int64_t>(count)) > limits_.max_arriving) {
        release(stream);
        stream->partial = {};
        refuse(stream, kResourceExhausted, "this server has too many bytes of incomplete requests; try again later");
      }
      return;
    }
    release(stream);
    stream->prefix_bytes = 0;
    ++stream->messages;
    if (call.method->streams) {
      sink_->message(stream->call, std::move(stream->partial), stream->compressed);
      stream->partial = {};
    } else {
      call.message = std::move(stream->partial);
      call.compressed = stream->compressed;
    }
  }
}

void Connection::release(Stream* stream) {
  if (stream->held) sink_->hold(-stream->held);
  stream->held = 0;
}

void Connection::finish(Stream* stream) {
  stream->received = true;
  if (stream->answered) return;
  if (stream->prefix_bytes) {
    refuse(stream, kInternal, "the request ended within a message");
  } else if (stream->call->method->streams) {
    sink_->half_closed(stream->call);
  } else if (!stream->messages) {
    refuse(stream, kInternal, "a call of this method must have one message, got none");
  } else {
    sink_->arrived(stream->call);
  }
}

void Connection::refuse(Stream* stream, int code, std::string details) {
  if (stream->answered) return;
  if (stream->call->watched && !stream->call->ended.exchange(true)) sink_->ended(stream->call);
  Reply reply;
  reply.code = code;
  reply.details = std::move(details);
  send(stream, std::move(reply));
}

void Connection::refuse_http(Stream* stream, const char* status) {
  const nghttp2_nv headers[] = {header(":status", status)};
  stream->answered = stream->responding = true;
  stream->call->ended = true;
  nghttp2_submit_response(session_, stream->id, headers, 1, nullptr);
}

void Connection::expire(int32_t id) {
  const auto found = streams_.find(id);
  if (found != streams_.end()) refuse(found->second.get(), kDeadlineExceeded, "Deadline Exceeded");
}

void Connection::reply(Reply&& reply) {
  const auto found = streams_.find(reply.stream);
  if (found == streams_.end() || found->second->answered) return;  // the call has ended
  send(found->second.get(), std::move(reply));
}

void Connection::send(Stream* stream, Reply&& reply) {
  if (reply.last) {
    stream->answered = true;
    stream->call->ended = true;
    stream->code = reply.code;
    stream->details = std::move(reply.details);
    stream->trailing = std::move(reply.trailing);
  }
  if (stream->out.empty()) {
    stream->out = std::move(reply.data);
  } else {
    stream->out += reply.data;
  }
  if (stream->responding) {
    nghttp2_session_resume_data(session_, stream->id);
    return;
  }
  stream->responding = true;
  std::vector<nghttp2_nv> headers{header(":status", "200", kStatic),
                                  header("content-type", "application/grpc", kStatic),
                                  header("grpc-accept-encoding", "identity, deflate, gzip", kStatic)};
  for (const auto& [key, value] : reply.initial) headers.push_back(header(key, value));
  if (reply.last && stream->out.empty()) {
    std::string code, details;
    Callbacks::add_status(*stream, &code, &details, &headers);
    nghttp2_submit_response(session_, stream->id, headers.data(), headers.size(), nullptr);
    return;
  }
  nghttp2_data_provider provider;
  provider.source.ptr = stream;
  provider.read_callback = Callbacks::read_answer;
  nghttp2_submit_response(session_, stream->id, headers.data(), headers.size(), &provider);
}

void Connection::close_stream(Stream* stream) {
  Call& call = *stream->call;
  release(stream);
  if (stream->counted) sink_->count(-1);
  stream->counted = false;
  if (call.deadline_ns) sink_->clear_timer(call.deadline_ns, id_, stream->id);
  if (!call.ended.exchange(true) && call.watched) sink_->ended(stream->call);
}

void Connection::say_goodbye() { nghttp2_submit_shutdown_notice(session_); }

void Connection::go_away() {
  nghttp2_submit_goaway(session_, NGHTTP2_FLAG_NONE, nghttp2_session_get_last_proc_stream_id(session_),
                        NGHTTP2_NO_ERROR, nullptr, 0);
}

void Connection::reset_all() {
  for (auto& [id, stream] : streams_) {
    if (!stream->answered) refuse(stream.get(), kUnavailable, "the server is stopping");
  }
}

}  // namespace shoal::net
