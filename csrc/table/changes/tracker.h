// Ids of a table that were written or removed since the last take(), for a copy of the table.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "table/changes/touched.h"

namespace shoal {

// Thread-safe. No change is missed if it is reported after it happened, and if ids are taken before their rows are
// read: a row that changes in between is reported again.
class Tracker {
 public:
  // Keeps about `capacity` written and as many removed ids. With more of them, `Taken::all` replaces the written ids,
  // and removed ids are lost.
  explicit Tracker(int64_t capacity) : written_(capacity), removed_(capacity) {}

  void wrote(const int64_t* ids, int64_t n) { written_.insert(ids, n); }
  void removed(const int64_t* ids, int64_t n) { removed_.insert(ids, n); }
  // Any row may have changed.
  void replaced() { all_.store(true); }

  struct Taken {
    std::vector<int64_t> ids;  // distinct, in no particular order
    bool all = false;          // any row of the table may have changed
    int64_t lost = 0;          // removed ids that were lost
  };
  Taken take();
  int64_t size() const { return written_.size() + removed_.size(); }

 private:
  TouchedKeys written_, removed_;
  std::atomic<bool> all_{false};
  std::atomic<int64_t> written_lost_{0}, removed_lost_{0};  // up to the last take
};

}  // namespace shoal
