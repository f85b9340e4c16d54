#include "table/index.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <vector>

namespace shoal {
static uint64_t random_salt() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}
const uint64_t kIndexSalt = random_salt();

uint32_t Index::fitting_buckets(int64_t ids) {
  constexpr int64_t kLanes = 4, kFill = 75, kLeast = 256;
  if (ids < kLeast * kLanes * kFill / 100) return kFullBuckets;
  int64_t buckets = ids / kLanes * 100 / kFill + 1;
  while (buckets > kFullBuckets) buckets = (buckets + 1) / 2;  // as a segment is split
  return static_cast<uint32_t>(buckets);
}

Index::Index(BlockArena* blocks, uint32_t full_buckets) : full_(full_buckets), blocks_(blocks) {
  directory_[0] = make_segment(1, 0, 0);
  if (!directory_[0]) throw std::bad_alloc();
}

Index::~Index() {
  if (buckets_ < full_) free_small(directory_[0], buckets_);
  if (directory_ != few_) free_directory();
}

Bucket* Index::make_segment(uint32_t buckets, uint32_t depth, uint64_t prefix) {
  const size_t bytes = (buckets + 1) * sizeof(Bucket);
  void* memory;
  if (buckets == full_) {
    memory = blocks_->allocate(bytes);  // zeroed already
    if (!memory) return nullptr;
  } else {
    if (!blocks_->take(bytes)) return nullptr;
    memory = std::aligned_alloc(64, bytes);
    if (!memory) {
      blocks_->give(bytes);
      throw std::bad_alloc();
    }
    std::memset(memory, 0, bytes);
  }
  auto* first = static_cast<Bucket*>(memory) + 1;
  head(first) = {0, 0, depth, prefix};
  return first;
}

void Index::free_small(Bucket* first, uint32_t buckets) {
  std::free(first - 1);
  blocks_->give((buckets + 1) * sizeof(Bucket));
}

void Index::free_directory() {
  std::free(directory_);
  blocks_->give(sizeof(Bucket*) << depth_);
}

int64_t Index::bytes() const {
  int64_t small = buckets_ < full_ ? (buckets_ + 1) * sizeof(Bucket) : 0;
  const auto directory = directory_ == few_ ? 0 : static_cast<int64_t>(sizeof(Bucket*) << depth_);
  return small + directory + static_cast<int64_t>(sizeof *this);
}

Slot Index::place(Bucket* first, uint32_t buckets, uint64_t hash, uint64_t id) {
  for (uint32_t b = start(hash, buckets);; b = next(b, buckets)) {
    if (const uint32_t usable = usable_lanes(first[b])) return take(first, {first + b, std::countr_zero(usable)}, id);
  }
}

// The id is not in the index, and its segment is full.
Slot Index::insert_grown(uint64_t hash, uint64_t id, bool may_grow) {
  Bucket* first = segment(hash);
  while (is_full(first)) {
    if (!grow(first, may_grow)) return {};
    first = segment(hash);
  }
  Slot slot = place(first, buckets_, hash, id);
  ++size_;
  return slot;
}

void Index::erase(uint64_t hash, Slot slot) {
  Head& h = head(segment(hash));
  slot.row() = kErasedRow;
  --h.count;
  ++h.erased;
  --size_;
}

bool Index::grow(Bucket* first, bool may_grow) {
  if (head(first).erased > head(first).count / (may_grow ? 4 : 64)) {
    rebuild(first);
    return true;
  }
  // Without more memory, any hole is worth closing.
  if (may_grow && (buckets_ < full_ ? enlarge(first) : split(first))) return true;
  if (head(first).erased == 0) return false;
  rebuild(first);
  return true;
}

// Takes ids out of a segment and puts them back where a probe from their home finds them. If there is an `other`
// segment, those whose hash has the bit move there, to the same home.
void Index::rebuild(Bucket* first, Bucket* other, uint32_t bit) {
  std::vector<Entry> displaced;
  uint32_t gone = 0;
  for (uint32_t b = 0; b < buckets_; ++b) {
    for (int lane = 0; lane < 4; ++lane) {
      Slot slot{first + b, lane};
      if (slot.row() < kFirstRow) {
        slot.row() = kFreeRow;
        continue;
      }
      const uint64_t hash = index_hash(slot.id());
      const bool moves = other && (hash >> bit & 1);
      if (!moves && start(hash, buckets_) == b) continue;
      const Entry entry{slot.id(), slot.row(), slot.time()};
      if (moves) {
        put(other, buckets_, hash, entry);
      } else {
        displaced.push_back(entry);
      }
      slot.row() = kFreeRow;
      ++gone;
    }
  }
  head(first).count -= gone;
  head(first).erased = 0;
  for (const Entry& entry : displaced) put(first, buckets_, index_hash(entry.id), entry);
}

void Index::put(Bucket* first, uint32_t buckets, uint64_t hash, const Entry& entry) {
  Slot slot = place(first, buckets, hash, entry.id);
  slot.row() = entry.row;
  slot.time() = entry.time;
}

bool Index::enlarge(Bucket* first) {
  uint32_t buckets = std::min(2 * buckets_, full_);
  Bucket* larger = make_segment(buckets, 0, 0);
  if (!larger) return false;
  for (uint32_t in = 0; in < 4 * buckets_; ++in) {
    Slot slot{first + in / 4, static_cast<int>(in % 4)};
    if (slot.row() >= kFirstRow) put(larger, buckets, index_hash(slot.id()), {slot.id(), slot.row(), slot.time()});
  }
  free_small(first, buckets_);
  directory_[0] = larger;
  buckets_ = buckets;
  return true;
}

bool Index::split(Bucket* first) {
  uint32_t depth = head(first).depth;
  // 2^26 segments of one stripe would hold 10^11 ids; with a salted hash, fewer ids do not get here.
  if (depth >= 26) throw std::length_error("too many ids share one hash prefix");
  uint64_t prefix = head(first).prefix;
  Bucket* other = nullptr;
  if (depth == depth_) {
    const size_t bytes = depth_ ? sizeof(Bucket*) << (depth_ + 1) : 0;
    if (!blocks_->take(bytes)) return false;
    if (!(other = make_segment(full_, depth + 1, 2 * prefix + 1))) {
      blocks_->give(bytes);
      return false;
    }
    auto** wider = depth_ ? static_cast<Bucket**>(std::malloc(sizeof(Bucket*) << (depth_ + 1))) : few_;
    if (!wider) throw std::bad_alloc();
    for (uint64_t at = uint64_t{1} << depth_; at-- > 0;) wider[2 * at] = wider[2 * at + 1] = directory_[at];
    if (directory_ != few_) free_directory();
    directory_ = wider;
    ++depth_;
  } else if (!(other = make_segment(full_, depth + 1, 2 * prefix + 1))) {
    return false;
  }
  head(first).depth = depth + 1;
  head(first).prefix = 2 * prefix;
  rebuild(first, other, 63 - kStripeBits - depth);
  uint64_t share = uint64_t{1} << (depth_ - depth - 1);  // directory entries that now lead to `other`
  uint64_t begin = (2 * prefix + 1) * share;
  for (uint64_t at = begin; at < begin + share; ++at) directory_[at] = other;
  return true;
}

}  // namespace shoal
