// Saving tables to shard files, and loading them.
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

// Another thread may watch and cancel a long save or load.
struct Progress {
  std::atomic<int64_t> rows{0};   // written or read so far
  std::atomic<int64_t> bytes{0};  // of files, written so far
  std::atomic<bool> cancelled{false};
};

// One table of a save. `table` and `expiry` must outlive it.
struct SaveSource {
  const Table* table;
  const Expiry* expiry;        // null: no row is stale
  uint32_t changed_since = 0;  // an epoch of the table; 0: all rows
  // For a table whose rows are elsewhere: appends the rows of one of `parts` parts; called by the saving thread. If not
  // given, parts are the table's stripes, and Table::snapshot copies them.
  std::function<void(int part, Rows* out)> take = {};
  int parts = Table::kStripes;
};

struct SaveTarget {
  std::vector<std::string> temporary;  // one per shard; their folders must exist, the files must not
  std::vector<std::string> path;       // their final names, once all shards are on disk
  bool snappy = false;
  int64_t random_sleep_ms = 0;  // each shard waits a random time below this before it begins
  bool state = true;            // false: save only weights, without the optimizers' state
};

struct SavedShard {
  std::vector<int64_t> rows;  // by source
  FileDigest digest;
};

// Writes the tables' rows, table by table, each row once and as a whole, except stale rows. The calling thread copies
// one stripe after another; threads of low priority encode and write, so that concurrent lookups and updates keep most
// of their speed. On failure it removes all files and throws std::system_error or Cancelled.
std::vector<SavedShard> save(const std::vector<SaveSource>& sources, const SaveTarget& target, Progress* progress);

// The records that a load takes: those with id mod modulus == residue; the remainder is never negative.
struct ShardRule {
  int64_t modulus = 1;
  int64_t residue = 0;
  bool owns(int64_t id) const {
    const int64_t r = id % modulus;
    return (r < 0 ? r + modulus : r) == residue;
  }
};

// Reads records into a new table and swaps its rows in at the end: a corrupt file leaves the table as it was.
class Load {
 public:
  // `unstamped`, unless 0, is the time that all rows get if no record has one.
  Load(Table& table, bool strict, ShardRule shard, uint32_t unstamped = 0);
  ~Load();
  struct Taken {
    int64_t records = 0;
    std::vector<FileDigest> files;  // as they were read
  };
  // Reads files of this table's records, in parallel. Replaces rows that were read before. Throws DataError,
  // std::system_error or Cancelled.
  Taken read(const std::vector<std::string>& paths, Progress* progress);
  // Remove rows that later files delete, and expired rows.
  int64_t erase(const int64_t* ids, int64_t n);
  int64_t evict(const Expiry& expiry, int64_t now);
  int64_t rows() const;
  // Replaces the table's contents with the rows read. The load cannot be used afterwards.
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
  std::array<std::mutex, Table::kStripes> stripes_;  // held by the worker that adds rows to a stripe
};

// Reads one data file of a multi-table: counts[i] records of loads[i] (null: skip the table), then those of the next.
// Throws DataError if the file has more or fewer.
FileDigest load_multi(const std::string& path, const std::vector<Load*>& loads, const std::vector<int64_t>& counts,
                      Progress* progress);

}  // namespace shoal
