// Tables to shard files and back.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/digest.h"
#include "table/table.h"

namespace shoal {

// A long save or load may be watched and cancelled from another thread.
struct Progress {
  std::atomic<int64_t> rows{0};   // written or read so far
  std::atomic<int64_t> bytes{0};  // of files, written so far
  std::atomic<bool> cancelled{false};
};

// What one table contributes to a save. `table` and `expiry` must outlive it.
struct SaveSource {
  const Table* table;
  const Expiry* expiry;        // null: no row is stale
  uint32_t changed_since = 0;  // an epoch of the table; 0: all rows
  // Appends the rows of one of `parts` parts, from the thread that saves: of a table whose rows live elsewhere. Unless
  // given, parts are the table's stripes, and its own `snapshot` takes them.
  std::function<void(int part, Rows* out)> take = {};
  int parts = Table::kStripes;
};

struct SaveTarget {
  std::vector<std::string> temporary;  // one per shard; their folders exist and the files do not
  std::vector<std::string> path;       // what they become once all shards are on the disk
  bool snappy = false;
  int64_t random_sleep_ms = 0;  // each shard waits a random time below it before it begins
  bool state = true;            // false: weights alone, without what their optimizer keeps
};

struct SavedShard {
  std::vector<int64_t> rows;  // by source
  FileDigest digest;
};

// Writes the tables' rows, table by table, each row once and in one piece, those that are stale left out. The caller's
// thread copies one stripe after another; threads of low priority encode and write, so lookups and updates that run at
// the same time keep most of their speed. Throws std::system_error or Cancelled; then none of the files is there.
std::vector<SavedShard> save(const std::vector<SaveSource>& sources, const SaveTarget& target, Progress* progress);

// The records that a load takes: those with id mod modulus == residue, rounding down.
struct ShardRule {
  int64_t modulus = 1;
  int64_t residue = 0;
  bool owns(int64_t id) const {
    const int64_t r = id % modulus;
    return (r < 0 ? r + modulus : r) == residue;
  }
};

// Reads records into a table that nobody sees yet and swaps it in at the end: a file that turns out to be corrupt
// leaves the table as it was.
class Load {
 public:
  // `unstamped`, unless 0, is the time that all rows get where no record has one.
  Load(Table& table, bool strict, ShardRule shard, uint32_t unstamped = 0);
  ~Load();
  struct Taken {
    int64_t records = 0;
    std::vector<FileDigest> files;  // as they were read
  };
  // Reads whole files of this table's records in parallel. Rows that are already here are replaced. Throws DataError,
  // std::system_error or Cancelled.
  Taken read(const std::vector<std::string>& paths, Progress* progress);
  // What later files take back, and what has expired by then.
  int64_t erase(const int64_t* ids, int64_t n);
  int64_t evict(const Expiry& expiry, int64_t now);
  int64_t rows() const;
  // The table now has what was read, and nothing else. Not to be used afterwards.
  void commit();

 private:
  friend FileDigest load_multi(const std::string&, const std::vector<Load*>&, const std::vector<int64_t>&, Progress*);
  class Worker;
  Table& fresh() const;  // throws std::invalid_argument after commit()

  Table& table_;
  const bool strict_;
  const ShardRule shard_;
  const uint32_t unstamped_;
  std::unique_ptr<Table> fresh_;
  std::array<std::mutex, Table::kStripes> stripes_;  // which of the workers hands over rows of a stripe
};

// Reads one data file of a multi table: `counts[i]` records of loads[i], which is null for a table that is skipped,
// then those of the next. Throws DataError when the file has more or fewer.
FileDigest load_multi(const std::string& path, const std::vector<Load*>& loads, const std::vector<int64_t>& counts,
                      Progress* progress);

}  // namespace shoal
