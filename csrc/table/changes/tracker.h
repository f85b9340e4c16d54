// Ids of a table that were written or removed since they were last taken, for whoever keeps a copy of the table.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "table/changes/touched.h"

namespace shoal {

// Thread-safe. What is told after it happened and taken before it is read is never missed: an id that is taken may have
// changed again by then, and then it is told again.
class Tracker {
 public:
  // Of each kind at most about `capacity` ids are kept. Beyond, written ids are given up for `all`; removed ones are
  // lost.
  explicit Tracker(int64_t capacity) : written_(capacity), removed_(capacity) {}

  void wrote(const int64_t* ids, int64_t n) { written_.insert(ids, n); }
  void removed(const int64_t* ids, int64_t n) { removed_.insert(ids, n); }
  // Every row may be another one now.
  void replaced() { all_.store(true); }

  struct Taken {
    std::vector<int64_t> ids;  // distinct, in no particular order
    bool all = false;          // any row that the table has may have changed
    int64_t lost = 0;          // removed ids that are not known any more
  };
  Taken take();
  int64_t size() const { return written_.size() + removed_.size(); }

 private:
  TouchedKeys written_, removed_;
  std::atomic<bool> all_{false};
  std::atomic<int64_t> written_lost_{0}, removed_lost_{0};  // up to the last take
};

}  // namespace shoal
