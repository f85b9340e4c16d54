#include "io/out_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "io/error.h"
#include "io/snappy.h"

namespace shoal {

namespace {

constexpr size_t kBuffer = size_t{1} << 20;
constexpr size_t kSnappyBlock = size_t{256} << 10;
constexpr int64_t kWriteBehind = int64_t{8} << 20;

}  // namespace

OutFile::OutFile(std::string temporary, bool snappy) : temporary_(std::move(temporary)), snappy_(snappy) {
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ < 0) throw os_error(temporary_);
}

OutFile::~OutFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void OutFile::make_room(size_t n) {
  flush();
  if (buffer_.size() < n) buffer_.resize(std::max(n, kBuffer));
}

void OutFile::flush() {
  if (!snappy_) {
    write(buffer_.data(), filled_);
  } else {
    packed_.resize(4 + snappy_bound(kSnappyBlock));
    for (size_t done = 0; done < filled_; done += kSnappyBlock) {
      const size_t n = snappy_compress(buffer_.data() + done, std::min(kSnappyBlock, filled_ - done), &packed_[4]);
      for (int i = 0; i < 4; ++i) packed_[i] = static_cast<char>(n >> (24 - 8 * i));  // big-endian
      write(packed_.data(), 4 + n);
    }
  }
  filled_ = 0;
}

void OutFile::write(const char* data, size_t n) {
  digest_.add(data, n);
  while (n > 0) {
    const ssize_t w = ::write(fd_, data, n);
    if (w < 0) {
      if (errno == EINTR) continue;
      throw os_error(temporary_);
    }
    data += w;
    n -= w;
  }
#if defined(__linux__)
  // Start writing to the disk now, so that sync() does not wait long.
  if (digest_.bytes - started_ >= kWriteBehind) {
    ::sync_file_range(fd_, started_, digest_.bytes - started_, SYNC_FILE_RANGE_WRITE);
    started_ = digest_.bytes;
  }
#endif
}

void OutFile::sync() {
  flush();
  buffer_ = {};
  packed_ = {};
  if (::fsync(fd_) != 0) throw os_error(temporary_);
  const int fd = fd_;
  fd_ = -1;
  if (::close(fd) != 0) throw os_error(temporary_);
}

void OutFile::rename_to(const std::string& path) {
  if (std::rename(temporary_.c_str(), path.c_str()) != 0) throw os_error(path);
  temporary_.clear();
}

}  // namespace shoal
