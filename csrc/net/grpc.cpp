#include "net/grpc.h"

namespace shoal::net {

int64_t parse_timeout(std::string_view text) {
  if (text.size() < 2 || text.size() > 9) return -1;
  int64_t value = 0;
  for (char digit : text.substr(0, text.size() - 1)) {
    if (digit < '0' || digit > '9') return -1;
    value = 10 * value + (digit - '0');
  }
  int64_t unit;
  switch (text.back()) {
    case 'H':
      unit = 3600 * int64_t{1'000'000'000};
      break;
    case 'M':
      unit = 60 * int64_t{1'000'000'000};
      break;
    case 'S':
      unit = 1'000'000'000;
      break;
    case 'm':
      unit = 1'000'000;
      break;
    case 'u':
      unit = 1'000;
      break;
    case 'n':
      unit = 1;
      break;
    default:
      return -1;
  }
  constexpr int64_t kMost = int64_t{3} * 1'000'000'000 * 1'000'000'000;
  return value > kMost / unit ? kMost : value * unit;
}

std::string percent_encoded(std::string_view text) {
  constexpr char kHex[] = "0123456789ABCDEF";
  std::string out;
  out.reserve(text.size());
  for (char each : text) {
    const auto byte = static_cast<unsigned char>(each);
    if (byte >= 0x20 && byte <= 0x7e && each != '%') {
      out += each;
    } else {
      out += '%';
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
    }
  }
  return out;
}

std::string percent_decoded(std::string_view text) {
  auto digit = [](char each) {
    if (each >= '0' && each <= '9') return each - '0';
    const char upper = static_cast<char>(each & ~0x20);
    return upper >= 'A' && upper <= 'F' ? upper - 'A' + 10 : -1;
  };
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const int high = text[i] == '%' && i + 2 < text.size() ? digit(text[i + 1]) : -1;
    const int low = high >= 0 ? digit(text[i + 2]) : -1;
    if (low < 0) {
      out += text[i];
    } else {
      out += static_cast<char>(16 * high + low);
      i += 2;
    }
  }
  return out;
}

bool same_secret(std::string_view one, std::string_view other) {
  unsigned differ = one.size() != other.size();
  for (size_t i = 0; i < one.size(); ++i)
    differ |=
        static_cast<unsigned char>(one[i]) ^ static_cast<unsigned char>(other.empty() ? 0 : other[i % other.size()]);
  return !differ;
}

}  // namespace shoal::net
