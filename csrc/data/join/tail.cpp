#include "data/join/tail.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "io/crc32c.h"
#include "io/error.h"

namespace shoal::join {

namespace {

constexpr size_t kFrame = 8;  // bytes, CRC
constexpr uint32_t kMaxFrame = uint32_t{1} << 30;

// Records are read in place, so they must begin at multiples of 8.
size_t padded_size(size_t n) { return (n + 7) / 8 * 8; }

size_t read_some(int fd, char* to, size_t n, const std::string& path) {
  size_t done = 0;
  while (done < n) {
    const ssize_t got = ::read(fd, to + done, n - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw os_error(path);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return done;
}

struct Closing {
  int fd;
  ~Closing() { ::close(fd); }
};

}  // namespace

Tail::~Tail() { close(); }

void Tail::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void Tail::open(const std::string& path, int64_t end, bool sync) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (fd < 0) throw os_error(path);
  if (::ftruncate(fd, end) != 0 || ::lseek(fd, end, SEEK_SET) != end) {
    const std::system_error error = os_error(path);
    ::close(fd);
    throw error;
  }
  close();
  path_ = path;
  fd_ = fd;
  end_ = end;
  sync_ = sync;
}

void Tail::append(Arrival arrival, std::string_view position, std::string_view records) {
  if (fd_ < 0) return;
  arrival.position = static_cast<uint32_t>(position.size());
  const size_t padded = padded_size(position.size());
  const size_t size = sizeof arrival + padded + records.size();
  if (size > kMaxFrame)
    throw DataError("a batch of the joiner must have at most 1073741824 bytes, got " + std::to_string(size));
  frame_.resize(kFrame + size);
  char* at = frame_.data() + kFrame;
  std::memcpy(at, &arrival, sizeof arrival);
  std::memset(at + sizeof arrival, 0, padded);
  std::memcpy(at + sizeof arrival, position.data(), position.size());
  if (!records.empty()) std::memcpy(at + sizeof arrival + padded, records.data(), records.size());
  const uint32_t bytes = static_cast<uint32_t>(size), crc = crc32c(at, size);
  std::memcpy(frame_.data(), &bytes, 4);
  std::memcpy(frame_.data() + 4, &crc, 4);
  size_t done = 0;
  int failed = 0;
  while (done < frame_.size() && failed == 0) {
    const ssize_t wrote = ::write(fd_, frame_.data() + done, frame_.size() - done);
    if (wrote >= 0) {
      done += static_cast<size_t>(wrote);
    } else if (errno != EINTR) {
      failed = errno;
    }
  }
  if (failed == 0 && sync_ && ::fdatasync(fd_) != 0) failed = errno;
  if (failed != 0) {
    if (::ftruncate(fd_, end_) != 0 || ::lseek(fd_, end_, SEEK_SET) != end_) close();
    throw std::system_error(failed, std::generic_category(), path_);
  }
  end_ += static_cast<int64_t>(frame_.size());
  if (frame_.capacity() > (size_t{4} << 20)) frame_ = {};
}

int64_t read_tail(const std::string& path,
                  const std::function<void(const Arrival&, std::string_view, std::string_view)>& take, int64_t* torn) {
  *torn = 0;
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    if (errno == ENOENT) return 0;
    throw os_error(path);
  }
  const Closing closing{fd};
  struct stat found;
  if (::fstat(fd, &found) != 0) throw os_error(path);
  const int64_t size = found.st_size;
  int64_t at = 0;
  std::vector<char> frame;
  while (at < size) {
    uint32_t head[2];
    const bool whole = read_some(fd, reinterpret_cast<char*>(head), kFrame, path) == kFrame;
    const int64_t end = whole ? at + static_cast<int64_t>(kFrame) + head[0] : size;
    bool good = whole && end <= size && head[0] >= sizeof(Arrival) && head[0] <= kMaxFrame;
    Arrival arrival;
    if (good) {
      frame.resize(head[0]);
      good = read_some(fd, frame.data(), head[0], path) == head[0] && crc32c(frame.data(), head[0]) == head[1];
    }
    if (good) {
      std::memcpy(&arrival, frame.data(), sizeof arrival);
      good = padded_size(arrival.position) <= head[0] - sizeof arrival && (arrival.side == 0 || arrival.side == 1);
    }
    if (!good) {
      const bool zeros = whole && head[0] == 0 && head[1] == 0;  // a power failure may leave zeros
      if (whole && end < size && !zeros)
        throw DataError("tail " + path + " is damaged at byte " + std::to_string(at) + ", with " +
                        std::to_string(size - end) + " bytes after the damage");
      *torn = size - at;
      break;
    }
    const std::string_view body(frame.data() + sizeof arrival, frame.size() - sizeof arrival);
    take(arrival, body.substr(0, arrival.position), body.substr(padded_size(arrival.position)));
    at = end;
  }
  return at;
}

}  // namespace shoal::join
