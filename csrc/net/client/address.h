// The addresses that callers take: "host:port", "[v6]:port" or "unix:path".
#pragma once
#include <string>
#include <vector>

namespace shoal::net {

using SocketAddress = std::vector<char>;  // the bytes of a sockaddr

// Looks a name up, which may take long; empty with why it has no address.
SocketAddress resolve(const std::string& address, std::string* why);

}  // namespace shoal::net
