#include "io/record.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "io/error.h"
#include "io/snappy.h"

namespace shoal {

namespace {

constexpr size_t kBlock = size_t{2} << 20;

}  // namespace

ByteReader::ByteReader(std::string path, bool snappy) : path_(std::move(path)), snappy_(snappy) {
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ < 0) throw os_error(path_);
  struct stat status;
  if (::fstat(fd_, &status) != 0) {
    const auto error = os_error(path_);
    ::close(fd_);
    throw error;
  }
  size_ = status.st_size;
  ::posix_fadvise(fd_, 0, 0, POSIX_FADV_SEQUENTIAL);
}

ByteReader::~ByteReader() { ::close(fd_); }

void ByteReader::fail(const std::string& what) const { throw DataError(path_ + ": " + what); }

size_t ByteReader::read(char* out, size_t n) {
  size_t got = 0;
  while (got < n) {
    const ssize_t r = ::read(fd_, out + got, n - got);
    if (r < 0) {
      if (errno == EINTR) continue;
      throw os_error(path_);
    }
    if (r == 0) break;
    got += r;
  }
  digest_.add(out, got);
  return got;
}

bool ByteReader::append(Bytes* out) {
  if (!snappy_) {
    const size_t want = std::min<int64_t>(kBlock, left());
    if (want == 0) return false;
    if (read(out->extend(want), want) != want) fail("the file became shorter while it was read");
    return true;
  }
  while (left() > 0) {  // a block may be empty
    uint8_t header[4];
    if (left() < 4 || read(reinterpret_cast<char*>(header), 4) != 4) {
      fail("truncated inside the length of a block at byte " + std::to_string(digest_.bytes));
    }
    const uint32_t packed = static_cast<uint32_t>(header[0]) << 24 | header[1] << 16 | header[2] << 8 | header[3];
    const std::string where = "block before byte " + std::to_string(digest_.bytes) + ": ";
    if (packed > left())
      fail(where + "truncated: " + std::to_string(packed) + " bytes announced, " + std::to_string(left()) +
           " are left");
    block_.resize(packed);
    if (read(block_.data(), packed) != packed) fail("the file became shorter while it was read");
    if (packed == 0) continue;
    try {
      const uint64_t length = snappy_length(block_.data(), packed);
      if (length == 0) continue;
      snappy_decompress(block_.data(), packed, out->extend(length), length);
    } catch (const DataError& error) {
      fail(where + error.what());
    }
    return true;
  }
  return false;
}

Chunk::Payload Chunk::payload(size_t i, const std::string& path) const {
  const char* header = bytes.data() + starts[i];
  uint64_t n;
  uint32_t stored;
  std::memcpy(&n, header, 8);
  std::memcpy(&stored, header + kRecordHeader + n, 4);
  if (mask_crc(crc32c(header + kRecordHeader, n)) != stored) {
    throw DataError(path + ": record " + std::to_string(first + static_cast<int64_t>(i)) +
                    ": its checksum does not match its bytes; the file is corrupt" + place(i));
  }
  return {header + kRecordHeader, n};
}

bool ChunkReader::next(Chunk* chunk) {
  const std::lock_guard lock(mutex_);
  chunk->starts.clear();
  chunk->bytes.clear();
  chunk->offset = offset_;
  chunk->unpacked = snappy_;
  if (failed_) return false;  // another thread reports the error
  failed_ = true;             // until this call succeeds
  Bytes& bytes = chunk->bytes;
  bytes.append(rest_.data(), rest_.size());
  rest_.clear();
  size_t place = 0;
  const auto record = [&] { return "record " + std::to_string(records_ + static_cast<int64_t>(chunk->starts.size())); };
  const auto at = [&] { return Chunk::place_at(offset_ + static_cast<int64_t>(place), snappy_); };
  for (;;) {
    const bool more = bytes_.append(&bytes);
    while (bytes.size() - place >= kRecordHeader) {
      uint64_t n;
      uint32_t stored;
      std::memcpy(&n, bytes.data() + place, 8);
      std::memcpy(&stored, bytes.data() + place + 8, 4);
      if (mask_crc(crc32c(bytes.data() + place, 8)) != stored) {
        bytes_.fail(record() +
                    ": the checksum of its length does not match; the file is corrupt or not a file of records" + at());
      }
      if (n > bytes.size() - place - kRecordHeader || bytes.size() - place - kRecordHeader - n < kRecordFooter) break;
      chunk->starts.push_back(place);
      place += kRecordHeader + n + kRecordFooter;
    }
    if (!more && place < bytes.size()) bytes_.fail(record() + ": the file is truncated inside it" + at());
    if (!more || !chunk->starts.empty()) break;
  }
  rest_.append(bytes.data() + place, bytes.size() - place);
  chunk->first = records_;
  records_ += static_cast<int64_t>(chunk->starts.size());
  offset_ += static_cast<int64_t>(place);
  failed_ = false;
  return !chunk->starts.empty();
}

FileDigest digest_file(const std::string& path) {
  ByteReader reader(path, false);
  Bytes block;
  while (reader.append(&block)) block.clear();
  return reader.digest();
}

}  // namespace shoal
