// Reading rows from files as columns, for tools that do not have the table's configuration.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "io/out_file.h"
#include "io/record.h"

namespace shoal {

// Some consecutive records of a file.
struct EntryColumns {
  std::vector<int64_t> ids, times;
  std::vector<int64_t> offsets;  // where the frames begin, in bytes of the file or of its unpacked blocks
  std::vector<int64_t> dims;     // weights of each
  std::vector<int64_t> shapes;   // equal if the optimizers' states have the same kinds and sizes
  std::vector<int64_t> states;   // equal if the states have the same bytes
  std::vector<float> weights;    // one record after another

  int64_t size() const { return static_cast<int64_t>(ids.size()); }
  void clear();
};

// Reads a file from beginning to end, some megabytes at a time, and checks everything that can be checked without the
// table: frames, both checksums, and that each record is an EntryDump with an id and weights.
class EntryScan {
 public:
  // Throws std::system_error if the file cannot be opened.
  EntryScan(std::string path, bool snappy) : reader_(std::move(path), snappy) {}

  // Reads the next records; false at the end. Throws DataError with the number of the record and its byte.
  bool next();
  const EntryColumns& columns() const { return columns_; }
  Chunk::Payload state(int64_t i) const;  // the OptimizerDump of record i, or empty; throws std::out_of_range
  Chunk::Payload frame(int64_t i) const;  // record i with header and footer; throws std::out_of_range
  const FileDigest& digest() const { return reader_.digest(); }  // of the file, once next() was false

 private:
  ChunkReader reader_;
  Chunk chunk_;
  EntryColumns columns_;
  std::vector<Chunk::Payload> states_;
};

// Writes records to a file that appears complete or not at all.
class EntrySink {
 public:
  EntrySink(std::string temporary, bool snappy) : file_(std::move(temporary), snappy) {}

  // Copies records `indices` of those that `scan` read last, byte for byte.
  void copy(const EntryScan& scan, const int64_t* indices, int64_t n);
  // Writes rows of `dim` weights. `states` has serialized OptimizerDumps one after another; ends[i] is the end of the
  // i-th. If `ends` is null, all rows have the same one of `state_bytes`.
  void rows(const int64_t* ids, const int64_t* times, const float* weights, int64_t n, int64_t dim, const char* states,
            int64_t state_bytes, const int64_t* ends);
  void sync() { file_.sync(); }
  void rename_to(const std::string& path) { file_.rename_to(path); }
  int64_t bytes() const { return file_.bytes(); }
  const FileDigest& digest() const { return file_.digest(); }  // after sync()

 private:
  OutFile file_;
};

}  // namespace shoal
