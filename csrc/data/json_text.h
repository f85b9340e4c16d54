// Texts of JSON: where one ends, and what its escapes stand for.
#pragma once
#include <string>
#include <string_view>

namespace shoal {

constexpr bool is_json_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

// Moves `*at`, which is behind an opening quote, behind the closing one; `*out` is the text between them, with its
// escapes. Returns false if it does not end before `end`.
bool json_text(const char** at, const char* end, std::string_view* out);

enum class Unescaped { good, broken_escape, lone_surrogate };

// Appends a text with its escapes replaced. A lone surrogate is appended too, like any other character; after a broken
// escape nothing more is appended.
Unescaped append_unescaped(std::string_view text, std::string* out);

}  // namespace shoal
