// Copies of rows: snapshots, walks, loading, and the changes since an epoch.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/thread_pool.h"
#include "table/contents.h"
#include "table/rounds.h"
#include "table/write.h"

namespace shoal {
namespace {

// Appends the rows with these numbers, in order.
void copy_rows(const RowArena& arena, const std::vector<uint32_t>& numbers, int32_t stride, int32_t row_bytes,
               std::vector<char>* out) {
  const size_t begin = out->size();
  out->resize(begin + numbers.size() * static_cast<size_t>(stride));
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (i + 16 < numbers.size()) prefetch(arena.row(numbers[i + 16]), row_bytes);
    std::memcpy(out->data() + begin + i * stride, arena.row(numbers[i]), static_cast<size_t>(row_bytes));
  }
}

}  // namespace

void Table::snapshot(int stripe, uint32_t changed_since, Rows* out) const {
  std::vector<uint32_t> numbers;
  Locks<false> lock(*this, uint64_t{1} << stripe);
  const Contents& contents = *contents_;
  const Moment moment = eviction_ ? eviction_->moment() : Moment{};
  contents.stripes[stripe].index.each([&](Slot slot) {
    if (changed_since && contents.rows.epoch(slot.row()) < changed_since) return;
    out->ids.push_back(static_cast<int64_t>(slot.id()));
    out->times.push_back(time_of(slot));
    if (eviction_) out->scores.push_back(moment.lasting(slot.time()));
    contents.rows.note_saved(slot.row());
    numbers.push_back(slot.row());
  });
  copy_rows(contents.rows, numbers, layout_.stride, layout_.row_bytes, &out->rows);
}

std::vector<int64_t> Table::ids(int stripe) const {
  std::vector<int64_t> out;
  Locks<false> lock(*this, uint64_t{1} << stripe);
  const auto& index = contents_->stripes[stripe].index;
  out.reserve(static_cast<size_t>(index.size()));
  index.each([&](Slot slot) { out.push_back(static_cast<int64_t>(slot.id())); });
  return out;
}

int64_t Table::walk(int stripe, int64_t place, int64_t limit, Rows* out) const {
  std::vector<uint32_t> numbers;
  Locks<false> lock(*this, uint64_t{1} << stripe);
  const Moment moment = eviction_ ? eviction_->moment() : Moment{};
  uint64_t next = contents_->stripes[stripe].index.visit(static_cast<uint64_t>(place), limit, [&](Slot slot) {
    out->ids.push_back(static_cast<int64_t>(slot.id()));
    out->times.push_back(time_of(slot));
    if (eviction_) out->scores.push_back(moment.lasting(slot.time()));
    numbers.push_back(slot.row());
  });
  copy_rows(contents_->rows, numbers, layout_.stride, layout_.row_bytes, &out->rows);
  return static_cast<int64_t>(next);
}

void Table::fetch(const int64_t* ids, int64_t n, Rows* out, uint8_t* found) const {
  std::vector<uint32_t> numbers;
  Locks<false> lock(*this, kAllStripes);
  const Moment moment = eviction_ ? eviction_->moment() : Moment{};
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = hash_of(ids[i]);
    Slot slot = contents_->stripes[stripe_of(hash)].index.find(hash, static_cast<uint64_t>(ids[i]));
    found[i] = static_cast<bool>(slot);
    if (!slot) continue;
    out->ids.push_back(ids[i]);
    out->times.push_back(time_of(slot));
    if (eviction_) out->scores.push_back(moment.lasting(slot.time()));
    numbers.push_back(slot.row());
  }
  copy_rows(contents_->rows, numbers, layout_.stride, layout_.row_bytes, &out->rows);
}

int64_t Table::fetch_bytes(const int64_t* ids, int64_t n, int64_t first, int64_t size, char* out,
                           int64_t* times) const {
  if (first < 0 || size < 0 || first + size > layout_.row_bytes)
    throw std::invalid_argument("fetch_bytes: the bytes must be within the row's 0.." +
                                std::to_string(layout_.row_bytes) + ", got " + std::to_string(size) + " bytes from " +
                                std::to_string(first));
  std::atomic<int64_t> found{0};
  Locks<false> lock(*this, kAllStripes);
  const Contents& contents = *contents_;
  parallel_for(n, 4096, [&](int64_t begin, int64_t end) {
    constexpr int64_t kAhead = 64;
    uint64_t hashes[kAhead];
    Slot slots[kAhead];
    int64_t own = 0;
    for (int64_t from = begin; from < end; from += kAhead) {
      const int64_t count = std::min(kAhead, end - from);
      for (int64_t i = 0; i < count; ++i) {
        hashes[i] = hash_of(ids[from + i]);
        __builtin_prefetch(contents.stripes[stripe_of(hashes[i])].index.home(hashes[i]));
      }
      for (int64_t i = 0; i < count; ++i) {
        slots[i] = contents.stripes[stripe_of(hashes[i])].index.find(hashes[i], static_cast<uint64_t>(ids[from + i]));
        if (slots[i] && size) prefetch(contents.rows.row(slots[i].row()) + first, static_cast<int32_t>(size));
      }
      for (int64_t i = 0; i < count; ++i) {
        if (times) times[from + i] = slots[i] ? time_of(slots[i]) : 0;
        char* to = out + (from + i) * size;
        if (slots[i]) {
          std::memcpy(to, contents.rows.row(slots[i].row()) + first, static_cast<size_t>(size));
          ++own;
        } else {
          std::memset(to, 0, static_cast<size_t>(size));
        }
      }
    }
    found += own;
  });
  return found;
}

void Table::load(const Rows& rows, bool written) {
  if (rows.times.size() != rows.ids.size() ||
      rows.rows.size() != rows.ids.size() * static_cast<size_t>(layout_.stride) ||
      (!rows.scores.empty() && rows.scores.size() != rows.ids.size()))
    throw std::invalid_argument("load: there must be a time and " + std::to_string(layout_.stride) +
                                " bytes per id, and a score per id or none, got " + std::to_string(rows.ids.size()) +
                                " ids, " + std::to_string(rows.times.size()) + " times, " +
                                std::to_string(rows.rows.size()) + " bytes and " + std::to_string(rows.scores.size()) +
                                " scores");
  if (rows.ids.empty()) return;
  const uint32_t latest = *std::max_element(rows.times.begin(), rows.times.end());
  raise_max_update_time(latest);
  if (eviction_ && !written) {
    bool known = !rows.scores.empty();
    for (uint64_t score : rows.scores) known &= eviction_->raise_clocks(score);
    if (!known) eviction_->raise_call(latest);
  }
  write({.kind = Kind::load, .ids = rows.ids.data(), .n = rows.size(), .rows = &rows, .restored = !written});
}

uint32_t Table::begin_epoch() {
  Locks<true> lock(*this, kAllStripes);
  contents_->rows.track();
  uint32_t epoch = epoch_.load() + 1;
  epoch_.store(epoch);
  uint32_t none = 0;
  oldest_epoch_.compare_exchange_strong(none, epoch);
  return epoch;
}

std::vector<int64_t> Table::removed_since(uint32_t since) const {
  std::vector<int64_t> ids;
  for (int i = 0; i < kStripes; ++i) {
    Locks<false> lock(*this, uint64_t{1} << i);
    const Stripe& stripe = contents_->stripes[i];
    for (auto [epoch, id] : stripe.removed)
      if (epoch >= since && !stripe.index.find(hash_of(id), static_cast<uint64_t>(id))) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

void Table::forget_before(uint32_t epoch) {
  Locks<true> lock(*this, kAllStripes);
  for (Stripe& stripe : contents_->stripes) {
    std::erase_if(stripe.removed, [&](const auto& entry) { return entry.first < epoch; });
    if (!contents_->budget || stripe.removed.size() > stripe.removed.capacity() / 4) continue;
    const size_t had = stripe.removed.capacity();
    stripe.removed.shrink_to_fit();
    contents_->budget->give(static_cast<int64_t>((had - stripe.removed.capacity()) * sizeof stripe.removed[0]));
  }
  if (oldest_epoch_.load() < epoch) oldest_epoch_.store(epoch);
}

}  // namespace shoal
