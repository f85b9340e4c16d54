// The addresses that callers accept: "host:port", "[v6]:port" or "unix:path".
#pragma once
#include <string>
#include <vector>

namespace shoal::net {

using SocketAddress = std::vector<char>;  // the bytes of a sockaddr

// Resolves a name, which may take long; on failure returns nothing, and the reason in `why`.
SocketAddress resolve(const std::string& address, std::string* why);

}  // namespace shoal::net
