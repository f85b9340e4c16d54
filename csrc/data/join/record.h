// An open impression or a waiting action as bytes; the format is the same in memory, in segments and in the tail.
#pragma once
#include <cstdint>
#include <cstring>
#include <string_view>

#include "io/crc32c.h"

namespace shoal::join {

enum Side : int { kImpressions = 0, kActions = 1 };

struct Header {
  uint32_t size;   // of the complete record, a multiple of 8
  uint32_t crc;    // of the bytes after it; only in segments
  int64_t due;     // when it leaves: at the end of an impression's window, or of the last one that an action may be in
  uint64_t order;  // side << 63 | number in its stream; if due at the same time, impressions leave first
  uint32_t body;   // bytes of the payload, or of the action's kind
  uint16_t key;
  uint16_t emitted;  // 1: an impression that was emitted at its first action; its key stays until its window ends
};
static_assert(sizeof(Header) == 32);

struct Action {       // after the header of an action
  int64_t watermark;  // of the actions when it arrived
  double value;
  uint64_t mask;  // the labels that it counts for
};

constexpr size_t kMaxRecord = size_t{1} << 26;

class Record {
 public:
  Record() = default;
  explicit Record(const char* at) : at_(at) {}
  const char* data() const { return at_; }
  const Header& header() const { return *reinterpret_cast<const Header*>(at_); }
  bool is_action() const { return header().order >> 63; }
  uint64_t number() const { return header().order << 1 >> 1; }
  const Action& action() const { return *reinterpret_cast<const Action*>(at_ + sizeof(Header)); }
  std::string_view key() const { return {texts(), header().key}; }
  std::string_view body() const { return {texts() + header().key, header().body}; }  // payload or kind

  static size_t bytes(bool action, size_t key, size_t body) {
    return (sizeof(Header) + (action ? sizeof(Action) : 0) + key + body + 7) / 8 * 8;
  }
  bool consistent() const {  // whether the sizes match; then nothing is read after `size` bytes
    const Header& h = header();
    return h.size <= kMaxRecord && h.size == bytes(is_action(), h.key, h.body);
  }

 private:
  const char* texts() const { return at_ + sizeof(Header) + (is_action() ? sizeof(Action) : 0); }
  const char* at_ = nullptr;
};

// Writes a record; Segments::write sets its crc.
inline void write_record(char* at, const Header& header, const Action* action, std::string_view key,
                         std::string_view body) {
  char* to = at + sizeof(Header);
  std::memcpy(at, &header, sizeof(Header));
  if (action != nullptr) {
    std::memcpy(to, action, sizeof(Action));
    to += sizeof(Action);
  }
  std::memcpy(to, key.data(), key.size());
  to += key.size();
  if (!body.empty()) std::memcpy(to, body.data(), body.size());
  to += body.size();
  std::memset(to, 0, static_cast<size_t>(at + header.size - to));
}

inline uint32_t record_crc(const char* at, size_t size) { return crc32c(at + 8, size - 8); }

}  // namespace shoal::join
