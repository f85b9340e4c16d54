// The index of one stripe: id -> (row number, time), an extendible hash of fixed segments.
//
// A bucket is one cache line of four ids; a full bucket overflows into the next one of its segment. A segment that is
// 80 % full is split in two, so growth moves a few thousand ids at a time and never the whole table. A small stripe has
// one segment that doubles until it has the full size. The hash's top 10 bits choose the stripe, the next `depth` bits
// the segment, the low 32 bits the bucket.
#pragma once
#include <bit>
#include <cstdint>

#include "core/hash.h"
#include "table/rows/memory.h"

namespace shoal {

struct alignas(64) Bucket {
  uint64_t id[4];
  uint32_t row[4];
  uint32_t time[4];
};
static_assert(sizeof(Bucket) == 64);

// Row numbers start after these two, so that zeroed memory is a segment of free slots.
constexpr uint32_t kFreeRow = 0;    // the slot has not been used since the segment was built
constexpr uint32_t kErasedRow = 1;  // it has been, so a probe must continue after it
constexpr uint32_t kFirstRow = 2;

// The hash that places an id. It is salted with a random number per process, so that nobody can choose ids that all
// belong to one segment; nothing that leaves the process depends on it.
extern const uint64_t kIndexSalt;
inline uint64_t index_hash(uint64_t id) { return hash_id(id ^ kIndexSalt); }

// Whether a probe ends at this bucket: an id is put into the first slot that is free.
[[gnu::always_inline]] inline bool has_free(const Bucket& bucket) {
  const uint32_t* rows = bucket.row;
  return (rows[0] == kFreeRow) | (rows[1] == kFreeRow) | (rows[2] == kFreeRow) | (rows[3] == kFreeRow);
}

struct Slot {
  Bucket* bucket = nullptr;
  int lane = 0;
  explicit operator bool() const { return bucket != nullptr; }
  uint32_t& row() const { return bucket->row[lane]; }
  // The time of the last write, in seconds; in a table with a budget, the policy's bits (table/budget/policy.h).
  uint32_t& time() const { return bucket->time[lane]; }
  uint64_t id() const { return bucket->id[lane]; }
};

class alignas(64) Index {
 public:
  static constexpr int kStripeBits = 10;  // top bits of the hash, which choose the stripe
  static constexpr uint32_t kFullBuckets = 1024;
  // Buckets of a full segment for a stripe of about `ids` ids, so that segments end up 75 % full and not anywhere
  // between full and just split. kFullBuckets if `ids` is small or unknown.
  static uint32_t fitting_buckets(int64_t ids);

  Index(BlockArena* blocks, uint32_t full_buckets);
  ~Index();
  Index(Index&&) = delete;

  int64_t size() const { return size_; }
  int64_t bytes() const;  // outside the block arena

  // The bucket at which a probe for the hash begins.
  [[gnu::always_inline]] Bucket* home(uint64_t hash) const { return segment(hash) + start(hash, buckets_); }

  // The bucket that a probe for the hash looks at after another one.
  [[gnu::always_inline]] Bucket* behind(uint64_t hash, const Bucket* bucket) const {
    Bucket* first = segment(hash);
    return first + next(static_cast<uint32_t>(bucket - first), buckets_);
  }

  Slot find(uint64_t hash, uint64_t id) const {
    Bucket* first = segment(hash);
    for (uint32_t b = start(hash, buckets_);; b = next(b, buckets_)) {
      Bucket* bucket = first + b;
      uint32_t equal = lanes_of(*bucket, id);
      for (; equal; equal &= equal - 1) {
        int lane = std::countr_zero(equal);
        if (bucket->row[lane] >= kFirstRow) return {bucket, lane};
      }
      if (has_free(*bucket)) return {};
    }
  }

  // The lane of an id in its home bucket, as a bit; 0 if it is not there.
  static uint32_t lane_at_home(const Bucket& home, uint64_t id) {
    uint32_t lanes = lanes_of(home, id);
    for (int lane = 0; lane < 4; ++lane) lanes &= ~(uint32_t{home.row[lane] < kFirstRow} << lane);
    return lanes;
  }
  // Prefetches the buckets that a probe reads after a home bucket.
  void ask_beyond(uint64_t hash, Bucket* home) const {
    uint32_t at = start(hash, buckets_);
    Bucket* first = home - at;
    for (int beyond = 1; beyond <= 3; ++beyond) __builtin_prefetch(first + (at = next(at, buckets_)));
  }

  // The slot of an id, inserted if absent: then *created is set, and the caller must set row and time at once. Returns
  // an empty slot if the id is absent and the index cannot grow, for lack of memory or since `may_grow` is false.
  Slot find_or_insert(uint64_t hash, uint64_t id, bool* created, bool may_grow = true) {
    Bucket* first = segment(hash);
    Slot open;  // the first slot that a new id may take
    for (uint32_t b = start(hash, buckets_);; b = next(b, buckets_)) {
      Bucket* bucket = first + b;
      uint32_t equal = lanes_of(*bucket, id);
      for (; equal; equal &= equal - 1) {
        int lane = std::countr_zero(equal);
        if (bucket->row[lane] >= kFirstRow) {
          *created = false;
          return {bucket, lane};
        }
      }
      const uint32_t usable = usable_lanes(*bucket);
      if (!usable) continue;
      if (!open) open = {bucket, std::countr_zero(usable)};
      if (has_free(*bucket)) break;
    }
    *created = true;
    if (is_full(first)) return insert_grown(hash, id, may_grow);
    ++size_;
    return take(first, open, id);
  }
  // The same if the home bucket is enough and nothing must grow; otherwise changes nothing and returns an empty slot.
  Slot find_or_insert_at_home(uint64_t hash, Bucket* home, uint64_t id, bool* created) {
    if (const uint32_t there = lane_at_home(*home, id)) {
      *created = false;
      return {home, std::countr_zero(there)};
    }
    if (!has_free(*home)) return {};  // the id may be in a later bucket
    Bucket* first = home - start(hash, buckets_);
    if (is_full(first)) return {};
    *created = true;
    ++size_;
    return take(first, {home, std::countr_zero(usable_lanes(*home))}, id);
  }
  // Prefetches the segment's head, in which find_or_insert_at_home counts an inserted id.
  void ask_for_count(uint64_t hash, const Bucket* home) const {
    __builtin_prefetch(home - start(hash, buckets_) - 1, 1);
  }
  // Frees the slot; the caller may reuse the row.
  void erase(uint64_t hash, Slot slot);

  // The segment that has, or would get, an id.
  [[gnu::always_inline]] Bucket* segment(uint64_t hash) const {
    return directory_[((hash << kStripeBits) >> 1) >> (63 - depth_)];
  }
  // The segment at a place of the directory; advances `place` to the next one.
  Bucket* segment_at(uint64_t* place) const {
    Bucket* first = directory_[*place &= (uint64_t{1} << depth_) - 1];
    *place = first_entry(first) + (uint64_t{1} << (depth_ - head(first).depth));
    return first;
  }
  bool is_full(Bucket* first) const { return head(first).count + head(first).erased >= limit(); }
  bool is_packed(Bucket* first) const { return head(first).count >= limit(); }             // and no hole is left
  int64_t places_in(Bucket* first) const { return int64_t{limit()} - head(first).count; }  // once holes are closed
  uint32_t ids_in(Bucket* first) const { return head(first).count; }
  uint32_t buckets() const { return buckets_; }  // of every segment
  // Closes the holes that `erased` slots leave, whose rows the caller has set to kErasedRow.
  void close_holes(Bucket* first, uint32_t erased) {
    head(first).count -= erased;
    head(first).erased += erased;
    size_ -= erased;
    rebuild(first);
  }

  // fn(Slot) for every id, in an order that stays the same until the next write.
  template <class Fn>
  void each(Fn fn) const {
    for (uint64_t place = 0; (place = visit(place, 1 << 30, fn)) != kEnd;) {
    }
  }
  // The same for up to `limit` ids, starting at `place` (0 at first). Returns the place to continue from, or kEnd.
  static constexpr uint64_t kEnd = ~uint64_t{0};
  template <class Fn>
  uint64_t visit(uint64_t place, int64_t limit, Fn fn) const {
    uint64_t slots = uint64_t{4} * buckets_;
    for (uint64_t at = place / slots, in = place % slots; at < (uint64_t{1} << depth_); ++at, in = 0) {
      Bucket* first = directory_[at];
      if (at != first_entry(first)) continue;
      for (; in < slots; ++in) {
        if (limit <= 0) return at * slots + in;
        Slot slot{first + in / 4, static_cast<int>(in % 4)};
        if (slot.row() >= kFirstRow) {
          fn(slot);
          --limit;
        }
      }
    }
    return kEnd;
  }
  // Erases the slots for which gone(Slot) is true.
  template <class Fn>
  int64_t erase_if(Fn gone) {
    int64_t erased = 0;
    for (uint64_t at = 0; at < (uint64_t{1} << depth_); ++at) {
      Bucket* first = directory_[at];
      if (at != first_entry(first)) continue;
      uint32_t here = 0;
      for (uint32_t in = 0; in < 4 * buckets_; ++in) {
        Slot slot{first + in / 4, static_cast<int>(in % 4)};
        if (slot.row() >= kFirstRow && gone(slot)) {
          slot.row() = kErasedRow;
          ++here;
        }
      }
      if (here) close_holes(first, here);
      erased += here;
    }
    return erased;
  }

 private:
  struct Head {
    uint32_t count;   // ids
    uint32_t erased;  // slots of erased ids, until the segment is rebuilt
    uint32_t depth;   // hash bits that all its ids share, after the stripe's
    uint64_t prefix;  // those bits
  };
  // The lanes that hold an id, as bits. All four are compared without a branch, which could not be predicted.
  static uint32_t lanes_of(const Bucket& bucket, uint64_t id) {
    const uint64_t* ids = bucket.id;
    return uint32_t{ids[0] == id} | uint32_t{ids[1] == id} << 1 | uint32_t{ids[2] == id} << 2 |
           uint32_t{ids[3] == id} << 3;
  }
  // The lanes that an id may be put into.
  static uint32_t usable_lanes(const Bucket& bucket) {
    const uint32_t* rows = bucket.row;
    return uint32_t{rows[0] < kFirstRow} | uint32_t{rows[1] < kFirstRow} << 1 | uint32_t{rows[2] < kFirstRow} << 2 |
           uint32_t{rows[3] < kFirstRow} << 3;
  }
  // The home of a hash among `buckets` buckets, and the bucket after another one: a segment is a ring.
  [[gnu::always_inline]] static uint32_t start(uint64_t hash, uint32_t buckets) {
    return static_cast<uint32_t>((hash & 0xFFFFFFFFu) * buckets >> 32);
  }
  [[gnu::always_inline]] static uint32_t next(uint32_t bucket, uint32_t buckets) {
    return bucket + 1 == buckets ? 0 : bucket + 1;
  }
  static Head& head(Bucket* first) { return *reinterpret_cast<Head*>(first - 1); }
  uint64_t first_entry(Bucket* first) const { return head(first).prefix << (depth_ - head(first).depth); }
  uint32_t limit() const { return static_cast<uint32_t>(uint64_t{4} * buckets_ * 80 / 100); }

  struct Entry {
    uint64_t id;
    uint32_t row, time;
  };
  Bucket* make_segment(uint32_t buckets, uint32_t depth, uint64_t prefix);  // null: the budget does not allow it
  void free_small(Bucket* first, uint32_t buckets);
  void free_directory();
  Slot insert_grown(uint64_t hash, uint64_t id, bool may_grow);
  static Slot take(Bucket* first, Slot slot, uint64_t id) {
    if (slot.row() == kErasedRow) --head(first).erased;
    ++head(first).count;
    slot.bucket->id[slot.lane] = id;
    return slot;
  }
  static Slot place(Bucket* first, uint32_t buckets, uint64_t hash, uint64_t id);
  static void put(Bucket* first, uint32_t buckets, uint64_t hash, const Entry& entry);
  bool grow(Bucket* first, bool may_grow);
  void rebuild(Bucket* first, Bucket* other = nullptr, uint32_t bit = 0);
  bool enlarge(Bucket* first);
  bool split(Bucket* first);

  Bucket** directory_ = few_;
  uint32_t depth_ = 0;
  uint32_t buckets_ = 1;  // of a segment; all segments have the same
  Bucket* few_[2];        // a directory of depth 0 or 1, in the same cache line
  const uint32_t full_;   // buckets of a full segment
  int64_t size_ = 0;
  BlockArena* blocks_;
};

}  // namespace shoal
