# Sets SHOAL_HTTP2 and the target shoal_http2: nghttp2, linked statically if possible, so that the extension needs no
# library at run time, and OpenSSL's headers only, since its library is loaded at run time.
find_path(NGHTTP2_INCLUDE_DIR nghttp2/nghttp2.h)
find_library(NGHTTP2_STATIC libnghttp2.a)
find_library(NGHTTP2_SHARED nghttp2)
find_path(OPENSSL_HEADERS openssl/ssl.h)
set(SHOAL_HTTP2 OFF)
if(NGHTTP2_INCLUDE_DIR AND (NGHTTP2_STATIC OR NGHTTP2_SHARED) AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
  set(SHOAL_HTTP2 ON)
  set(http2_library ${NGHTTP2_SHARED})
  # Distributions build the archive for programs, not for shared objects. Only its use of stderr, in a function for
  # debugging, prevents linking it into one, so that symbol is renamed.
  if(NGHTTP2_STATIC AND CMAKE_OBJCOPY)
    set(archive ${CMAKE_BINARY_DIR}/libshoal_nghttp2.a)
    execute_process(COMMAND ${CMAKE_OBJCOPY} --redefine-sym stderr=shoal_http2_stderr ${NGHTTP2_STATIC} ${archive}
                    RESULT_VARIABLE failed ERROR_QUIET)
    if(failed EQUAL 0)
      file(WRITE ${CMAKE_BINARY_DIR}/http2_check.cpp "#include <nghttp2/nghttp2.h>
#include <cstdio>
extern \"C\" __attribute__((visibility(\"hidden\"))) FILE* shoal_http2_stderr;
FILE* shoal_http2_stderr = nullptr;
extern \"C\" int check() { nghttp2_session* s; return nghttp2_session_server_new(&s, nullptr, nullptr); }
")
      execute_process(COMMAND ${CMAKE_CXX_COMPILER} -fPIC -shared -I${NGHTTP2_INCLUDE_DIR}
                              ${CMAKE_BINARY_DIR}/http2_check.cpp ${archive} -o ${CMAKE_BINARY_DIR}/http2_check.so
                      RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
    endif()
    if(failed EQUAL 0)
      set(http2_library ${archive})
    endif()
  endif()
  if(NOT http2_library)
    set(SHOAL_HTTP2 OFF)
  endif()
endif()
if(SHOAL_HTTP2)
  add_library(shoal_http2 INTERFACE)
  target_include_directories(shoal_http2 SYSTEM INTERFACE ${NGHTTP2_INCLUDE_DIR})
  target_compile_definitions(shoal_http2 INTERFACE SHOAL_HTTP2)
  target_link_libraries(shoal_http2 INTERFACE ${http2_library} ${CMAKE_DL_LIBS})
  if(http2_library MATCHES "libshoal_nghttp2\\.a$")
    target_compile_definitions(shoal_http2 INTERFACE SHOAL_HTTP2_STATIC)
    target_link_options(shoal_http2 INTERFACE -Wl,--exclude-libs,libshoal_nghttp2.a)
  endif()
  if(OPENSSL_HEADERS)
    target_include_directories(shoal_http2 SYSTEM INTERFACE ${OPENSSL_HEADERS})
    target_compile_definitions(shoal_http2 INTERFACE SHOAL_OPENSSL)
  endif()
  message(STATUS "native front end: nghttp2 from ${http2_library}, TLS headers: ${OPENSSL_HEADERS}")
else()
  message(STATUS "native front end: not built, since nghttp2 was not found")
endif()
