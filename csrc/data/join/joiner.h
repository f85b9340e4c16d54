// Joins impressions with their actions, by key, within a window of event time.
//
// src/shoal/data/joining/reference.py defines the result in a few dozen lines. This joins millions of open impressions
// in a fixed amount of memory: keys are in an index, the newest records in one block of memory, all others in segments
// on disk, sorted by when their records leave. Single-threaded.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/join/fields.h"
#include "data/join/index.h"
#include "data/join/record.h"
#include "data/join/segment.h"
#include "data/join/tail.h"

namespace shoal::join {

constexpr int64_t kNever = -(int64_t{1} << 62);
constexpr int64_t kForever = int64_t{1} << 61;

enum class Rule : int { any, count, sum, max, first, last };

struct Label {
  std::string name;
  Rule rule = Rule::any;
  std::vector<std::string> kinds;  // of actions that count; empty: all
};

struct Settings {
  int64_t window = 0;            // microseconds, like all times
  int64_t before = 0;            // how long before its impression an action may be
  int64_t lateness[2] = {0, 0};  // how far out of order each stream may be
  bool close_on_action = false;  // emit at the first action that counts for the first label
  int64_t max_actions = 1000;    // that may wait for one key
  double keep_negatives = 1;
  uint64_t seed = 0;
  int64_t budget = int64_t{1} << 30;
  int64_t block = 0;  // bytes of the newest records in memory; 0: a part of the budget
  uint64_t salt = 0;  // of the index
  Fields fields[2];
  std::vector<Label> labels;
};

enum Counter : int {
  kImpressionsRead,
  kActionsRead,
  kPositives,
  kNegatives,
  kNegativesDropped,
  kJoinedActions,
  kLateImpressions,
  kLateActions,
  kDuplicateImpressions,
  kDuplicateActions,
  kUnmatchedActions,
  kActionsAfter,
  kExcessActions,
  kIgnoredActions,
  kBrokenImpressions,
  kBrokenActions,
  kLostRecords,
  kCounters
};
const char* counter_name(int counter);

// Whether to keep a negative with this key: the same in every process, run and version.
bool keeps_negative(std::string_view key, uint64_t seed, double rate);

struct Broken {
  int64_t index;
  std::string why;
};

class Joiner {
 public:
  // The folder must exist and contain only this joiner's files.
  Joiner(Settings settings, std::string folder);

  // Reads messages of one side and returns the broken ones, so that the caller can keep them before accept(). A message
  // with a time after `latest` is broken, since one wrong clock would close all windows.
  std::vector<Broken> read(int side, const std::vector<std::string_view>& messages, int64_t latest);
  // Writes the messages read to the tail; run() joins them.
  void accept(std::string_view position);
  // Says that no message before `watermark` will arrive from this side, which has ended or is idle.
  void advance(int side, int64_t watermark, std::string_view position);
  // Joins until everything accepted is done (false) or `bytes` of samples wait to be taken (true).
  bool run(int64_t bytes);
  // The samples since the last call, in order; they follow each other in `bytes`.
  struct Samples {
    int64_t first = 0;  // the number of the first one
    std::string bytes;
    std::vector<size_t> ends;
  };
  Samples take();

  // Writes everything in memory to a segment. Between run() == false and the next accept(), the state is then:
  void seal();
  std::vector<const Segment*> live() const;  // segments that hold something
  std::map<std::string, int64_t> state() const;
  const std::string& position(int side) const { return positions_[side]; }
  // Restores the state; the index is rebuilt from the segments.
  void restore(const std::map<std::string, int64_t>& state, const std::vector<uint64_t>& segments,
               const std::array<std::string, 2>& positions);
  // Reads a tail and joins its messages; `each` is called whenever `bytes` of samples wait to be taken. Returns where
  // the tail's last complete frame ends.
  int64_t replay(const std::string& path, int64_t bytes, const std::function<void()>& each, int64_t* torn);
  // Begins a new tail after the replayed frames (or at 0).
  void open_tail(const std::string& path, int64_t end, bool sync) { tail_.open(path, end, sync); }
  int64_t tail_bytes() const { return tail_.bytes(); }
  // Drops a damaged segment. Returns the number of lost records, which is counted.
  int64_t drop_segment(uint64_t number);

  int64_t counter(int which) const { return counters_[which]; }
  int64_t open_impressions() const { return open_[kImpressions]; }
  int64_t waiting_actions() const { return open_[kActions]; }
  int64_t spilled() const { return spilled_; }
  int64_t segments() const { return static_cast<int64_t>(segments_.size()); }
  int64_t watermark(int side) const { return watermarks_[side]; }
  int64_t newest(int side) const { return newest_[side]; }
  int64_t closed() const { return closed_; }
  int64_t emitted() const { return emitted_; }
  int64_t memory() const;

 private:
  struct Due {
    int64_t due;
    uint64_t order;
    uint64_t where;  // a byte of the block in memory, or the number of a segment
    bool operator>(const Due& other) const { return due != other.due ? due > other.due : order > other.order; }
  };
  struct Waiting {  // an action that an impression may get
    uint64_t number;
    int64_t time;
    double value;
    uint64_t mask;
    Location at;
    int64_t due;
    std::string kind;
  };

  uint64_t hash_of(std::string_view key) const;
  int64_t time_of(const Record& record) const {
    return record.header().due - settings_.window - (record.is_action() ? settings_.before : 0);
  }
  void begin(const Arrival& arrival, std::string_view position);
  void impression(char* record, uint64_t hash);
  void action(char* record, uint64_t hash);
  void make_room(size_t size);
  Location place(const Record& record, uint64_t hash);
  void emit_now(const Record& impression, Location at, uint64_t hash, const Waiting& action,
                const std::vector<Waiting>& others);
  void raise(int side, int64_t time);
  bool close_due(int64_t bytes);
  void leave(const Record& record, Location at);
  Record record_at(Location at, std::vector<char>* scratch);
  Segment& segment(uint64_t number);
  std::vector<Waiting> eligible(const Record& impression, uint64_t hash);
  void consume(uint64_t hash, Location at, int64_t due);
  void mark(Location at, int64_t due);
  void emit(const Record& impression, const std::vector<Waiting>& actions);
  double label_value(const Label& label, uint64_t bit, const std::vector<Waiting>& actions) const;
  Record head(Segment& segment);
  void reap();
  void check_budget();

  Settings settings_;
  Segments files_;
  Tail tail_;
  KeyIndex index_;
  std::unique_ptr<char[]> block_;  // the newest records
  size_t block_size_ = 0, block_used_ = 0, block_touched_ = 0;
  std::vector<Due> in_block_;                       // a heap: the record that leaves first is in front
  std::vector<Due> on_disk_;                        // a heap of the first record of each segment
  std::vector<std::unique_ptr<Segment>> segments_;  // by number
  std::vector<uint64_t> marks_;                     // records on disk that left since the last segment was written
  int64_t marks_until_ = kNever;
  uint64_t next_segment_ = 0;
  int64_t cursor_bytes_ = 0;
  static constexpr size_t kAhead = 8;  // records whose places in the index are prefetched
  std::vector<char> read_;             // records that were read and not accepted yet
  Arrival read_arrival_;
  std::vector<char> pending_;  // records that were accepted and not joined yet
  size_t pending_at_ = 0, pending_ahead_ = 0, hashed_ = 0, joined_ = 0;
  std::array<uint64_t, kAhead> hashes_{};
  int pending_side_ = 0;
  Samples out_;
  int64_t emitted_ = 0;
  int64_t watermarks_[2], newest_[2], closed_;
  uint64_t numbers_[2] = {0, 0};
  int64_t open_[2] = {0, 0}, spilled_ = 0;
  std::array<int64_t, kCounters> counters_{};
  std::string positions_[2];
  std::vector<char> scratch_, impression_scratch_;
};

}  // namespace shoal::join
