// The calls of a connection: requests go to its sink, answers to its session.
#include <algorithm>
#include <cstring>

#include "net/connection.h"
#include "net/grpc.h"
#include "net/stream.h"

namespace shoal::net {
namespace {

constexpr size_t kFirstBytes = 64 << 10;  // bytes to allocate for a message before it arrives

}  // namespace

ssize_t Connection::Stream::read(nghttp2_session* session, int32_t, uint8_t* into, size_t size, uint32_t* flags,
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
      mine->submit_trailers(session);
      return 0;
    });
    return failed ? static_cast<ssize_t>(failed) : static_cast<ssize_t>(count);
  }
  return count ? static_cast<ssize_t>(count) : static_cast<ssize_t>(NGHTTP2_ERR_DEFERRED);
}

void Connection::Stream::add_status(std::string* code_text, std::string* details_text,
                                    std::vector<nghttp2_nv>* headers) const {
  *code_text = std::to_string(code);
  headers->push_back(header("grpc-status", *code_text, NGHTTP2_NV_FLAG_NO_COPY_NAME));
  if (!details.empty()) {
    *details_text = percent_encoded(details);
    headers->push_back(header("grpc-message", *details_text, NGHTTP2_NV_FLAG_NO_COPY_NAME));
  }
  for (const auto& [key, value] : trailing) headers->push_back(header(key, value));
}

void Connection::Stream::submit_trailers(nghttp2_session* session) const {
  if (code == kOk && details.empty() && trailing.empty()) {
    const nghttp2_nv good = header("grpc-status", "0", kStatic);
    nghttp2_submit_trailer(session, id, &good, 1);
    return;
  }
  std::string code_text, details_text;
  std::vector<nghttp2_nv> headers;
  add_status(&code_text, &details_text, &headers);
  nghttp2_submit_trailer(session, id, headers.data(), headers.size());
}

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
    stream->add_status(&code, &details, &headers);
    nghttp2_submit_response(session_, stream->id, headers.data(), headers.size(), nullptr);
    return;
  }
  nghttp2_data_provider provider;
  provider.source.ptr = stream;
  provider.read_callback = Stream::read;
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
