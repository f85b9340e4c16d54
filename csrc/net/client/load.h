// A client that makes load: gRPC calls of one method with one message, as fast as they are answered or at a rate.
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
  int calls = 1;           // that are open at a time on each connection
  double seconds = 1;      // how long calls are made
  double rate = 0;         // calls per second; 0: each answer makes the next call
  int64_t timeout_ms = 0;  // deadline of a call; 0: none
  std::vector<std::pair<std::string, std::string>> metadata;
};

struct LoadResult {
  std::vector<double> seconds;      // that calls with status 0 took, sorted
  std::map<int, int64_t> statuses;  // how many calls ended with each; -1: without any
  int64_t skipped = 0;              // due by the rate, but too many were open
  double took = 0;                  // seconds in which calls were made
};

// Throws std::runtime_error where it cannot connect.
LoadResult make_load(const LoadOptions& options);

}  // namespace shoal::net
