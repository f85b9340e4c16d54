// The collisionless table: one row per distinct int64 id, without a limit unless it has a budget.
//
// Ids are spread by hash over stripes. A stripe owns an index (id -> row number, time) and a reader-writer lock; rows
// are in slabs that all stripes share, and never move. A batch is cut into parts that own disjoint stripes, so threads
// never touch the same row and equal ids keep their input order: results do not depend on the number of threads.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "core/at_fork.h"
#include "core/function_ref.h"
#include "table/changes/touched.h"
#include "table/changes/tracker.h"
#include "table/filters/filter.h"
#include "table/readers.h"
#include "table/rows/layout.h"
#include "table/rows/optimizers.h"
#include "table/rwlock.h"

namespace shoal {

struct Bucket;
class Eviction;
struct EvictOptions;
struct Gradients;
struct Moment;
struct Resolved;
struct Slot;
struct Update;

// Rows copied out of a table, or to be written to one: row i is rows[i * stride .. + row_bytes).
struct Rows {
  std::vector<int64_t> ids;
  std::vector<uint32_t> times;
  std::vector<char> rows;
  std::vector<uint64_t> scores;  // with a budget: the policy's bits of each row (Moment::lasting); or empty
  int64_t size() const { return static_cast<int64_t>(ids.size()); }
  void add(int64_t id, uint32_t time, uint64_t score, const char* row, int32_t stride) {
    ids.push_back(id);
    times.push_back(time);
    scores.push_back(score);
    rows.insert(rows.end(), row, row + stride);
  }
  void clear() {
    ids.clear();
    times.clear();
    rows.clear();
    scores.clear();
  }
};

// Rows that were evicted from a full table, until they are taken.
struct EvictedRows {
  explicit EvictedRows(int64_t limit) : limit(limit) {}
  const int64_t limit;  // further rows are only counted
  std::mutex mutex;
  Rows rows;
  int64_t lost = 0;
};

// Seconds after which an id is stale, by the slot of the id.
struct Expiry {
  int64_t default_s = int64_t{36500} * 86400;
  std::vector<int64_t> of_slot;  // empty, or one for each of the 32768 slots
  bool stale(int64_t id, uint32_t time, int64_t now) const;
};

// The time that a write stamps its rows with.
struct Stamp {
  Stamp(uint32_t seconds, bool at_least = false) : seconds(seconds), at_least(at_least) {}  // NOLINT: a plain time
  uint32_t seconds;
  bool at_least;  // a row that has a later time keeps it
  // In a table with a budget:
  const Moment* moment = nullptr;  // the policy's clocks
  const float* score = nullptr;    // the score given with the write, or null
  bool loaded = false;
  const uint64_t* kept = nullptr;  // of a loaded row: the policy's bits (Moment::lasting), if known
};

// The policy for a gradient that holds NaN or infinity.
enum class BadGradient : int32_t { raise, skip, ignore };

// What is read for an id without a row: nothing, zeros, or the row that its first write would start from (zeros in a
// table with a filter).
enum class Missing : int32_t { none, zeros, initial };

// Gets the embeddings of ids [first, first + n), some at a time, while nobody writes them; a null row means none.
using UseRows = FunctionRef<void(int64_t first, int64_t n, const float* const* rows)>;

// Thrown for a gradient or a value that holds NaN or infinity.
struct NonFinite {
  int64_t position;
  int64_t id;
  int64_t update = 0;  // the number of the update in the call
};

// Called with a row that is being evicted, while it is still there and its stripe is locked.
class RowKeeper {
 public:
  virtual ~RowKeeper() = default;
  virtual void leaving(int stripe, int64_t id, uint32_t time, uint64_t score, const char* row) = 0;
};

class Table {
 public:
  // The index wastes least memory at `expected` rows, but holds any number. With `evict` the table keeps a budget;
  // throws std::bad_alloc if that is too small for an empty table.
  Table(Layout layout, uint64_t seed, int64_t expected = 1, const EvictOptions* evict = nullptr);
  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // All operations are thread-safe, and a row is read or written as a whole. `values`, `out` and `grads` are [n, dim].
  // A write asks the filter first: it skips an id that is not in the table and is filtered.

  // Unknown ids give zeros and, if `found` is given, 0 there.
  void lookup(const int64_t* ids, int64_t n, float* out, uint8_t* found = nullptr) const;
  // Passes the embeddings of the ids to `use`, in order, on the calling thread; a null row for the id `padding`.
  void read(const int64_t* ids, int64_t n, Missing missing, const int64_t* padding, UseRows use) const;
  // Unknown ids get a row from the initializer; those that are filtered give zeros.
  void lookup_or_insert(const int64_t* ids, int64_t n, Stamp time, float* out);
  void contains(const int64_t* ids, int64_t n, uint8_t* out) const;
  // With `finite`, assign and assign_add throw NonFinite before any effect. `scores`: one per id, or null.
  void assign(const int64_t* ids, int64_t n, const float* values, Stamp time, bool finite = false,
              const float* scores = nullptr);
  void assign_add(const int64_t* ids, int64_t n, const float* values, Stamp time, bool finite = false,
                  const float* scores = nullptr);
  // `rates` has one learning rate per segment. Returns how many occurrences were skipped for a bad gradient; throws
  // NonFinite before any effect.
  int64_t apply_gradients(const int64_t* ids, int64_t n, const float* grads, const float* rates, int64_t global_step,
                          Stamp time, bool dedup, BadGradient bad, const float* scores = nullptr);
  // The same for several tables in one call (table/gradients.h), each table in at most one update. NonFinite is thrown
  // before any effect on any of them.
  static void apply(std::span<Update> updates);
  void reinitialize(const int64_t* ids, int64_t n, Stamp now, int32_t* existed);
  // Which positions the filter drops; empty: none. The filter counts the ids. A table whose rows are elsewhere (on a
  // GPU) passes the ids that have no row there.
  std::vector<uint8_t> filtered(const int64_t* ids, int64_t n, bool dedup, bool remember_admitted);
  int64_t evict(const Expiry& expiry, int64_t now);
  // The counters, clocks and pinned ids of a table with a budget; else null.
  Eviction* eviction() const { return eviction_.get(); }
  // The policy's keys of ids, -1 for an id without a row; or with `lasting` its bits as checkpoints have them
  // (Moment::lasting), 0 for an id without a row.
  void policy_keys(const int64_t* ids, int64_t n, bool lasting, int64_t* out) const;
  // Sets the listener for evicted rows, replacing any previous one, until it is dropped.
  void set_keeper(RowKeeper* keeper);
  void drop_keeper(const RowKeeper* keeper);
  // Evicts the rows of these ids, whatever the policy says.
  void let_go(const int64_t* ids, int64_t n);
  // Says whether another table decides which rows leave, and calls `let_go` with them before each write: then any id
  // may use any free row. A write that finds no free row evicts rows itself.
  void follow(bool other);
  // An empty table with the same layout and policy, for rows that will replace this table's (swap_contents()). Its
  // budget is what other tables leave of this table's.
  std::unique_ptr<Table> empty_twin() const;
  int64_t erase(const int64_t* ids, int64_t n);
  void clear();

  const Layout& layout() const { return layout_; }
  // Takes the settings of optimizers and initializers from a layout with the same segments; throws
  // std::invalid_argument for any other. Must not run concurrently with writes.
  void set_layout(const Layout& layout);
  int64_t size() const;
  int64_t bytes() const;
  int64_t max_update_time() const { return max_update_time_.load(); }
  void raise_max_update_time(int64_t time);
  // Gradient batches so far. It seeds stochastic rounding, so that the same batches give the same bits again.
  uint64_t calls() const { return calls_.load(); }
  void set_calls(uint64_t calls) { calls_.store(calls); }

  void set_filter(std::shared_ptr<Filter> filter) { filter_ = std::move(filter); }
  bool has_filter() const { return filter_ && filter_->active(); }
  void set_touched(std::shared_ptr<TouchedKeys> touched, int32_t number) {
    touched_ = std::move(touched);
    touched_number_ = number;
  }
  // Reports every row that is written or removed from now on to the tracker, or stops. There may be any number of
  // trackers, added during writes, too. Without `writes` only removals and swap_contents() are reported.
  void track(std::shared_ptr<Tracker> tracker, bool writes = true);
  void untrack(const std::shared_ptr<Tracker>& tracker);

  // --- snapshot and restore ---------------------------------------------------------------------------------------
  static constexpr int kStripes = 64;   // as many as a lock set has bits
  static int stripe_of_id(int64_t id);  // in this process
  // Appends the rows of one stripe, under that stripe's shared lock. With changed_since > 0 only rows written in that
  // epoch or later.
  void snapshot(int stripe, uint32_t changed_since, Rows* out) const;
  // Appends at most `limit` rows of a stripe, starting at `place` (0 at first); returns the place to continue from, -1
  // at the end.
  int64_t walk(int stripe, int64_t place, int64_t limit, Rows* out) const;
  // The ids of one stripe.
  std::vector<int64_t> ids(int stripe) const;
  // Appends the rows of the ids that are in the table; found[i] says which are.
  void fetch(const int64_t* ids, int64_t n, Rows* out, uint8_t* found) const;
  // Copies bytes [first, first + size) of each id's row to `out`, and their times to `times` unless it is null; zeros
  // for an id without a row. Returns how many ids have a row.
  int64_t fetch_bytes(const int64_t* ids, int64_t n, int64_t first, int64_t size, char* out, int64_t* times) const;
  // Inserts or replaces rows as they are. Raises the max update time to the largest time. With a budget, the rows are
  // restored with the policy's bits, and those with the highest keys stay; or with `written` other rows leave for them,
  // as in any write.
  void load(const Rows& rows, bool written = false);
  // Exchanges all rows with a table of the same layout, in one step for every reader of this table. Change tracking
  // starts over: a delta against an earlier epoch is refused.
  void swap_contents(Table& other);

  // --- changes, for incremental checkpoints ----------------------------------------------------------------------
  // Starts a new epoch and returns it. Rows written from now on carry it; ids removed from now on are remembered.
  uint32_t begin_epoch();
  // The first epoch since which changes are known; 0 while nothing is tracked.
  uint32_t oldest_epoch() const { return oldest_epoch_.load(); }
  // Ids removed in `since` or later and not in the table now.
  std::vector<int64_t> removed_since(uint32_t since) const;
  // Forgets removals before `epoch`; deltas against older epochs are refused from now on.
  void forget_before(uint32_t epoch);

  // --- quantization scale of one_bit segments, one per segment -----------------------------------------------------
  std::vector<float> scales() const;
  void set_scales(const std::vector<float>& scales);

 private:
  struct Contents;
  struct Stripe;
  struct Write;
  template <bool kExclusive>
  class Locks;
  enum class Kind { assign, assign_add, gradients, reinitialize, load, insert };

  void read_row(const char* row, float* out) const;
  void fresh_row(int64_t id, char* row) const;
  void fresh_state(char* row) const;
  void fresh_weights(const int64_t* ids, int64_t n, float* const* weights) const;  // of rows for training
  void step_row(const Write& write, char* row, const float* grads, uint64_t noise, float* scratch) const;
  void write(Write write);
  void write_values(Kind kind, const int64_t* ids, int64_t n, const float* values, Stamp time, bool finite,
                    const float* scores);
  void begin(Write& write);
  static void write_all(std::span<Write> writes);
  static void write_rows(std::span<const Write> writes);
  void write_task(const Write& write, const uint32_t* positions, int64_t n, uint64_t owned);
  template <Kind kKind>
  void write_part(const Write& write, const uint32_t* positions, int64_t n, uint64_t owned);
  template <Kind kKind>
  void write_row(const Write& write, int64_t position, char* row, bool created, float* scratch) const;
  void write_groups(const Write& write, const uint32_t* positions, int64_t n, uint64_t owned);
  uint32_t time_of(Slot slot) const;
  struct Newcomer;
  struct Candidate;
  class Batch;
  void make_room(const Write& write, std::vector<Newcomer>& newcomers);
  void make_room_in(int stripe, const Write& write, std::span<Newcomer> newcomers);
  int64_t prune(int stripe, Bucket* first, const Write& write, int64_t wanted, uint32_t bound);
  void make_room_exactly(const Write& write, std::vector<Newcomer>& newcomers);
  bool may_leave(const Moment& moment, Slot slot, int64_t now) const;
  bool stays(const Write& write, int64_t id) const;
  void push_out(int stripe, const Write& write, std::span<const Slot> slots, int to_stripe);
  void log_removed(Stripe& stripe, uint32_t epoch, int64_t id, uint32_t row);
  Resolved find_or_insert(uint64_t hash, int64_t id, Stamp time);
  Resolved find_or_insert_at_home(uint64_t hash, Bucket* home, int64_t id, Stamp time);
  void stamp(Slot slot, Stamp time, bool created);
  void stamp_kept(Slot slot, Stamp time, bool created);
  void stamp_time(const Resolved& found, const Stamp& time);
  template <class Time, class Finish>
  void write_postponed(const Write& write, std::vector<Newcomer>& postponed, Time time, Finish finish);
  void forget(int stripe, int64_t id, uint32_t row);
  bool erase_row(int stripe, uint64_t hash, int64_t id);
  std::vector<uint8_t> nonfinite(const Gradients& gradients, BadGradient bad) const;
  std::vector<uint8_t> dropped(const Update& update, std::vector<uint8_t> skip);
  void note_touched(const Gradients& gradients, const std::vector<uint8_t>& drop);
  void update_scales(int64_t global_step);
  struct Follower {
    std::shared_ptr<Tracker> tracker;
    bool writes;
  };
  using Trackers = std::vector<Follower>;
  std::shared_ptr<const Trackers> trackers() const { return trackers_.load(std::memory_order_acquire); }
  static void note_written(std::span<const Write> writes);
  void note_removed(const std::vector<int64_t>& ids) const;

  Layout layout_;
  const uint64_t seed_;
  const int64_t expected_;
  std::vector<StepFn> steps_;
  bool plain_;  // lookups are copies of the weights
  std::unique_ptr<Eviction> eviction_;
  RowKeeper* keeper_ = nullptr;
  std::mutex gone_mutex_;
  bool small_ = false;  // with a budget: rows are so few that stripes share them
  std::atomic<bool> follows_{false};
  mutable RwLock locks_[kStripes];
  mutable Readers readers_;
  std::unique_ptr<Contents> contents_;  // replaced only while every lock is held
  std::atomic<int64_t> max_update_time_{0};
  std::atomic<uint64_t> calls_{0};
  std::atomic<uint32_t> epoch_{0}, oldest_epoch_{0};
  std::vector<std::atomic<float>> scales_;
  std::shared_ptr<Filter> filter_;
  std::shared_ptr<TouchedKeys> touched_;
  int32_t touched_number_ = 0;
  std::atomic<std::shared_ptr<const Trackers>> trackers_;  // null: none
  friend class AtFork;
  void at_fork(Fork phase);
  AtFork at_fork_{this};
};

}  // namespace shoal
