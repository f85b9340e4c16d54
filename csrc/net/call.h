// A gRPC call, shared by the front end's threads and those that answer it.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace shoal::net {

class Loop;

using Metadata = std::vector<std::pair<std::string, std::string>>;

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Status codes of gRPC that native code uses.
enum Code : int {
  kOk = 0,
  kCancelled = 1,
  kDeadlineExceeded = 4,
  kResourceExhausted = 8,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
};

struct Method {
  std::string path;
  bool streams;  // its messages are passed on one by one; otherwise a call has one message and is passed on with it
  bool batches;  // its calls may be answered in batches
};

struct Peer {
  std::string address;
  std::string common_name;  // of the client's certificate
};

// Why a call is logged or traced individually.
enum Noted : uint8_t { kSampled = 1, kTraced = 2 };

struct Call {
  Loop* loop = nullptr;
  uint64_t connection = 0;
  int32_t stream = 0;
  const Method* method = nullptr;
  std::shared_ptr<const Peer> peer;
  Metadata metadata;
  std::string message;
  std::string encoding;              // of compressed messages
  bool compressed = false;           // whether the message is
  std::atomic<bool> watched{false};  // Python has it and is notified of its end
  uint8_t noted = 0;
  int64_t arrived_ns = 0;
  int64_t deadline_ns = 0;         // 0: none
  std::atomic<bool> ended{false};  // it was cancelled or answered, or its deadline has passed
};
using CallPtr = std::shared_ptr<Call>;

// A part of an answer, or all of it.
struct Reply {
  uint64_t connection = 0;
  int32_t stream = 0;
  std::string data;  // messages with their prefixes
  bool last = true;  // with the status
  int code = kOk;
  std::string details;
  Metadata initial, trailing;
};

constexpr size_t kPrefix = 5;  // bytes before each message: whether it is compressed, and its size
// The prefix of a message of `size` bytes, and room for the message after it.
inline std::string framed(size_t size) {
  std::string out(kPrefix + size, '\0');
  for (int i = 0; i < 4; ++i) out[1 + i] = static_cast<char>(size >> (24 - 8 * i));
  return out;
}

}  // namespace shoal::net
