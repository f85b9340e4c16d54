// TLS for accepted connections, by the OpenSSL that the process has or the system brings: it is not linked, so that
// its security updates are the system's.
#pragma once
#include <sys/types.h>

#include <memory>
#include <string>

namespace shoal::net {

struct TlsFiles {
  std::string certificate, key, client_ca;  // PEM; client_ca empty: no certificate is asked for
};

class TlsSession {
 public:
  virtual ~TlsSession() = default;
  enum class State { done, wants_read, wants_write, failed };
  virtual State handshake() = 0;
  // As read(2) and write(2) of a socket that does not block: -1 with errno EAGAIN where nothing can be done now.
  virtual ssize_t read(void* data, size_t size) = 0;
  virtual ssize_t write(const void* data, size_t size) = 0;
  virtual bool has_pending() const = 0;  // bytes that were received, which the socket does not show any more
  virtual void shutdown() = 0;
  virtual bool speaks_http2() const = 0;
  virtual std::string common_name() const = 0;
};

class TlsContext {
 public:
  // Throws std::runtime_error where files cannot be used, or where there is no OpenSSL 3.
  static std::unique_ptr<TlsContext> make(const TlsFiles& files);
  virtual ~TlsContext() = default;
  virtual std::unique_ptr<TlsSession> accept(int fd) = 0;
};

// Whether TlsContext::make can find its library; else `why` says what is missing.
bool tls_available(std::string* why);

}  // namespace shoal::net
