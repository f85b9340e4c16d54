#include "table/table.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/hash.h"
#include "core/thread_pool.h"
#include "table/contents.h"

namespace shoal {
bool Expiry::stale(int64_t id, uint32_t time, int64_t now) const {
  const int64_t seconds = of_slot.empty() ? default_s : of_slot[static_cast<uint64_t>(id) >> 48 & 0x7FFF];
  return now - static_cast<int64_t>(time) >= seconds;
}

namespace {

// About how many rows a budget allows, for sizing the index.
int64_t rows_of(const EvictOptions& evict, int32_t stride) {
  const int64_t bytes = evict.bytes ? evict.bytes->limit() - evict.bytes->used() : Budget::kUnlimited;
  return std::min(evict.max_rows, bytes / (stride + 30));
}

constexpr int64_t kSmallTable = 8192;  // below so many rows, stripes share their rows

}  // namespace

Table::Table(Layout layout, uint64_t seed, int64_t expected, const EvictOptions* evict)
    : layout_(std::move(layout)),
      seed_(hash_id(seed + 0x9E3779B97F4A7C15ULL)),
      expected_(evict && rows_of(*evict, layout_.stride) < RowArena::kMost ? rows_of(*evict, layout_.stride)
                                                                           : expected),
      eviction_(evict ? std::make_unique<Eviction>(*evict) : nullptr),
      small_(evict && rows_of(*evict, layout_.stride) < kSmallTable),
      contents_(std::make_unique<Contents>(layout_.stride, expected_, eviction_.get(), small_)),
      scales_(layout_.segments.size()) {
  plain_ = !layout_.serving;
  for (size_t i = 0; i < layout_.segments.size(); ++i) {
    const Segment& s = layout_.segments[i];
    steps_.push_back(step_function(s.opt));
    plain_ &= s.codec == Codec::fp32 || s.codec == Codec::fp16;
    scales_[i] = s.init_scale;
  }
}

Table::~Table() = default;

// With every lock held no other thread is inside, so the child has complete rows and no lock that stays locked.
void Table::at_fork(Fork phase) {
  for (RwLock& lock : locks_) {
    if (phase == Fork::prepare) lock.lock();
    if (phase == Fork::parent) lock.unlock();
    if (phase == Fork::child) lock.reset();
  }
  if (phase == Fork::prepare) readers_.exclude(kAllStripes);
  if (phase == Fork::child) readers_.reset();
}

int Table::stripe_of_id(int64_t id) { return stripe_of(hash_of(id)); }

int64_t Table::size() const {
  int64_t total = 0;
  for (int i = 0; i < kStripes; ++i) {
    Locks<false> lock(*this, uint64_t{1} << i);
    total += contents_->stripes[i].index.size();
  }
  return total;
}

int64_t Table::bytes() const {
  Locks<false> lock(*this, kAllStripes);
  if (eviction_) return contents_->charged_bytes();
  int64_t total = contents_->rows.bytes() + contents_->blocks.bytes() + static_cast<int64_t>(sizeof(Contents));
  for (const Stripe& s : contents_->stripes)
    total += s.index.bytes() + static_cast<int64_t>(s.spare.capacity() * 4 + s.removed.capacity() * 16);
  return total;
}

uint32_t Table::time_of(Slot slot) const { return eviction_ ? contents_->rows.time(slot.row()) : slot.time(); }

void Table::raise_max_update_time(int64_t time) {
  int64_t seen = max_update_time_.load();
  while (seen < time && !max_update_time_.compare_exchange_weak(seen, time)) {
  }
}

std::vector<float> Table::scales() const {
  std::vector<float> out;
  for (const auto& scale : scales_) out.push_back(scale.load());
  return out;
}

void Table::set_scales(const std::vector<float>& scales) {
  if (scales.size() != scales_.size())
    throw std::invalid_argument("there must be one scale per segment, " + std::to_string(scales_.size()) + ", got " +
                                std::to_string(scales.size()));
  for (size_t i = 0; i < scales.size(); ++i) scales_[i].store(scales[i]);
}

// --- removal --------------------------------------------------------------------------------------------------------

void Table::forget(int stripe, int64_t id, uint32_t row) {
  Stripe& s = contents_->stripes[stripe];
  contents_->give_row(s, row);
  if (uint32_t epoch = epoch_.load(std::memory_order_relaxed)) log_removed(s, epoch, id, row);
}

bool Table::erase_row(int stripe, uint64_t hash, int64_t id) {
  Index& index = contents_->stripes[stripe].index;
  Slot slot = index.find(hash, static_cast<uint64_t>(id));
  if (!slot) return false;
  forget(stripe, id, slot.row());
  index.erase(hash, slot);
  return true;
}

int64_t Table::evict(const Expiry& expiry, int64_t now) {
  std::atomic<int64_t> total{0};
  const bool tracked = trackers() != nullptr;
  parallel_parts(kStripes, [&](int64_t stripe) {
    std::vector<int64_t> gone;
    {
      Locks<true> lock(*this, uint64_t{1} << stripe);
      total += contents_->stripes[stripe].index.erase_if([&](Slot slot) {
        const auto id = static_cast<int64_t>(slot.id());
        if (!expiry.stale(id, time_of(slot), now)) return false;
        forget(static_cast<int>(stripe), id, slot.row());
        if (tracked) gone.push_back(id);
        return true;
      });
    }
    note_removed(gone);
  });
  if (eviction_ && total) eviction_->full = false;
  return total;
}

int64_t Table::erase(const int64_t* ids, int64_t n) {
  int64_t erased = 0;
  std::vector<int64_t> gone;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = hash_of(ids[i]);
    const int stripe = stripe_of(hash);
    Locks<true> lock(*this, uint64_t{1} << stripe);
    if (!erase_row(stripe, hash, ids[i])) continue;
    ++erased;
    gone.push_back(ids[i]);
  }
  note_removed(gone);
  return erased;
}

void Table::clear() {
  const auto empty = empty_twin();
  swap_contents(*empty);
}

void Table::set_keeper(RowKeeper* keeper) {
  Locks<true> lock(*this, kAllStripes);
  keeper_ = keeper;
}

void Table::drop_keeper(const RowKeeper* keeper) {
  Locks<true> lock(*this, kAllStripes);
  if (keeper_ == keeper) keeper_ = nullptr;
}

void Table::set_layout(const Layout& layout) {
  auto same = [](const Segment& a, const Segment& b) {
    return a.dim == b.dim && a.opt == b.opt && a.codec == b.codec && a.state_bytes == b.state_bytes;
  };
  const auto &mine = layout_.segments, &other = layout.segments;
  if (layout.serving != layout_.serving || !std::equal(mine.begin(), mine.end(), other.begin(), other.end(), same))
    throw std::invalid_argument(
        "set_layout: the new layout must have segments with the same dims, optimizers and codecs as the table's");
  Locks<true> lock(*this, kAllStripes);
  std::copy(other.begin(), other.end(), layout_.segments.begin());
  std::copy(layout.fresh_state.begin(), layout.fresh_state.end(), layout_.fresh_state.begin());
}

void Table::swap_contents(Table& other) {
  if (other.layout_.stride != layout_.stride || other.layout_.row_bytes != layout_.row_bytes)
    throw std::invalid_argument("swap_contents: the other table's rows must have " + std::to_string(layout_.row_bytes) +
                                " bytes, got " + std::to_string(other.layout_.row_bytes));
  if (eviction_ && !other.eviction_) {  // no budget counts its rows: copy them to a table with one
    auto twin = empty_twin();
    for (int stripe = 0; stripe < kStripes; ++stripe) {
      Rows rows;
      other.snapshot(stripe, 0, &rows);
      if (rows.size() > 0) twin->load(rows);
    }
    eviction_->refused += twin->eviction_->evicted + twin->eviction_->refused;
    eviction_->raise_call(static_cast<uint32_t>(twin->max_update_time()));
    return swap_contents(*twin);
  }
  {
    Locks<true> lock(*this, kAllStripes);
    if (eviction_) contents_->trade_budgets(*other.contents_);
    std::swap(contents_, other.contents_);
    if (eviction_) {
      eviction_->full = false;
      contents_->share_spare(follows_.load());
    }
    if (epoch_.load()) {
      contents_->rows.track();
      oldest_epoch_.store(epoch_.fetch_add(1) + 1);
    }
  }
  const auto trackers = this->trackers();
  if (!trackers) return;
  for (int stripe = 0; stripe < kStripes; ++stripe) note_removed(other.ids(stripe));
  for (const Follower& follower : *trackers) follower.tracker->replaced();
}

// --- trackers -------------------------------------------------------------------------------------------------------

void Table::track(std::shared_ptr<Tracker> tracker, bool writes) {
  auto now = trackers();
  std::shared_ptr<Trackers> more;
  do {
    more = now ? std::make_shared<Trackers>(*now) : std::make_shared<Trackers>();
    more->push_back({tracker, writes});
  } while (!trackers_.compare_exchange_weak(now, more));
}

void Table::untrack(const std::shared_ptr<Tracker>& tracker) {
  auto now = trackers();
  std::shared_ptr<Trackers> fewer;
  do {
    if (!now) return;
    fewer = std::make_shared<Trackers>(*now);
    std::erase_if(*fewer, [&](const Follower& follower) { return follower.tracker == tracker; });
    if (fewer->empty()) fewer = nullptr;
  } while (!trackers_.compare_exchange_weak(now, fewer));
}

void Table::note_removed(const std::vector<int64_t>& ids) const {
  if (ids.empty()) return;
  if (const auto trackers = this->trackers())
    for (const Follower& follower : *trackers) follower.tracker->removed(ids.data(), static_cast<int64_t>(ids.size()));
}

}  // namespace shoal
