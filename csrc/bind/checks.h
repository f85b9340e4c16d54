// Checks of numbers from Python; their messages say what is allowed and what was given.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

namespace shoal::bind {

// `value`, which must be first..last.
inline int64_t in_range(const std::string& what, int64_t value, int64_t first, int64_t last) {
  if (value < first || value > last)
    throw std::invalid_argument(what + " must be " + std::to_string(first) + ".." + std::to_string(last) + ", got " +
                                std::to_string(value));
  return value;
}

// The choice with this number, of an enumeration that begins at 0 and ends with `last`.
template <class Enum>
Enum choice(const std::string& what, int value, Enum last) {
  return static_cast<Enum>(in_range(what, value, 0, static_cast<int64_t>(last)));
}

// Checks a number, such as the length of a list.
inline void check_equal(const std::string& what, int64_t value, int64_t wanted) {
  if (value != wanted)
    throw std::invalid_argument(what + " must be " + std::to_string(wanted) + ", got " + std::to_string(value));
}

}  // namespace shoal::bind
