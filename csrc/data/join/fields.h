// What the joiner needs of a message: its key, its time, and for an action its kind and its value.
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
  std::vector<int64_t> key_columns;  // the same in text, as numbers of columns; -1 for none
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
  std::string kind_text;     // what kind views where the message had escapes
};

constexpr size_t kMaxKey = 4096;
constexpr int64_t kMaxTime = int64_t{1} << 60;  // microseconds; beyond it sums with windows might overflow

// False, with a reason, for a message that cannot be joined.
bool read_message(const Fields& fields, std::string_view text, Message* out, std::string* why);

// Microseconds since 1970 of "2026-11-01T12:00:00.5Z", of a date alone, and of times with an offset.
bool read_iso_time(std::string_view text, int64_t* out);

}  // namespace shoal::join
