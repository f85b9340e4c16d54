// A file that appears complete or not at all: written under another name, flushed to the disk, then renamed.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "io/digest.h"

namespace shoal {

class OutFile {
 public:
  // Writes to `temporary`, which must not exist yet. Throws std::system_error, as does every method.
  OutFile(std::string temporary, bool snappy);
  ~OutFile();  // removes the temporary file unless rename_to() succeeded
  OutFile(const OutFile&) = delete;
  OutFile& operator=(const OutFile&) = delete;

  // Room for `n` bytes at the end; used() says how many of them were written.
  char* room(size_t n) {
    if (buffer_.size() - filled_ < n) make_room(n);
    return buffer_.data() + filled_;
  }
  void used(size_t n) { filled_ += n; }

  void sync();  // flushes everything to the disk and closes the file
  void rename_to(const std::string& path);
  int64_t bytes() const { return digest_.bytes; }
  const FileDigest& digest() const { return digest_; }  // of the bytes written; complete after sync()

 private:
  void make_room(size_t n);
  void flush();
  void write(const char* data, size_t n);

  std::string temporary_;
  bool snappy_;
  int fd_ = -1;
  std::vector<char> buffer_;
  std::vector<char> packed_;
  size_t filled_ = 0;
  FileDigest digest_;
  int64_t started_ = 0;  // bytes that the disk was told to write
};

}  // namespace shoal
