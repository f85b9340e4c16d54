#include "net/tls.h"

#include <dlfcn.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <stdexcept>

#ifdef SHOAL_OPENSSL
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#endif

namespace shoal::net {
#ifdef SHOAL_OPENSSL
namespace {

// Not formatted, since clang-format would change the complete list with each addition.
// clang-format off
#define SHOAL_TLS_FUNCTIONS(X) \
  X(TLS_server_method) X(SSL_CTX_new) X(SSL_CTX_free) X(SSL_CTX_ctrl) X(SSL_CTX_set_options) \
  X(SSL_CTX_use_certificate_chain_file) X(SSL_CTX_use_PrivateKey_file) X(SSL_CTX_check_private_key) \
  X(SSL_CTX_load_verify_locations) X(SSL_load_client_CA_file) X(SSL_CTX_set_client_CA_list) \
  X(SSL_CTX_set_verify) X(SSL_CTX_set_alpn_select_cb) X(SSL_select_next_proto) X(SSL_new) X(SSL_free) \
  X(SSL_set_fd) X(SSL_accept) X(SSL_read) X(SSL_write) X(SSL_shutdown) X(SSL_get_error) \
  X(SSL_get0_alpn_selected) X(SSL_get1_peer_certificate) X(X509_get_subject_name) X(X509_NAME_get_text_by_NID) \
  X(X509_free) X(ERR_get_error) X(ERR_error_string_n) X(ERR_clear_error) X(SSL_pending)
// clang-format on

// The functions of libssl and libcrypto that are called, found at run time.
struct Api {
#define SHOAL_TLS_DECLARE(name) decltype(&::name) name = nullptr;
  SHOAL_TLS_FUNCTIONS(SHOAL_TLS_DECLARE)
  std::string missing;

  Api() {
    void* ssl = dlopen("libssl.so.3", RTLD_NOW | RTLD_LOCAL);
    void* crypto = dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL);
    if (!ssl || !crypto) {
      missing = "libssl.so.3 and libcrypto.so.3 (OpenSSL 3) were not found";
      return;
    }
#define SHOAL_TLS_FIND(name)                                                \
  name = reinterpret_cast<decltype(name)>(dlsym(ssl, #name));               \
  if (!name) name = reinterpret_cast<decltype(name)>(dlsym(crypto, #name)); \
  if (!name) missing = "libssl.so.3 has no " #name;
    SHOAL_TLS_FUNCTIONS(SHOAL_TLS_FIND)
  }
};

const Api& api() {
  static const Api* one = new Api;
  return *one;
}

std::string last_error() {
  char text[256] = "unknown error";
  if (const unsigned long code = api().ERR_get_error()) api().ERR_error_string_n(code, text, sizeof text);
  api().ERR_clear_error();
  return text;
}

class Session : public TlsSession {
 public:
  Session(SSL_CTX* context, int fd) : ssl_(api().SSL_new(context)) {
    if (!ssl_ || api().SSL_set_fd(ssl_, fd) != 1) throw std::runtime_error("TLS: " + last_error());
  }
  ~Session() override { api().SSL_free(ssl_); }

  State handshake() override {
    api().ERR_clear_error();
    const int result = api().SSL_accept(ssl_);
    if (result == 1) return State::done;
    switch (api().SSL_get_error(ssl_, result)) {
      case SSL_ERROR_WANT_READ:
        return State::wants_read;
      case SSL_ERROR_WANT_WRITE:
        return State::wants_write;
      default:
        broken_ = true;
        api().ERR_clear_error();
        return State::failed;
    }
  }
  ssize_t read(void* data, size_t size) override {
    api().ERR_clear_error();
    return result_of(api().SSL_read(ssl_, data, whole(size)));
  }
  ssize_t write(const void* data, size_t size) override {
    api().ERR_clear_error();
    return result_of(api().SSL_write(ssl_, data, whole(size)));
  }
  bool has_pending() const override { return api().SSL_pending(ssl_) > 0; }
  void shutdown() override {
    if (!broken_) api().SSL_shutdown(ssl_);
    api().ERR_clear_error();
  }
  bool speaks_http2() const override {
    const unsigned char* name = nullptr;
    unsigned size = 0;
    api().SSL_get0_alpn_selected(ssl_, &name, &size);
    return size == 2 && name[0] == 'h' && name[1] == '2';
  }
  std::string common_name() const override {
    X509* certificate = api().SSL_get1_peer_certificate(ssl_);
    if (!certificate) return "";
    char text[256] = "";
    const int size =
        api().X509_NAME_get_text_by_NID(api().X509_get_subject_name(certificate), NID_commonName, text, sizeof text);
    api().X509_free(certificate);
    return size > 0 ? std::string(text, static_cast<size_t>(size)) : "";
  }

 private:
  static int whole(size_t size) { return static_cast<int>(std::min<size_t>(size, std::numeric_limits<int>::max())); }
  ssize_t result_of(int result) {
    if (result > 0) return result;
    switch (api().SSL_get_error(ssl_, result)) {
      case SSL_ERROR_WANT_READ:
      case SSL_ERROR_WANT_WRITE:
        errno = EAGAIN;
        return -1;
      case SSL_ERROR_ZERO_RETURN:
        return 0;
      default:
        broken_ = true;
        api().ERR_clear_error();
        errno = ECONNRESET;
        return -1;
    }
  }
  SSL* const ssl_;
  bool broken_ = false;
};

int choose_http2(SSL*, const unsigned char** out, unsigned char* size, const unsigned char* offered, unsigned length,
                 void*) {
  constexpr unsigned char kWanted[] = {2, 'h', '2'};
  unsigned char* chosen = nullptr;
  if (api().SSL_select_next_proto(&chosen, size, kWanted, sizeof kWanted, offered, length) != OPENSSL_NPN_NEGOTIATED)
    return SSL_TLSEXT_ERR_ALERT_FATAL;
  *out = chosen;
  return SSL_TLSEXT_ERR_OK;
}

class Context : public TlsContext {
 public:
  explicit Context(const TlsFiles& files) : context_(api().SSL_CTX_new(api().TLS_server_method())) {
    if (!context_) throw std::runtime_error("TLS: " + last_error());
    try {
      set_up(files);
    } catch (...) {
      api().SSL_CTX_free(context_);
      throw;
    }
  }
  ~Context() override { api().SSL_CTX_free(context_); }
  std::unique_ptr<TlsSession> accept(int fd) override { return std::make_unique<Session>(context_, fd); }

 private:
  void set_up(const TlsFiles& files) {
    api().SSL_CTX_ctrl(context_, SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_2_VERSION, nullptr);
    api().SSL_CTX_ctrl(context_, SSL_CTRL_MODE,
                       SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_RELEASE_BUFFERS,
                       nullptr);
    api().SSL_CTX_ctrl(context_, SSL_CTRL_SET_SESS_CACHE_MODE, SSL_SESS_CACHE_OFF, nullptr);
    api().SSL_CTX_set_options(context_, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
    if (api().SSL_CTX_use_certificate_chain_file(context_, files.certificate.c_str()) != 1)
      throw std::runtime_error("certificate " + files.certificate + ": " + last_error());
    if (api().SSL_CTX_use_PrivateKey_file(context_, files.key.c_str(), SSL_FILETYPE_PEM) != 1 ||
        api().SSL_CTX_check_private_key(context_) != 1)
      throw std::runtime_error("key " + files.key + ": " + last_error());
    if (!files.client_ca.empty()) {
      auto* names = api().SSL_load_client_CA_file(files.client_ca.c_str());
      if (!names || api().SSL_CTX_load_verify_locations(context_, files.client_ca.c_str(), nullptr) != 1)
        throw std::runtime_error("client CA " + files.client_ca + ": " + last_error());
      api().SSL_CTX_set_client_CA_list(context_, names);
      api().SSL_CTX_set_verify(context_, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
    }
    api().SSL_CTX_set_alpn_select_cb(context_, choose_http2, nullptr);
  }
  SSL_CTX* const context_;
};

}  // namespace

bool tls_available(std::string* why) {
  *why = api().missing;
  return why->empty();
}

std::unique_ptr<TlsContext> TlsContext::make(const TlsFiles& files) {
  if (!api().missing.empty()) throw std::runtime_error(api().missing);
  return std::make_unique<Context>(files);
}

#else

bool tls_available(std::string* why) {
  *why = "the extension was built without OpenSSL's headers";
  return false;
}
std::unique_ptr<TlsContext> TlsContext::make(const TlsFiles&) {
  throw std::runtime_error("the extension was built without OpenSSL's headers");
}

#endif
}  // namespace shoal::net
