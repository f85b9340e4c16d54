// The two ways, besides std::system_error, in which reading or writing a checkpoint ends early.
#pragma once
#include <stdexcept>

namespace shoal {

// A file is truncated, corrupt or of another kind. Nothing was changed.
struct DataError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Somebody called Progress::cancel().
struct Cancelled : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace shoal
