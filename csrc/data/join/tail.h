// The tail: the input since the newest checkpoint, in order of arrival. It is replayed after a crash.
//
// A frame is: the number of its bytes, their CRC-32C, then an Arrival with its position and records. The last frame of
// a file may be incomplete; its contents were never acknowledged and will be sent again.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace shoal::join {

struct Arrival {
  int32_t side = 0;
  uint32_t advance = 0;  // 1: no records, only a new `watermark`
  int64_t watermark = 0;
  uint32_t records = 0;
  uint32_t broken = 0;    // messages that could not be read
  uint32_t position = 0;  // bytes of the position
  uint32_t zeros = 0;
};
static_assert(sizeof(Arrival) == 32);

class Tail {
 public:
  ~Tail();
  Tail() = default;
  Tail(const Tail&) = delete;
  Tail& operator=(const Tail&) = delete;

  // Starts a file, or appends to one that read_tail() has read. Throws std::system_error.
  void open(const std::string& path, int64_t end, bool sync);
  void close();
  // Writes all or nothing: a failed write is undone before this throws.
  void append(Arrival arrival, std::string_view position, std::string_view records);
  int64_t bytes() const { return end_; }

 private:
  std::string path_;
  int fd_ = -1;
  int64_t end_ = 0;
  bool sync_ = false;
  std::vector<char> frame_;
};

// Calls `take` for every complete frame. Returns where the last one ends; `*torn` becomes the number of bytes after it.
// Throws DataError for damage that is not at the end.
int64_t read_tail(const std::string& path,
                  const std::function<void(const Arrival&, std::string_view, std::string_view)>& take, int64_t* torn);

}  // namespace shoal::join
