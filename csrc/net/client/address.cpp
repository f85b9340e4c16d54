#include "net/client/address.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>

namespace shoal::net {

SocketAddress resolve(const std::string& address, std::string* why) {
  if (address.starts_with("unix:")) {
    sockaddr_un local{};
    local.sun_family = AF_UNIX;
    const std::string path = address.substr(address.starts_with("unix://") ? 7 : 5);
    if (path.size() >= sizeof local.sun_path) {
      *why = "the path must have at most " + std::to_string(sizeof local.sun_path - 1) + " bytes, got " +
             std::to_string(path.size());
      return {};
    }
    std::copy(path.begin(), path.end(), local.sun_path);
    const auto* bytes = reinterpret_cast<const char*>(&local);
    return {bytes, bytes + sizeof local};
  }
  const size_t colon = address.rfind(':');
  std::string host = colon == std::string::npos ? address : address.substr(0, colon);
  if (host.size() > 1 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
  if (const int failed = getaddrinfo(host.c_str(), port.c_str(), &hints, &found)) {
    *why = gai_strerror(failed);
    return {};
  }
  const auto* bytes = reinterpret_cast<const char*>(found->ai_addr);
  SocketAddress made(bytes, bytes + found->ai_addrlen);
  freeaddrinfo(found);
  return made;
}

}  // namespace shoal::net
