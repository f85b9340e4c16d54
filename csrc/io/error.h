// The errors of reading and writing files.
#pragma once
#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace shoal {

// A file is truncated, corrupt or of another kind. Nothing was changed.
struct DataError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Progress::cancelled was set.
struct Cancelled : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The error in errno, of a call on `path`.
inline std::system_error os_error(const std::string& path) { return {errno, std::generic_category(), path}; }

}  // namespace shoal
