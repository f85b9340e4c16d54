// The fields of a message that the joiner uses: key, time, and for an action its kind and value.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace shoal::join {

enum class Coding : int { json, text };

// Where these are in the messages of one stream.
struct Fields {
  Coding coding = Coding::json;
  char delimiter = ',';              // of text
  std::vector<std::string> key;      // names of JSON members, whose values together are the key
  std::string time, kind, value;     // names; kind and value may be empty
  std::vector<int64_t> key_columns;  // the same for text, as numbers of columns; -1 for none
  int64_t time_column = -1, kind_column = -1, value_column = -1;
  double per_second = 1;               // units of the time field; 0 for ISO 8601
  std::vector<std::string> forbidden;  // members that a message must not have, since the joiner adds them
};

struct Message {
  std::string key;
  int64_t time = 0;  // microseconds since 1970
  std::string_view kind;
  double value = 0;
  bool has_value = false;
  std::string_view payload;  // without spaces around it
  std::string kind_text;     // holds `kind` if the message had escapes in it
};

constexpr size_t kMaxKey = 4096;
constexpr int64_t kMaxTime = int64_t{1} << 60;  // microseconds; later times might overflow when a window is added

// False, with a reason, for a message that cannot be joined.
bool read_message(const Fields& fields, std::string_view text, Message* out, std::string* why);

// Microseconds since 1970 of a time such as "2026-11-01T12:00:00.5Z" (or with an offset), or of a date.
bool read_iso_time(std::string_view text, int64_t* out);

}  // namespace shoal::join
