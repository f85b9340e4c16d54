// Records on disk: immutable files, sorted by when their records leave, read once from the front as windows close.
//
// A file has 8 bytes of magic, the number of marks, the time until which it must be kept, a CRC-32C of these and of the
// marks, 4 bytes of zeros, the marks (locations of records that left early), and the records.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "data/join/index.h"
#include "data/join/record.h"
#include "io/digest.h"

namespace shoal::join {

struct Segment {
  uint64_t number = 0;
  std::string path;
  FileDigest digest;
  int64_t keep_until = 0;  // the latest `due` of its records and of the marked ones
  int64_t begin = 0;       // where its records begin
  int64_t next = 0;        // the first record that has not left; the end of the file if all have
  // A part of the file around `next`, while records leave.
  std::vector<char> buffer;
  int64_t buffered_at = 0;
  int64_t buffered = 0;

  bool ended() const { return next >= digest.bytes; }
};

// Writes and reads segments. Keeps a few files open. Every failure names the file.
class Segments {
 public:
  explicit Segments(std::string folder) : folder_(std::move(folder)) {}
  ~Segments();
  Segments(const Segments&) = delete;
  Segments& operator=(const Segments&) = delete;

  std::string path_of(uint64_t number) const;
  // Writes a file with these marks and records and flushes it to the disk; on failure it removes the file and throws
  // std::system_error. `places[i]` becomes the byte at which record i begins.
  Segment write(uint64_t number, int64_t keep_until, const std::vector<uint64_t>& marks,
                const std::vector<const char*>& records, std::vector<int64_t>* places);
  // Opens a file that was written before; its header and marks are checked.
  Segment open(uint64_t number, std::vector<uint64_t>* marks);
  // The record at `next`, valid until the segment is read again. `want`: the number of bytes to read at once.
  Record head(Segment& segment, int64_t want);
  // Any record; it is copied to `scratch` unless it is near `next`.
  Record read(const Segment& segment, int64_t at, std::vector<char>* scratch);
  void forget(const Segment& segment);  // closes its file

 private:
  struct Open {
    uint64_t number;
    int fd;
    uint64_t used;
  };
  int descriptor(const Segment& segment);
  size_t read_at(const Segment& segment, char* to, size_t n, int64_t at);
  Record checked(const Segment& segment, const char* data, int64_t at, int64_t there) const;

  std::string folder_;
  std::vector<Open> open_;
  uint64_t clock_ = 0;
};

}  // namespace shoal::join
