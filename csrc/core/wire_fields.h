// A reader of a protobuf message, field by field, that never reads past its end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

namespace shoal {

// `Fail` is called with the reason and must throw: the caller knows the message's name.
template <class Fail>
class WireFields {
 public:
  explicit WireFields(std::string_view message) : at_(message.data()), end_(message.data() + message.size()) {}

  bool done() const { return at_ == end_; }

  // Moves to the next field; false at the end.
  bool next() {
    if (done()) return false;
    const uint64_t key = varint();
    field = static_cast<int>(key >> 3);
    type = static_cast<int>(key & 7);
    if (field == 0) fail("has field number 0");
    switch (type) {
      case 0:
        number = varint();
        return true;
      case 1:
        bytes = take(8);
        return true;
      case 2:
        bytes = take(varint());
        return true;
      case 5:
        bytes = take(4);
        return true;
      default:
        fail("has a field of wire type " + std::to_string(type) + "; only 0, 1, 2 and 5 are supported");
    }
  }

  uint64_t varint() {
    uint64_t out = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      if (done()) fail("is cut off inside a number");
      const auto byte = static_cast<uint8_t>(*at_++);
      out |= static_cast<uint64_t>(byte & 0x7f) << std::min(shift, 63);
      if (!(byte & 0x80)) return out;
    }
    fail("holds a number of more than 64 bits");
  }

  int field = 0, type = 0;
  uint64_t number = 0;
  std::string_view bytes;

 private:
  std::string_view take(uint64_t length) {
    if (length > static_cast<uint64_t>(end_ - at_)) {
      fail("is cut off: " + std::to_string(length) + " bytes promised, " + std::to_string(end_ - at_) + " left");
    }
    const std::string_view out(at_, static_cast<size_t>(length));
    at_ += length;
    return out;
  }
  [[noreturn]] static void fail(const std::string& what) {
    Fail{}(what);
    __builtin_unreachable();
  }

  const char* at_;
  const char* end_;
};

}  // namespace shoal
