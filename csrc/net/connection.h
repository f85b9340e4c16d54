// One HTTP/2 connection: turns bytes into calls, and replies into bytes. Only for its loop's thread.
#pragma once
#include <nghttp2/nghttp2.h>

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "net/call.h"
#include "net/tls.h"

namespace shoal::net {

struct Limits {
  int64_t max_message = 32 << 20;     // bytes of a request
  int64_t max_arriving = 1 << 30;     // bytes of all incomplete requests
  int64_t max_connections = 16384;    // further ones are closed at once
  int64_t max_streams = 1024;         // calls of one connection at a time
  int64_t open_ns = 20'000'000'000;   // for the TLS handshake and the HTTP/2 preface
  int64_t stall_ns = 60'000'000'000;  // without progress in a request, or in bytes that the client should read
};

// Where a connection's calls go. Called by the loop's thread.
class CallSink {
 public:
  virtual ~CallSink() = default;
  virtual const Method* method(std::string_view path) const = 0;
  virtual void count(int change) = 0;             // counts open calls
  virtual int64_t hold(int64_t change) = 0;       // bytes of incomplete requests; returns the new total
  virtual void arrived(const CallPtr& call) = 0;  // with its message, or as a stream of them
  virtual void message(const CallPtr& call, std::string message, bool compressed) = 0;
  virtual void half_closed(const CallPtr& call) = 0;
  virtual void ended(const CallPtr& call) = 0;  // a watched call ended without an answer
  virtual void set_timer(int64_t deadline_ns, uint64_t connection, int32_t stream) = 0;
  virtual void clear_timer(int64_t deadline_ns, uint64_t connection, int32_t stream) = 0;
};

class Connection {
 public:
  Connection(Loop* loop, CallSink* sink, const Limits& limits, uint64_t id, int fd, std::unique_ptr<TlsSession> tls,
             std::string address);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Each returns false if the connection must be closed.
  bool readable(char* scratch, size_t size);
  bool flush();
  bool check(int64_t now);  // ends calls that take too long

  void reply(Reply&& reply);
  void expire(int32_t stream);  // its deadline has passed
  void say_goodbye();           // asks the client to make no further calls here
  void go_away();               // accepts no further calls
  void reset_all();             // ends all calls

  bool is_open() const { return secured_; }  // the TLS handshake is done
  bool wants_write() const { return wants_write_; }
  int fd() const { return fd_; }
  uint64_t id() const { return id_; }
  uint32_t interest = 0;  // epoll's events, as the loop has set them
  bool dirty = false;     // it is in the loop's list of connections to flush

 private:
  struct Stream;
  struct Callbacks;

  bool handshake();
  bool receive(const char* data, size_t size);
  bool put(const char* data, size_t size, size_t* done);
  void begin(Stream* stream);
  void feed(Stream* stream, const uint8_t* data, size_t size);
  void finish(Stream* stream);
  void release(Stream* stream);
  void refuse(Stream* stream, int code, std::string details);
  void refuse_http(Stream* stream, const char* status);
  void send(Stream* stream, Reply&& reply);
  void close_stream(Stream* stream);

  Loop* const loop_;
  CallSink* const sink_;
  const Limits& limits_;
  const uint64_t id_;
  const int fd_;
  std::unique_ptr<TlsSession> tls_;
  std::shared_ptr<Peer> peer_;
  nghttp2_session* session_ = nullptr;
  std::unordered_map<int32_t, std::unique_ptr<Stream>> streams_;
  std::string out_;  // bytes to be written
  size_t out_at_ = 0;
  bool secured_ = false;      // the handshake is done, or there is none
  bool opened_ = false;       // the client has sent its HTTP/2 settings
  bool wants_write_ = false;  // the socket is full
  int64_t since_;             // when it was accepted
  int64_t blocked_since_ = 0;
};

}  // namespace shoal::net
