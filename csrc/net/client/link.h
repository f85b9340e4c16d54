// One connection of a `Caller`: its socket, its session of HTTP/2, and the calls that are open on it.
#pragma once
#include <nghttp2/nghttp2.h>
#include <unistd.h>

#include <string>
#include <unordered_map>
#include <utility>

#include "net/client/caller.h"
#include "net/grpc.h"

namespace shoal::net {

struct Outgoing::Link {
  Link(Caller* caller, std::string address) : caller(caller), address(std::move(address)) {}
  ~Link() {
    if (session) nghttp2_session_del(session);
    if (fd >= 0) ::close(fd);
  }
  Caller* const caller;
  const std::string address;
  int fd = -1;
  nghttp2_session* session = nullptr;
  std::unordered_map<int32_t, OutgoingPtr> open;
  std::string out;
  size_t out_at = 0;
  bool connected = false, leaving = false, waits_to_write = true;
  std::string broken;  // why it is over
  int64_t since_ns = now_ns();

  // Begins to connect, and the session of HTTP/2; false with why it cannot.
  bool connect(const SocketAddress& where, std::string* why);
  // What nghttp2 sends of a call.
  static ssize_t read_body(nghttp2_session*, int32_t, uint8_t* into, size_t size, uint32_t* flags,
                           nghttp2_data_source* source, void*);

 private:
  struct Heard;
};

}  // namespace shoal::net
