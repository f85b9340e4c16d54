// One call of a connection: its request as it arrives, and its answer as it is sent.
#pragma once
#include <nghttp2/nghttp2.h>

#include <string>
#include <vector>

#include "net/call.h"
#include "net/connection.h"
#include "net/http2.h"

namespace shoal::net {

struct Connection::Stream {
  explicit Stream(int32_t id) : id(id) {}
  const int32_t id;
  CallPtr call = std::make_shared<Call>();
  // The request:
  std::string path, verb, content_type;
  size_t header_bytes = 0;
  bool bad_timeout = false;
  uint8_t prefix[kPrefix];
  size_t prefix_bytes = 0;  // of the current message
  bool compressed = false;
  size_t message_left = 0;
  int messages = 0;  // complete ones
  std::string partial;
  int64_t held = 0;       // bytes of `partial` that CallSink::hold counts
  bool received = false;  // the request is complete
  bool counted = false;
  int64_t progress_ns = 0;
  // The answer:
  bool responding = false;  // its headers were submitted
  bool answered = false;    // its status is known
  std::string out;
  size_t out_at = 0;
  int code = 0;
  std::string details;
  Metadata trailing;

  // Adds the status to headers, whose bytes are in `code_text` and `details_text`.
  void add_status(std::string* code_text, std::string* details_text, std::vector<nghttp2_nv>* headers) const;
  void submit_trailers(nghttp2_session* session) const;
  // Gives nghttp2 bytes of the answer; the source is a Stream.
  static ssize_t read(nghttp2_session* session, int32_t id, uint8_t* into, size_t size, uint32_t* flags,
                      nghttp2_data_source* source, void* user);
};

}  // namespace shoal::net
