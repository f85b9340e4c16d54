// The textual parts of gRPC's wire format.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace shoal::net {

// The nanoseconds of a grpc-timeout ("100m"), at most about a hundred years; -1 if it is malformed.
int64_t parse_timeout(std::string_view text);

// A grpc-message: printable ASCII, the rest as %XX.
std::string percent_encoded(std::string_view text);
std::string percent_decoded(std::string_view text);

// Always compares everything, so that the time it takes reveals nothing about the content.
bool same_secret(std::string_view one, std::string_view other);

}  // namespace shoal::net
