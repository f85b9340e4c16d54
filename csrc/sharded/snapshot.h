// A table as it was at one moment, written to files while the table is in use.
#pragma once
#include <array>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "io/checkpoint.h"
#include "table/table.h"

namespace shoal {

// The moment is that of construction. From then on `before_write` must be called with the ids before each write to the
// table: it keeps their rows, if their stripes are not copied yet; rows that leave a full table are kept, too. So
// memory grows with the rows written meanwhile and shrinks stripe by stripe. Writes without ids (clear, evict) must
// wait until `save` has returned. For one writing thread.
class Snapshot : RowKeeper {
 public:
  explicit Snapshot(Table& table);
  ~Snapshot() override;
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  void before_write(const int64_t* ids, int64_t n);
  // As shoal::save; may be called once, in any thread.
  std::vector<SavedShard> save(const SaveTarget& target, Progress* progress);
  // The number of rows that are kept now.
  int64_t kept() const;

 private:
  struct Kept {
    mutable std::mutex mutex;               // taken last: its holder takes no lock of the table
    bool taken = false;                     // the stripe has been copied
    std::unordered_map<int64_t, bool> ids;  // written ids, and whether each had a row
    Rows rows;
  };
  void leaving(int stripe, int64_t id, uint32_t time, uint64_t score, const char* row) override;
  void take(int stripe, Rows* out);

  Table& table_;
  std::mutex mutex_;  // held while a stripe is copied or a write is announced
  bool begun_ = false;
  std::array<Kept, Table::kStripes> kept_;
};

}  // namespace shoal
