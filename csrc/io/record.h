// TFRecord framing: uint64 length, masked CRC of those 8 bytes, payload, masked CRC of the payload; little-endian.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/crc32c.h"
#include "io/digest.h"

namespace shoal {

static_assert(std::endian::native == std::endian::little, "files are little-endian and written as they lie in memory");

constexpr size_t kRecordHeader = 12;
constexpr size_t kRecordFooter = 4;

// The payload of `n` bytes stands at record + kRecordHeader already: writes header and footer around it.
inline void frame_record(char* record, uint64_t n) {
  const uint32_t payload_crc = mask_crc(crc32c(record + kRecordHeader, n));
  std::memcpy(record, &n, 8);
  const uint32_t length_crc = mask_crc(crc32c(record, 8));
  std::memcpy(record + 8, &length_crc, 4);
  std::memcpy(record + kRecordHeader + n, &payload_crc, 4);
}

// Bytes at the end of which room can be made without filling it first.
class Bytes {
 public:
  const char* data() const { return data_.get(); }
  size_t size() const { return size_; }
  void clear() { size_ = 0; }
  // Makes the size n larger; returns where the new bytes begin, whatever they are.
  char* extend(size_t n) {
    if (capacity_ - size_ < n) {
      const size_t capacity = std::max(size_ + n, capacity_ + capacity_ / 2);
      auto larger = std::make_unique_for_overwrite<char[]>(capacity);
      if (size_ > 0) std::memcpy(larger.get(), data_.get(), size_);
      data_ = std::move(larger);
      capacity_ = capacity;
    }
    size_ += n;
    return data_.get() + size_ - n;
  }
  void append(const char* from, size_t n) {
    if (n > 0) std::memcpy(extend(n), from, n);
  }

 private:
  std::unique_ptr<char[]> data_;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

// Bytes of a file in order, as they lie on disk or out of Snappy blocks. Every failure names the file.
class ByteReader {
 public:
  // Throws std::system_error when the file cannot be opened.
  ByteReader(std::string path, bool snappy);
  ~ByteReader();
  ByteReader(const ByteReader&) = delete;
  ByteReader& operator=(const ByteReader&) = delete;

  // Appends at least one byte, usually about a block's worth; false at the end of the file. No claim that the file
  // makes about a length is believed beyond the bytes that are there.
  bool append(Bytes* out);
  const std::string& path() const { return path_; }
  // Bytes of the file that were not read yet.
  int64_t left() const { return size_ - digest_.bytes; }
  const FileDigest& digest() const { return digest_; }  // of what was read; of the file once append() was false
  [[noreturn]] void fail(const std::string& what) const;

 private:
  size_t read(char* out, size_t n);

  std::string path_;
  bool snappy_;
  int fd_ = -1;
  int64_t size_ = 0;
  FileDigest digest_;
  std::vector<char> block_;
};

// A run of whole records, their headers checked; payloads are checked by payload().
struct Chunk {
  Bytes bytes;
  std::vector<size_t> starts;  // of the headers
  int64_t first = 0;           // how many records of the file come before
  int64_t offset = 0;          // of bytes.data(), in the file or in what its blocks unpack to
  bool unpacked = false;       // the latter

  // ", at byte N" of record i, for messages.
  std::string place(size_t i) const { return place_at(offset + static_cast<int64_t>(starts[i]), unpacked); }
  static std::string place_at(int64_t byte, bool unpacked) {
    return ", at byte " + std::to_string(byte) + (unpacked ? " of what its blocks unpack to" : "");
  }

  struct Payload {
    const char* data;
    size_t size;
  };
  // Throws DataError when the checksum does not fit.
  Payload payload(size_t i, const std::string& path) const;
};

// Cuts a file into chunks. Several threads may call next() of one file; each chunk goes to one of them.
class ChunkReader {
 public:
  ChunkReader(std::string path, bool snappy) : bytes_(std::move(path), snappy), snappy_(snappy) {}
  // False when the file has ended. Throws DataError when it ends inside a record or a header is corrupt.
  bool next(Chunk* chunk);
  const std::string& path() const { return bytes_.path(); }
  const FileDigest& digest() const { return bytes_.digest(); }  // of the file, once next() was false

 private:
  std::mutex mutex_;
  ByteReader bytes_;
  Bytes rest_;  // the beginning of a record whose end was not read yet
  int64_t records_ = 0;
  int64_t offset_ = 0;  // of rest_
  const bool snappy_;
  bool failed_ = false;
};

}  // namespace shoal
