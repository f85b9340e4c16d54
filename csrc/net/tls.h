// TLS for accepted connections, with the OpenSSL of the process or the system: it is not linked, so that the system's
// security updates apply.
#pragma once
#include <sys/types.h>

#include <memory>
#include <string>

namespace shoal::net {

struct TlsFiles {
  std::string certificate, key, client_ca;  // PEM; client_ca empty: clients need no certificate
};

class TlsSession {
 public:
  virtual ~TlsSession() = default;
  enum class State { done, wants_read, wants_write, failed };
  virtual State handshake() = 0;
  // Like read(2) and write(2) of a nonblocking socket: -1 with errno EAGAIN if nothing can be done now.
  virtual ssize_t read(void* data, size_t size) = 0;
  virtual ssize_t write(const void* data, size_t size) = 0;
  virtual bool has_pending() const = 0;  // there are received bytes that are no longer in the socket
  virtual void shutdown() = 0;
  virtual bool speaks_http2() const = 0;
  virtual std::string common_name() const = 0;
};

class TlsContext {
 public:
  // Throws std::runtime_error for unusable files, or without OpenSSL 3.
  static std::unique_ptr<TlsContext> make(const TlsFiles& files);
  virtual ~TlsContext() = default;
  virtual std::unique_ptr<TlsSession> accept(int fd) = 0;
};

// Whether TlsContext::make can find OpenSSL; otherwise `why` says what is missing.
bool tls_available(std::string* why);

}  // namespace shoal::net
