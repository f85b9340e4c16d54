#include "data/json_text.h"

#include <cstdint>
#include <cstring>

namespace shoal {
namespace {

void append_utf8(uint32_t code, std::string* out) {
  const auto tail = [&](int shift) { out->push_back(static_cast<char>(0x80 | ((code >> shift) & 0x3f))); };
  if (code < 0x80) {
    out->push_back(static_cast<char>(code));
  } else if (code < 0x800) {
    out->push_back(static_cast<char>(0xc0 | (code >> 6)));
    tail(0);
  } else if (code < 0x10000) {
    out->push_back(static_cast<char>(0xe0 | (code >> 12)));
    tail(6), tail(0);
  } else {
    out->push_back(static_cast<char>(0xf0 | (code >> 18)));
    tail(12), tail(6), tail(0);
  }
}

bool hex4(std::string_view text, size_t at, uint32_t* out) {
  if (at + 4 > text.size()) return false;
  *out = 0;
  for (size_t i = at; i < at + 4; ++i) {
    const char c = text[i];
    const int digit = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
    if (digit < 0) return false;
    *out = *out * 16 + static_cast<uint32_t>(digit);
  }
  return true;
}

}  // namespace

bool json_text(const char** at, const char* end, std::string_view* out) {
  const char* const begin = *at;
  for (const char* from = begin; from < end;) {
    const char* quote = static_cast<const char*>(std::memchr(from, '"', end - from));
    if (quote == nullptr) return false;
    const char* slash = quote;
    while (slash > begin && slash[-1] == '\\') --slash;
    from = quote + 1;
    if ((quote - slash) % 2) continue;  // an escaped quote
    *out = {begin, static_cast<size_t>(quote - begin)};
    *at = from;
    return true;
  }
  return false;
}

Unescaped append_unescaped(std::string_view text, std::string* out) {
  Unescaped result = Unescaped::good;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\') {
      out->push_back(text[i]);
      continue;
    }
    if (++i == text.size()) return Unescaped::broken_escape;
    static constexpr std::string_view from = "\"\\/bfnrt", to = "\"\\/\b\f\n\r\t";
    if (const size_t known = from.find(text[i]); known != std::string_view::npos) {
      out->push_back(to[known]);
      continue;
    }
    uint32_t code, low;
    if (text[i] != 'u' || !hex4(text, i + 1, &code)) return Unescaped::broken_escape;
    i += 4;
    if (code >= 0xd800 && code < 0xe000) {
      if (code < 0xdc00 && text.substr(i + 1, 2) == "\\u" && hex4(text, i + 3, &low) && low >= 0xdc00 && low < 0xe000) {
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        i += 6;
      } else {
        result = Unescaped::lone_surrogate;
      }
    }
    append_utf8(code, out);
  }
  return result;
}

}  // namespace shoal
