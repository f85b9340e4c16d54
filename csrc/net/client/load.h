// A load generator: gRPC calls of one method with one message, as fast as they are answered or at a given rate.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace shoal::net {

struct LoadOptions {
  std::string host = "127.0.0.1";  // an IPv4 address
  int port = 0;
  std::string path, message;
  int connections = 1;
  int calls = 1;           // open calls per connection
  double seconds = 1;      // how long to make calls
  double rate = 0;         // calls per second; 0: each answer starts the next call
  int64_t timeout_ms = 0;  // deadline of a call; 0: none
};

struct LoadResult {
  std::vector<double> seconds;      // of calls with status 0, sorted
  std::map<int, int64_t> statuses;  // the number of calls that ended with each status; -1: without one
  int64_t skipped = 0;              // calls that the rate required while too many were open
  double took = 0;                  // seconds in which calls were made
};

// Throws std::runtime_error if it cannot connect.
LoadResult make_load(const LoadOptions& options);

}  // namespace shoal::net
