// Reading numbers and ids from text, and text as messages show it.
#pragma once
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

namespace shoal {

// A finite number; one that is too small for a double is 0.
inline bool to_number(std::string_view cell, double* out) {
  if (!cell.empty() && cell[0] == '+') cell.remove_prefix(1);
  const auto result = std::from_chars(cell.data(), cell.data() + cell.size(), *out);
  if (result.ptr != cell.data() + cell.size()) return false;
  if (result.ec == std::errc::result_out_of_range) *out = std::strtod(std::string(cell).c_str(), nullptr);
  return result.ec != std::errc::invalid_argument && std::isfinite(*out);
}

// Whether a number is finite as a float, which rows and nets compute with.
inline bool fits_float(double number) { return std::isfinite(static_cast<float>(number)); }

inline bool to_float(std::string_view cell, float* out) {
  if (!cell.empty() && cell.size() <= 7) {  // short integers: most numbers in logs
    const bool negative = cell[0] == '-';
    int32_t value = 0;
    size_t i = negative;
    for (; i < cell.size() && cell[i] >= '0' && cell[i] <= '9'; ++i) value = value * 10 + (cell[i] - '0');
    if (i == cell.size() && i > negative) {
      *out = static_cast<float>(negative ? -value : value);
      return true;
    }
  }
  if (!cell.empty() && cell[0] == '+') cell.remove_prefix(1);
  const auto result = std::from_chars(cell.data(), cell.data() + cell.size(), *out);
  if (result.ec == std::errc::result_out_of_range) {
    double number;
    if (!to_number(cell, &number)) return false;
    *out = static_cast<float>(number);
    return std::isfinite(*out);
  }
  return result.ec == std::errc() && result.ptr == cell.data() + cell.size() && std::isfinite(*out);
}

template <class T>
bool to_integer(std::string_view cell, T* out) {
  const auto result = std::from_chars(cell.data(), cell.data() + cell.size(), *out);
  return result.ec == std::errc() && result.ptr == cell.data() + cell.size();
}

// An id in signed or unsigned decimal.
inline bool to_id(std::string_view cell, int64_t* out) {
  if (!cell.empty() && cell[0] == '-') return to_integer(cell, out);
  uint64_t value;
  if (!to_integer(cell, &value)) return false;
  *out = static_cast<int64_t>(value);
  return true;
}

inline std::string shown(std::string_view cell) {
  std::string out(cell.substr(0, 40));
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e) c = '?';
  }
  return "'" + out + (cell.size() > 40 ? "...'" : "'");
}

}  // namespace shoal
