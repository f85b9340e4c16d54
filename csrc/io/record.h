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

static_assert(std::endian::native == std::endian::little, "files are little-endian and written as they are in memory");

constexpr size_t kRecordHeader = 12;
constexpr size_t kRecordFooter = 4;

// Writes header and footer around the payload of `n` bytes, which is already at record + kRecordHeader.
inline void frame_record(char* record, uint64_t n) {
  const uint32_t payload_crc = mask_crc(crc32c(record + kRecordHeader, n));
  std::memcpy(record, &n, 8);
  const uint32_t length_crc = mask_crc(crc32c(record, 8));
  std::memcpy(record + 8, &length_crc, 4);
  std::memcpy(record + kRecordHeader + n, &payload_crc, 4);
}

// A byte buffer that can grow without initializing the new bytes.
class Bytes {
 public:
  const char* data() const { return data_.get(); }
  size_t size() const { return size_; }
  void clear() { size_ = 0; }
  // Grows by n bytes, which are not initialized; returns where they begin.
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

// The bytes of a file in order, as they are on disk or unpacked from Snappy blocks. Every error names the file.
class ByteReader {
 public:
  // Throws std::system_error if the file cannot be opened.
  ByteReader(std::string path, bool snappy);
  ~ByteReader();
  ByteReader(const ByteReader&) = delete;
  ByteReader& operator=(const ByteReader&) = delete;

  // Appends at least one byte, usually about a block; false at the end of the file. Lengths in the file are checked
  // against the bytes that it has.
  bool append(Bytes* out);
  const std::string& path() const { return path_; }
  // Bytes of the file that have not been read yet.
  int64_t left() const { return size_ - digest_.bytes; }
  const FileDigest& digest() const { return digest_; }  // of the bytes read; of the file once append() was false
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

// A run of complete records with checked headers; payload() checks the payloads.
struct Chunk {
  Bytes bytes;
  std::vector<size_t> starts;  // of the headers
  int64_t first = 0;           // the number of earlier records in the file
  int64_t offset = 0;          // of bytes.data(), in the file or in its unpacked blocks
  bool unpacked = false;       // in the unpacked blocks

  // ", at byte N" of record i, for messages.
  std::string place(size_t i) const { return place_at(offset + static_cast<int64_t>(starts[i]), unpacked); }
  static std::string place_at(int64_t byte, bool unpacked) {
    return ", at byte " + std::to_string(byte) + (unpacked ? " of its unpacked blocks" : "");
  }

  struct Payload {
    const char* data;
    size_t size;
  };
  // Throws DataError if the checksum does not match.
  Payload payload(size_t i, const std::string& path) const;
};

// Cuts a file into chunks. Several threads may call next(); each chunk goes to one of them.
class ChunkReader {
 public:
  ChunkReader(std::string path, bool snappy) : bytes_(std::move(path), snappy), snappy_(snappy) {}
  // False at the end of the file. Throws DataError if it ends inside a record or a header is corrupt.
  bool next(Chunk* chunk);
  const std::string& path() const { return bytes_.path(); }
  const FileDigest& digest() const { return bytes_.digest(); }  // of the file, once next() was false

 private:
  std::mutex mutex_;
  ByteReader bytes_;
  Bytes rest_;  // the beginning of a record whose end has not been read yet
  int64_t records_ = 0;
  int64_t offset_ = 0;  // of rest_
  const bool snappy_;
  bool failed_ = false;
};

}  // namespace shoal
