// The tail: what came since the newest checkpoint, in the order in which it came. After a crash it is read again.
//
// A frame is: its bytes, their CRC-32C, then an Arrival and its position and records. The end of a file may be a frame
// that was not written to its end; what it held was never acknowledged and comes again.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace shoal::join {

struct Arrival {
  int32_t side = 0;
  uint32_t advance = 0;  // 1: no records, but the word that nothing before `watermark` will come
  int64_t watermark = 0;
  uint32_t records = 0;
  uint32_t broken = 0;    // messages that could not be read
  uint32_t position = 0;  // bytes of it
  uint32_t zeros = 0;
};
static_assert(sizeof(Arrival) == 32);

class Tail {
 public:
  ~Tail();
  Tail() = default;
  Tail(const Tail&) = delete;
  Tail& operator=(const Tail&) = delete;

  // Begins a file, or goes on at the end of one that read_tail() has read. Throws std::system_error.
  void open(const std::string& path, int64_t end, bool sync);
  void close();
  // All of it or nothing: a failed write is taken back before this throws.
  void append(Arrival arrival, std::string_view position, std::string_view records);
  int64_t bytes() const { return end_; }

 private:
  std::string path_;
  int fd_ = -1;
  int64_t end_ = 0;
  bool sync_ = false;
  std::vector<char> frame_;
};

// Calls `take` for every whole frame. Returns where the last one ends; `*torn` becomes the bytes behind it.
// Throws DataError for damage that is not at the end.
int64_t read_tail(const std::string& path,
                  const std::function<void(const Arrival&, std::string_view, std::string_view)>& take, int64_t* torn);

}  // namespace shoal::join
