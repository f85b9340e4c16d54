#include "net/client/link.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

namespace shoal::net {
namespace {

constexpr uint32_t kWindow = 16 << 20;

int status_of_http(std::string_view status) {  // gRPC's mapping of a proxy's HTTP status
  if (status == "401") return 16;
  if (status == "403") return 7;
  if (status == "404") return kUnimplemented;
  return status == "429" || status.starts_with("5") ? kUnavailable : 2;
}

}  // namespace

// Callbacks of nghttp2.
struct Outgoing::Link::Callbacks {
  static Outgoing* call(nghttp2_session* session, int32_t id) {
    return static_cast<Outgoing*>(nghttp2_session_get_stream_user_data(session, id));
  }
  static int on_header(nghttp2_session* session, const nghttp2_frame* frame, const uint8_t* name, size_t name_size,
                       const uint8_t* value, size_t value_size, uint8_t, void*) {
    Outgoing* mine = call(session, frame->hd.stream_id);
    if (!mine) return 0;
    const std::string_view key(reinterpret_cast<const char*>(name), name_size);
    const std::string_view text(reinterpret_cast<const char*>(value), value_size);
    try {
      if (key == ":status" && text != "200") {
        mine->status = status_of_http(text);
        mine->details = "the server answered with HTTP status " + std::string(text);
      } else if (key == "grpc-status") {
        mine->status = std::atoi(std::string(text).c_str());
      } else if (key == "grpc-message") {
        mine->details = percent_decoded(text);
      } else if (!key.empty() && key[0] != ':' && key != "content-type" && !key.starts_with("grpc-")) {
        mine->metadata.emplace_back(key, text);
      }
    } catch (const std::bad_alloc&) {
      return NGHTTP2_ERR_CALLBACK_FAILURE;
    }
    return 0;
  }
  static int data_chunk(nghttp2_session* session, uint8_t, int32_t id, const uint8_t* data, size_t size, void* user) {
    Outgoing* mine = call(session, id);
    if (!mine) return 0;
    if (static_cast<int64_t>(mine->message.size() + size) > static_cast<Link*>(user)->caller->max_message_) {
      mine->status = kResourceExhausted;
      mine->details =
          "the answer is larger than " + std::to_string(static_cast<Link*>(user)->caller->max_message_) + " bytes";
      nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, id, NGHTTP2_CANCEL);
      return 0;
    }
    try {
      mine->message.append(reinterpret_cast<const char*>(data), size);
    } catch (const std::bad_alloc&) {
      return NGHTTP2_ERR_CALLBACK_FAILURE;
    }
    return 0;
  }
  static int stream_close(nghttp2_session*, int32_t id, uint32_t code, void* user) {
    auto* link = static_cast<Link*>(user);
    const auto found = link->open.find(id);
    if (found == link->open.end()) return 0;
    const OutgoingPtr call = found->second;
    link->open.erase(found);
    link->caller->finish(call, code);
    return 0;
  }
  static int frame_recv(nghttp2_session*, const nghttp2_frame* frame, void* user) {
    if (frame->hd.type == NGHTTP2_GOAWAY) static_cast<Link*>(user)->leaving = true;
    return 0;
  }
  static nghttp2_session_callbacks* all() {
    static nghttp2_session_callbacks* made = [] {
      nghttp2_session_callbacks* one;
      if (nghttp2_session_callbacks_new(&one)) throw std::bad_alloc();
      nghttp2_session_callbacks_set_on_header_callback(one, on_header);
      nghttp2_session_callbacks_set_on_data_chunk_recv_callback(one, data_chunk);
      nghttp2_session_callbacks_set_on_stream_close_callback(one, stream_close);
      nghttp2_session_callbacks_set_on_frame_recv_callback(one, frame_recv);
      return one;
    }();
    return made;
  }
};

bool Outgoing::Link::connect(const SocketAddress& where, std::string* why) {
  const auto* name = reinterpret_cast<const sockaddr*>(where.data());
  fd = ::socket(name->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0 || (::connect(fd, name, static_cast<socklen_t>(where.size())) && errno != EINPROGRESS)) {
    *why = std::strerror(errno);
    return false;
  }
  const int on = 1, taken_ms = 20'000;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &taken_ms, sizeof taken_ms);
  if (nghttp2_session_client_new(&session, Callbacks::all(), this)) {
    *why = "out of memory";
    return false;
  }
  const nghttp2_settings_entry settings[] = {{NGHTTP2_SETTINGS_ENABLE_PUSH, 0},
                                             {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, kWindow}};
  nghttp2_submit_settings(session, NGHTTP2_FLAG_NONE, settings, 2);
  nghttp2_session_set_local_window_size(session, NGHTTP2_FLAG_NONE, 0, 4 * kWindow);
  return true;
}

ssize_t Outgoing::Link::read_body(nghttp2_session*, int32_t, uint8_t* into, size_t size, uint32_t* flags,
                                  nghttp2_data_source* source, void*) {
  auto* mine = static_cast<Outgoing*>(source->ptr);
  const size_t count = std::min(size, mine->body_.size() - mine->body_at_);
  std::memcpy(into, mine->body_.data() + mine->body_at_, count);
  mine->body_at_ += count;
  if (mine->body_at_ == mine->body_.size()) *flags |= NGHTTP2_DATA_FLAG_EOF;
  return static_cast<ssize_t>(count);
}

}  // namespace shoal::net
