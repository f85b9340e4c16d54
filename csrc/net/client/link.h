// One connection of a `Caller`: its socket, its HTTP/2 session and its open calls.
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
  std::string broken;  // why it failed; empty: it did not
  int64_t since_ns = now_ns();

  // Starts to connect and starts the HTTP/2 session; false, with the reason, if it cannot.
  bool connect(const SocketAddress& where, std::string* why);
  // The nghttp2 data source of a call's message.
  static ssize_t read_body(nghttp2_session*, int32_t, uint8_t* into, size_t size, uint32_t* flags,
                           nghttp2_data_source* source, void*);

 private:
  struct Callbacks;
};

}  // namespace shoal::net
