// One row as an EntryDump message and back, byte for byte what protobuf writes and everything that it reads.
//
//   EntryDump { 1 sfixed64 id; 2 repeated float num; 3 OptimizerDump opt; 4 int64 last_update_ts_sec;
//               15 uint64 eviction }                         the last one of tables with a budget alone
//   OptimizerDump { 1 repeated SingleOptimizerDump dump }    one per segment, but none for moving_average
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "io/wire.h"
#include "table/rows/layout.h"

namespace shoal {

class EntryEncoder {
 public:
  // A training layout, which must outlive this. Without `state` the optimizer's part is left out.
  explicit EntryEncoder(const Layout& layout, bool state = true);
  // What encode() may touch, including a little behind the message.
  size_t max_bytes() const { return max_bytes_; }
  // Returns the end of the message. `id` may be null: then the field is left out. So is a `score` of 0
  // (Moment::lasting).
  char* encode(const char* row, uint32_t time, const int64_t* id, uint64_t score, char* out) const;

 private:
  const Layout& layout_;
  std::vector<uint32_t> float_bytes_;  // per segment: its optimizer's message without an int64
  std::vector<int32_t> step_;          // per segment: where in the row its int64 lies, or -1
  size_t max_bytes_ = 0;
  const bool state_;
};

// What a record says besides the row itself.
struct EntryHead {
  int64_t id = 0;
  uint32_t time = 0;
  uint64_t score = 0;  // what the policy of a table with a budget kept of it; 0: unknown
  bool keep = true;    // false: an all-zero vector, which this table does not store
};

class EntryDecoder {
 public:
  // strict: a record whose optimizer state does not fit the layout is an error; otherwise that segment's state starts
  // fresh. The number of weights must fit either way. The layout must outlive this.
  EntryDecoder(const Layout& layout, bool strict);
  // Fills row[0 .. row_bytes). Throws DataError; where the record is readable the message names its id and the segment.
  EntryHead decode(const char* data, size_t n, char* row);

 private:
  void decode_states(int64_t id, char* row);
  // Empty when the element is a dump of this segment's optimizer, else what is wrong with it.
  std::string decode_state(const Segment& segment, wire::Reader element, char* state);

  const Layout& layout_;
  const bool strict_;
  std::vector<int> dumped_;  // segments that have an element in the OptimizerDump
  bool stateless_ = true;    // none of them has any state
  std::vector<float> weights_;
  std::vector<wire::Reader> opts_, elements_, parts_;
};

}  // namespace shoal
