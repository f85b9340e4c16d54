// A table as it was at one moment, written to files while the table goes on.
#pragma once
#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "io/checkpoint.h"
#include "table/table.h"

namespace shoal {

// The moment is that of construction. From then on whoever writes to the table calls `before_write` with the ids first;
// rows of stripes that are not copied yet are put aside there, so memory grows with the rows written meanwhile and
// shrinks again stripe by stripe. Writes that name no ids (clear, evict) have to wait until `save` has returned.
class Snapshot {
 public:
  explicit Snapshot(const Table& table) : table_(table) {}
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  void before_write(const int64_t* ids, int64_t n);
  // Once, in any thread; as shoal::save.
  std::vector<SavedShard> save(const SaveTarget& target, Progress* progress);
  // Rows put aside now.
  int64_t kept() const;

 private:
  struct Kept {
    std::unordered_map<int64_t, bool> ids;  // whether there was a row
    Rows rows;
  };
  void take(int stripe, Rows* out);

  const Table& table_;
  mutable std::mutex mutex_;
  uint64_t taken_ = 0;  // stripes that are copied
  std::array<Kept, Table::kStripes> kept_;
};

}  // namespace shoal
