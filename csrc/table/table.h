// The collisionless table: one row per distinct int64 id, growing for ever.
//
// Ids are spread by hash over stripes. A stripe owns an index (id -> row number, time) and a reader-writer lock; rows
// live in slabs shared by all stripes and never move. A batch is cut into parts that own disjoint stripes, so threads
// never touch the same row and equal ids keep their input order: results do not depend on the number of threads.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "table/filter.h"
#include "table/layout.h"
#include "table/touched.h"

namespace shoal {

// Rows copied out of a table, or on their way in: row i is rows[i * stride .. + row_bytes).
struct Rows {
  std::vector<int64_t> ids;
  std::vector<uint32_t> times;
  std::vector<char> rows;
  int64_t size() const { return static_cast<int64_t>(ids.size()); }
};

// Days after which an id is stale, by the slot of the id; see stale().
struct Expiry {
  uint32_t default_days = 36500;
  std::vector<uint32_t> days_of_slot;  // empty, or one for each of the 32768 slots
  bool stale(int64_t id, uint32_t time, int64_t now) const;
};

class Table {
 public:
  Table(Layout layout, uint64_t seed);
  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  const Layout& layout() const;
  int64_t size() const;
  int64_t max_update_time() const;
  void raise_max_update_time(int64_t time);

  // --- snapshot and restore, all thread-safe -------------------------------------------------------------------
  static constexpr int kStripes = 64;
  // Appends the rows of one stripe, under that stripe's shared lock. With changed_since > 0 only rows written in that
  // epoch or later.
  void snapshot(int stripe, uint32_t changed_since, Rows* out) const;
  // The rows of a stripe from its `offset`-th place on, at most `limit`; *next is the offset to go on from, -1 at the
  // end.
  void walk(int stripe, int64_t offset, int64_t limit, Rows* out, int64_t* next) const;
  // Inserts or replaces rows as they are. Raises the max update time to the largest time.
  void load(const Rows& rows);
  void clear();
  int64_t erase(const int64_t* ids, int64_t n);

  // --- changes, for incremental checkpoints ----------------------------------------------------------------------
  // Starts a new epoch and returns it. Rows written from now on carry it; ids removed from now on are remembered.
  uint32_t begin_epoch();
  // Ids removed in `since` or later and not in the table now.
  std::vector<int64_t> removed_since(uint32_t since) const;

  // --- quantisation scale of one_bit segments, one per segment (1 for the others) --------------------------------
  std::vector<float> scales() const;
  void set_scales(const std::vector<float>& scales);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shoal
