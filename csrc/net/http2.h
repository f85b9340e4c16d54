// What servers and clients need of nghttp2.
#pragma once
#include <nghttp2/nghttp2.h>

#include <cstdint>
#include <string_view>

namespace shoal::net {

inline nghttp2_nv header(std::string_view name, std::string_view value, uint8_t flags = NGHTTP2_NV_FLAG_NONE) {
  return {reinterpret_cast<uint8_t*>(const_cast<char*>(name.data())),
          reinterpret_cast<uint8_t*>(const_cast<char*>(value.data())), name.size(), value.size(), flags};
}
// Names and values that nghttp2 need not copy.
inline constexpr uint8_t kStatic = NGHTTP2_NV_FLAG_NO_COPY_NAME | NGHTTP2_NV_FLAG_NO_COPY_VALUE;

// Runs a callback of nghttp2: an exception ends the connection, not the server.
template <class F>
int guarded(F&& work) {
  try {
    return work();
  } catch (...) {
    return NGHTTP2_ERR_CALLBACK_FAILURE;
  }
}

}  // namespace shoal::net
