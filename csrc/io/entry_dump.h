// A row as an EntryDump message: writes the same bytes as protobuf and reads everything that protobuf reads.
//
//   EntryDump { 1 sfixed64 id; 2 repeated float num; 3 OptimizerDump opt; 4 int64 last_update_ts_sec;
//               15 uint64 eviction }                         eviction: only for tables with a budget
//   OptimizerDump { 1 repeated SingleOptimizerDump dump }    one per segment, except moving_average
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/wire.h"
#include "table/rows/layout.h"

namespace shoal {

class EntryEncoder {
 public:
  // A training layout, which must outlive the encoder. Without `state` the optimizers' state is left out.
  explicit EntryEncoder(const Layout& layout, bool state = true);
  // The most bytes that encode() writes, including a few after the message.
  size_t max_bytes() const { return max_bytes_; }
  // Returns the end of the message. Leaves out a null `id` and a `score` (Moment::lasting) of 0.
  char* encode(const char* row, uint32_t time, const int64_t* id, uint64_t score, char* out) const;

 private:
  const Layout& layout_;
  std::vector<uint32_t> float_bytes_;  // per segment: bytes of its optimizer's message, without an int64
  std::vector<int32_t> step_;          // per segment: the byte of the row at which its int64 begins, or -1
  size_t max_bytes_ = 0;
  const bool state_;
};

// The contents of a record, apart from the row.
struct EntryHead {
  int64_t id = 0;
  uint32_t time = 0;
  uint64_t score = 0;  // the eviction policy's bits (Moment::lasting); 0: unknown
  bool keep = true;    // false: an all-zero vector, which this table does not store
};

class EntryDecoder {
 public:
  // strict: optimizer state that does not match the layout is an error; otherwise that segment's state starts fresh.
  // The number of weights must always match. The layout must outlive the decoder.
  EntryDecoder(const Layout& layout, bool strict);
  // Fills row[0 .. row_bytes). Throws DataError, with the id and the segment if the record is readable.
  EntryHead decode(const char* data, size_t n, char* row);

 private:
  void decode_states(int64_t id, char* row);
  // Returns what is wrong with the element; empty if it is a dump of this segment's optimizer.
  std::string decode_state(const Segment& segment, wire::Reader element, char* state);

  const Layout& layout_;
  const bool strict_;
  std::vector<int> dumped_;  // segments that have an element in the OptimizerDump
  bool stateless_ = true;    // none of them has any state
  std::vector<float> weights_;
  std::vector<wire::Reader> opts_, elements_, parts_;
};

}  // namespace shoal
