// The feature id of a category's text. Files and checkpoints depend on it, so it must never change.
#pragma once
#include <charconv>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "core/hash.h"

namespace shoal {

constexpr uint64_t kSignatureMask = (uint64_t{1} << 48) - 1;

// 64 bits of a text. Texts of up to eight bytes and equal length never share a value.
inline uint64_t hash_text(std::string_view text) {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15ULL;
  const char* at = text.data();
  size_t left = text.size();
  uint64_t hash = (left + 1) * kOdd;
  for (; left > 8; at += 8, left -= 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    hash = hash_id(hash ^ word) + kOdd;
  }
  uint64_t word = 0;
  if (left > 0) std::memcpy(&word, at, left);
  return hash_id(hash ^ word);
}

// A v2 id: the slot in the upper bits, 48 bits of the hash below.
inline int64_t text_fid(std::string_view text, uint64_t slot) {
  return static_cast<int64_t>((slot << 48) | (hash_text(text) & kSignatureMask));
}

// The id of a number's decimal text.
inline int64_t number_fid(int64_t value, uint64_t slot) {
  char text[20];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  return text_fid({text, static_cast<size_t>(end - text)}, slot);
}

}  // namespace shoal
