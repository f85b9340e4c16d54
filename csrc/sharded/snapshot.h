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
// rows of stripes that are not copied yet are put aside there, and so are those that leave a full table, so memory
// grows with the rows written meanwhile and shrinks again stripe by stripe. Writes that name no ids (clear, evict) have
// to wait until `save` has returned. One thread writes.
class Snapshot : RowKeeper {
 public:
  explicit Snapshot(Table& table);
  ~Snapshot() override;
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  void before_write(const int64_t* ids, int64_t n);
  // Once, in any thread; as shoal::save.
  std::vector<SavedShard> save(const SaveTarget& target, Progress* progress);
  // Rows put aside now.
  int64_t kept() const;

 private:
  struct Kept {
    mutable std::mutex mutex;               // taken last: whoever has it takes no lock of the table
    bool taken = false;                     // the stripe is copied
    std::unordered_map<int64_t, bool> ids;  // whether there was a row
    Rows rows;
  };
  void leaving(int stripe, int64_t id, uint32_t time, uint64_t score, const char* row) override;
  void take(int stripe, Rows* out);

  Table& table_;
  std::mutex mutex_;  // of one stripe that is copied, or one write that is announced
  bool begun_ = false;
  std::array<Kept, Table::kStripes> kept_;
};

}  // namespace shoal
